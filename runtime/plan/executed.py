"""Executed part of a plan: the part by which two plans train the same way or do not. Torch-free."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from runtime.plan.document import (
    CompressorSpec,
    ModelReference,
    NormPlan,
    OperatorPlan,
    PhasePlan,
    Plan,
    PlanBucket,
    PlanWorld,
    StepPlan,
    UpdatePlan,
)
from runtime.plan.fully_sharded import FullyShardPlan
from runtime.plan.measured_accuracy import AccuracyMeasured

USUAL_OPTIONS = {
    "selector": "exact", "error_feedback": True, "rounding": "nearest", "links": "all", "block": 256,
}  # fmt: skip
"""Options of compressors → the value that leaving them out stands for."""

FOR_READERS = frozenset((
    "predicted", "baselines", "certificate", "scaling", "frontier", "delays", "updaters", "loading", "sources",
    "alternatives", "accuracy_measured", "notes",
))  # fmt: skip
"""Fields of a plan that nothing executes."""


def executed_part(plan: Plan) -> Plan:
    """Return the plan without what only its reader needs: names, predictions, reasons, notes, sources, alternatives.

    What is spelt as it is by default is left out, so that two plans execute the same where their parts are equal.
    """
    order = plan.phase_order
    if order is not None and list(order) == sorted(order, key=lambda entry: (sum(entry), entry[0])):
        order = None
    without: dict[str, Any] = {each.name: each.default for each in fields(plan) if each.name in FOR_READERS}
    return replace(
        plan,
        **without,
        model=ModelReference(name="", fingerprint=plan.model.fingerprint),
        world=PlanWorld(ranks=plan.world.ranks, nodes=plan.world.nodes),
        interface=plan.interfaces or None,
        buckets=tuple(map(executed_bucket, plan.buckets)),
        phases=plan.phases
        and tuple(PhasePlan(plan=executed_part(one.plan), until_step=one.until_step) for one in plan.phases),
        fsdp2=None if plan.fsdp2 is None else _executed_fsdp2(plan.fsdp2),
        local_async=plan.local_async and replace(plan.local_async, synchronous=plan.local_async.synchronous or None),
        fallback=None if plan.fallback is None else executed_part(plan.fallback),
        phase_order=order,
        updates=_executed_updates(plan),
    )


def executed_digest(plan: Plan) -> str:
    """Return the digest of the executed part of a plan, whatever its fallback is."""
    return executed_part(replace(plan, fallback=None)).digest()


def accuracy_of(plan: Plan) -> AccuracyMeasured | None:
    """Return what was measured of a plan as it is; None: nothing, or before what it executes was changed."""
    measured = plan.accuracy_measured
    return measured if measured is not None and measured.executed == executed_digest(plan) else None


def cost_line(plan: Plan) -> str | None:
    """Return what a plan costs in accuracy, as text; None for an exact plan that was not measured."""
    if (measured := accuracy_of(plan)) is not None:
        return f"accuracy: measured, {measured}"
    if plan.accuracy == "exact":
        return None
    what = "not measured on this job"
    if plan.accuracy_measured is not None:
        what = "measured before the plan was changed, not since"
    return f"accuracy: {what} (planner compare JOB --plan PLAN --learn STEPS)"


def executed_bucket(bucket: PlanBucket) -> PlanBucket:
    """Return a bucket without its size and reason, its compressor's options left out where they are the usual ones."""
    spec = bucket.compressor
    usual: dict[str, Any] = {name: None for name, value in USUAL_OPTIONS.items() if getattr(spec, name) == value}
    # A density is of the whole bucket, and k is by layer, unless they say so themselves.
    if spec.scope == ("bucket" if spec.k is None else "layer"):
        usual["scope"] = None
    return replace(bucket, compressor=replace(spec, **usual), size_bytes=None, reason=None)


def spelled_options(spec: CompressorSpec) -> str:
    """Return a compressor with its options as text: `topk k=fc:51,conv:120`."""
    given = {each.name: getattr(spec, each.name) for each in fields(spec) if getattr(spec, each.name) is not None}
    name = given.pop("name")
    if "k" in given:
        given["k"] = ",".join(f"{layer}:{count}" for layer, count in given["k"].items())
    return " ".join([name, *(f"{option}={value}" for option, value in given.items())])


def _executed_fsdp2(plan: FullyShardPlan) -> FullyShardPlan:
    return replace(plan, peak_bytes=None, memory_bytes=None, lost_without_buffers_us=None, frontier=None)


def _executed_updates(plan: Plan) -> UpdatePlan | None:
    updates = plan.updates
    norms = updates.norms if updates is not None else None
    shared = None if norms is None or norms.shares is None else NormPlan(shares=norms.shares)
    operator = updates.operator if updates is not None else None
    owned = None
    if operator is not None and operator.owners:
        owned = OperatorPlan(
            owners=dict(sorted(operator.owners.items())), gathers=operator.messages, inside=operator.inside or None,
            batched=operator.batched, tolerance=operator.tolerance,
        )  # fmt: skip
    step = None
    if updates is not None and updates.step is not None and updates.step.sharded:
        gathers = plan.gathers
        usual = tuple((bucket,) for bucket in reversed(range(len(plan.buckets))))
        step = StepPlan(
            sharded=True,
            owners=dict(sorted((updates.step.owners or {}).items())) or None,
            weights=updates.step.weights,
            gather="forward" if gathers is not None else None,
            gathers=None if gathers == usual else gathers,
        )
    if shared is None and owned is None and step is None:
        return None
    return UpdatePlan(norms=shared, operator=owned, step=step)
