"""The variants of a comparison for FSDP2: a plan's wrapping, and what users have instead. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planner.comparison.report import Comparison, WrappingRow, timing, values_by_name
from planner.comparison.statistics import median_interval, ratio_interval, verdict
from planner.comparison.variants import PLAN, Variant
from planner.fsdp2.inputs import Setting, baselines_of, make_setting
from planner.fsdp2.simulator import simulate
from runtime.errors import InputError
from runtime.plan import FullyShardPlan, Plan

if TYPE_CHECKING:
    from planner.comparison.measure import Measured

ALIKE = 1e-3
"""Difference of weights, relative to the largest of a parameter, below which sums were only taken in another order."""


@dataclass(frozen=True, kw_only=True)
class Wrapping(Variant):
    """A model wrapped by FSDP2."""

    plan: Plan
    """The plan that wraps it."""
    peak_bytes: int | None = None
    """Predicted peak memory of one rank."""

    @property
    def spec(self) -> FullyShardPlan:
        """Return its groups and their prefetches."""
        assert self.plan.fsdp2 is not None
        return self.plan.fsdp2

    @property
    def parts(self) -> int:
        """Number of groups, that of the root included."""
        return len(self.spec.groups) + 1


def make_wrappings(plan: Plan, where: str, profile: str | None) -> list[Wrapping]:
    """Return what is compared, the usual wrapping first.

    Args:
        plan: to judge.
        where: its file, for messages.
        profile: file of the profile that it was made from.

    Raises:
        InputError: it is no plan for FSDP2, or there is no profile of its model.
    """
    if plan.fsdp2 is None:
        raise InputError(
            f"{where}: found a plan with buckets, expected one for FSDP2: leave --parallel out, or make one"
        )
    if profile is None:
        raise InputError(
            "--profile: missing; expected the profile that the plan was made from, whose modules the usual wrappings "
            "are made of: add it"
        )
    setting = make_setting(profile, ranks=plan.world.ranks)
    known = set(setting.shape.spans)
    unknown = [module for group in plan.fsdp2.groups for module in group if module not in known]
    if unknown:
        raise InputError(f"--profile: found no module {unknown[0]!r} of {where}, expected the profile it was made from")
    return wrappings_of(setting, plan)


def wrappings_of(setting: Setting, plan: Plan) -> list[Wrapping]:
    """Return what users have instead, the usual wrapping first, and the plan's wrapping, each with its prediction."""
    assert plan.fsdp2 is not None
    found = []
    for name, spec in {**baselines_of(setting), PLAN: plan.fsdp2}.items():
        step = simulate(setting.shape, spec, setting.costs(spec.shard_ranks), setting.executor, bars=False)
        wrapping = Wrapping(name=name, plan=replace(plan, fsdp2=spec), predicted_us=step.iteration_us)
        found.append(replace(wrapping, peak_bytes=step.peak_bytes))
    return found


def summarize_wrappings(measured: Sequence[Measured]) -> Comparison:
    """Compare from what each rank saw, in order of rank."""
    values = values_by_name(measured)
    rows = [
        WrappingRow(
            **timing(record.variant, median_interval(values[record.variant.name]), record.variant.predicted_us),
            groups=record.variant.parts, difference=max(rank.records[index].difference for rank in measured),
        )
        for index, record in enumerate(measured[0].records)
    ]  # fmt: skip
    rounds, steps = values[PLAN].shape
    odd = [row.name for row in rows if row.difference > ALIKE]
    unlike = (
        f"{', '.join(odd)}: weights differ from those of a group for each block by more than {ALIKE:g}, though all "
        f"were given the same batches and seeds; expected a job in which batch(step, rank) and the loss depend on "
        f"nothing else, such as a counter or a generator of their own"
    )
    return Comparison(
        rows=tuple(rows),
        verdicts=tuple(
            verdict(ratio_interval(values[PLAN], values[row.name]), "the plan", row.name, steps)
            for row in rows
            if row.name != PLAN
        ),
        rounds=rounds, steps=rounds * steps, ranks=len(measured), differences=(unlike,) if odd else (),
    )  # fmt: skip
