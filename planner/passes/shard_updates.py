"""What ranks share of the update: norms of layers (parallel tensor operator; CommLib, Shi et al., MLSys 2021, Sec.
4.2), or the whole step, each updating its part of the weights (as ZeRO-1; Rajbhandari et al., SC 2020).

Legal for exact plans: a layer's norms are the same bits whoever computes them, and an optimizer that treats every
element by itself gives the same weights whoever updates them. Asks for the measured time of each layer's norms, the
update, and the cost model for reduce-scatter and all-gather. Norms are shared where that is predicted to make the
update shorter; the step where it makes the training step 2 % shorter, or where nothing else fits into memory. Scripts
then have parts of gradients alone, so `planner optimize` lets the pass do so only where that is allowed
(`planner.decide.sharded_step`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from planner.ir import Schedule, Synchronous
from planner.model.modes import step_us
from planner.model.modes.sharded import (
    Sharded,
    can_share,
    costs_known,
    memory_bytes,
    not_shared_reason,
    own_update_us,
    push_us,
    replicated_bytes,
    saves_memory,
)
from planner.model.norms import replicated_us, shared_us
from planner.model.problem import Problem
from planner.passes.base import GAIN, Bound, Pass, Result
from planner.passes.delay import candidates
from planner.passes.merge import best_of, boundaries
from planner.search.merge import MergeProblem, merge_exact
from planner.search.partition import partition_of
from runtime.errors import InputError

METHODS = ("cpsat", "lpt")
STEPS = ("auto", "always", "never")
DROPPED = 16
"""So many buckets at the most are tried to be merged with their neighbours."""


@dataclass(frozen=True, kw_only=True)
class ShardUpdates(Pass):
    name: ClassVar[str] = "shard_updates"
    decides_update: ClassVar[bool] = True

    method: str = "cpsat"
    """How layers are split over ranks: `cpsat` looks on where `lpt`, the longest first, may not be best."""
    step: str = "auto"
    """Whether ranks share the step: `auto`, `always` where the optimizer can, or `never`."""
    memory_mib: float = 0.0
    """What each rank has for weights, gradients, the optimizer's state and activations; 0: what the profile says."""

    def __post_init__(self) -> None:
        for name, value, known in (("method", self.method, METHODS), ("step", self.step, STEPS)):
            if value not in known:
                raise InputError(
                    f"--passes: shard_updates{{{name}={value}}}: expected one of: {', '.join(known)}; correct it"
                )

    def apply(self, schedule: Schedule, problem: Problem) -> Result:
        """The schedule with norms or the step shared, where that pays; without, where it does not."""
        whole = schedule.unshared
        if whole.mode != Synchronous():  # ranks update by themselves
            return Result(schedule=whole)
        found = self.shared_step(whole, problem)
        if found is not None and self.takes(whole, found, problem):
            return Result(schedule=found, bound=shared_bound(problem))
        if not problem.norm_layers or problem.ranks == 1:
            return Result(schedule=whole)
        owners = partition_of(problem, self.method).owners
        pays = shared_us(problem, owners) < replicated_us(problem)
        return Result(schedule=replace(whole, norms=owners if pays else None))

    def shared_step(self, schedule: Schedule, problem: Problem) -> Schedule | None:
        """The best buckets for a shared step; None where the step cannot be shared, or may not."""
        if self.step == "never" or not can_share(problem):
            return None
        if any(bucket.features for bucket in schedule.buckets) and not (
            self.memory_requires_sharding(problem) or self.step == "always"
        ):
            return None  # phases on two kinds of link, which parts of all ranks do not have
        late = MergeProblem.of(problem, partial(push_us, problem), non_decreasing=False)
        options = dict.fromkeys([*candidates(problem, schedule), Schedule.from_boundaries(merge_exact(late).stops)])
        return _dropped(problem, best_of(problem, [replace(option, mode=Sharded()) for option in options]))

    def memory_requires_sharding(self, problem: Problem) -> bool:
        """Whether what every rank would hold does not fit into its memory."""
        has, takes = memory_bytes(problem, self.memory_mib), replicated_bytes(problem)
        return has is not None and takes is not None and takes > has

    def takes(self, whole: Schedule, found: Schedule, problem: Problem) -> bool:
        """Whether the step is shared as in `found`, and not done by every rank as in `whole`."""
        if self.step == "always" or (self.memory_requires_sharding(problem) and saves_memory(problem, found)):
            return True
        return costs_known(problem) and step_us(problem, found) <= step_us(problem, whole) * (1.0 - GAIN)

    def memory_limit_unused_reason(self, problem: Problem) -> str:
        """Why a limit of memory decides nothing here; empty where it may, or where other words say why."""
        reason = not_shared_reason(problem)
        if reason is not None:
            return reason
        optimizer = problem.profile.compute.optimizer
        if optimizer is not None and optimizer.state_bytes is None:
            return "the profile does not say what the optimizer keeps: profile again"
        return ""


def shared_bound(problem: Problem) -> Bound:
    """Return the bound of steps that ranks share."""
    return Bound(
        step_us=problem.compute_end_us + own_update_us(problem),
        method="search over buckets of a step that ranks share",
        note="the bound is computation alone",
    )


def _dropped(problem: Problem, schedule: Schedule) -> Schedule:
    """Fewer buckets, as long as that makes the step shorter: each has to be gathered, too."""
    while (stops := boundaries(schedule.unshared)) is not None and 1 < len(stops) <= DROPPED:
        fewer = [Schedule.from_boundaries(stops[:i] + stops[i + 1 :]) for i in range(len(stops) - 1)]
        found = best_of(problem, [replace(one, mode=Sharded()) for one in fewer])
        if step_us(problem, found) > step_us(problem, schedule):
            break
        schedule = found
    return schedule
