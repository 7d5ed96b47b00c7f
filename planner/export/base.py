"""The common parts of export forms: the export, and what stock all-reduces lose of a plan. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.emit.lower import predict
from planner.ir import Bucket, Schedule
from planner.model.problem import Problem
from runtime.errors import InputError
from runtime.plan import Plan, PlanBucket
from runtime.plan.document import NO_COMPRESSION

NO_PRICE = "what that costs is known with --profile"


@dataclass(frozen=True, kw_only=True)
class Export:
    """A plan for a stock executor."""

    text: str
    """The contents of the file."""
    document: dict[str, Any]
    """The same for `--json`."""
    notes: tuple[str, ...]
    """Parts that could not be expressed, with their costs, and how the file is used."""
    data: bytes | None = None
    """The contents of a file that is no text."""


def bucket_sizes(plan: Plan, problem: Problem | None) -> list[int]:
    """Return the bytes of each bucket. Raises InputError where neither plan nor profile says them."""
    if problem is not None:
        size_bytes = {g.name: g.size_bytes for g in problem.profile.compute.gradients}
        return [sum(size_bytes[name] for name in bucket.gradients) for bucket in plan.buckets]
    sizes = [bucket.size_bytes for bucket in plan.buckets]
    if None in sizes:
        raise InputError(
            f"$.buckets[{sizes.index(None)}].size_bytes: found none, expected the bytes of each bucket; give the "
            f"profile that the plan was made from with --profile, or make the plan with `planner optimize`"
        )
    return [size for size in sizes if size is not None]


def members_of(plan: Plan, problem: Problem) -> list[list[int]]:
    """Return the gradients of each bucket, by index."""
    index = {gradient.name: at for at, gradient in enumerate(problem.profile.compute.gradients)}
    return [[index[name] for name in bucket.gradients] for bucket in plan.buckets]


def stock_us(problem: Problem, buckets: Sequence[Sequence[int]]) -> float:
    """Return the simulated step of the library's all-reduces of these buckets; gradients by index."""
    schedule = Schedule(buckets=tuple(Bucket(tuple(members)) for members in buckets))
    return predict(problem, schedule).iteration_us


def cost(more_us: float | None) -> str:
    """Return by how many milliseconds a step is longer, as text."""
    if more_us is None:
        return NO_PRICE
    return f"the step is predicted {abs(more_us) / 1e3:.3g} ms {'longer' if more_us >= 0.0 else 'shorter'} for it"


def sent_whole(bucket: PlanBucket) -> PlanBucket:
    """Return the bucket by the library's all-reduce, all of it."""
    return replace(bucket, collective="all_reduce", algorithm="library", compressor=NO_COMPRESSION)


def stock_plan(plan: Plan) -> tuple[Plan, list[str]]:
    """Return the plan of whole synchronous all-reduces that stands in for it, and what that loses in words.

    Prices are the plan's own predictions; None where it does not say. Buckets stay where there is no `fallback`.
    """
    notes = []
    step_us = plan.predicted.iteration_us if plan.predicted else None
    if plan.shares is not None and len(set(plan.shares.values())) > 1:
        notes.append(
            f"shares of the batch cannot be expressed, DDP averages ranks as equals: multiply each rank's loss by its "
            f"samples in the step x {len(plan.shares)} / those of all ranks ({sum(plan.shares.values())})"
        )
    if plan.accuracy != "exact" or plan.local_async is not None:
        named = {"local updaters": plan.local_async, "the delay": plan.delay, "outer steps": plan.outer}
        what = next((name for name, spec in named.items() if spec is not None), "compression")
        stand_in = plan.fallback or replace(
            plan, accuracy="exact", delay=None, outer=None, local_async=None, predicted=None,
            buckets=tuple(map(sent_whole, plan.buckets)),
        )  # fmt: skip
        fallback_us = plan.fallback.predicted.iteration_us if plan.fallback and plan.fallback.predicted else None
        which = "the exact plan beside it" if plan.fallback else "its buckets, sent whole,"
        notes.append(f"{what} cannot be expressed: {which} stands in; {_lost(fallback_us, step_us)}")
        plan = stand_in
    step = plan.updates.step if plan.updates else None
    if step is not None and step.sharded:
        shared_us = step.late_us if plan.gathers else step.sharded_us
        lost = _lost(step.replicated_us, shared_us)
        notes.append(f"the sharded optimizer step cannot be expressed: every rank updates all weights; {lost}")
    operator = plan.updates.operator if plan.updates else None
    if operator is not None and operator.owners:
        lost = _lost(operator.replicated_us, operator.shared_us)
        notes.append(f"owners of operators cannot be expressed: every rank computes all of them; {lost}")
    norms = plan.updates.norms if plan.updates else None
    if norms is not None and norms.shares is not None:
        lost = _lost(norms.replicated_us, norms.shared_us)
        notes.append(f"shared layer norms cannot be expressed: every rank computes all of them; {lost}")
    return plan, notes


def _lost(replicated_us: float | None, shared_us: float | None) -> str:
    """Return what it costs, as text, that ranks share no work."""
    return cost(None if replicated_us is None or shared_us is None else replicated_us - shared_us)
