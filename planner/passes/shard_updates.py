"""Sharding the update: norms of layers and operators of matrices (parallel tensor operator; CommLib, Shi et al., MLSys
2021, Sec. 4.2), or the whole step, each updating its part of the weights (as ZeRO-1; Rajbhandari et al., SC 2020).

Legal for exact plans: a layer's norms are the same bits whoever computes them, and an optimizer that treats every
element by itself gives the same weights whoever updates them. Asks for the measured time of each layer's norms, the
update, and the cost model for reduce-scatter and all-gather. Norms are shared where that is predicted to make the
update shorter; the step where it makes the training step 2 % shorter, or where nothing else fits into memory. Scripts
then have parts of gradients alone, so `planner optimize` lets the pass do so only where that is allowed
(`planner.decide.plan_request`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from planner.ir import OperatorShares, Schedule, Synchronous
from planner.model.modes import best_of, step_us
from planner.model.modes.sharded import (
    Sharded,
    can_share,
    costs_known,
    memory_bytes,
    needs_more_memory,
    own_update_us,
    push_us,
    replicated_bytes,
    sharded_bytes,
)
from planner.model.norms import replicated_us, shared_us
from planner.model.owned import longest_us, whole_gradients
from planner.model.problem import Problem
from planner.passes.base import Bound, Candidate, Pass
from planner.passes.delay import push_bucketings
from planner.passes.merge import boundaries
from planner.passes.select import select
from planner.search.merge import MergeProblem, merge_exact
from planner.search.owners import best_owners
from planner.search.partition import partition_of
from planner.search.whole_owners import improve_owners, owners_of_buckets

METHODS = ("cpsat", "lpt")
STEPS = ("auto", "always", "never")
DROPPED = 16
"""Largest number of buckets that are tried to be merged with their neighbours."""


@dataclass(frozen=True, kw_only=True)
class ShardUpdates(Pass):
    """Sharding of norms, or of the whole optimizer step."""

    name: ClassVar[str] = "shard_updates"
    decides_update: ClassVar[bool] = True

    method: str = "cpsat"
    """Algorithm that splits layers over ranks: `cpsat` continues where `lpt`, the longest first, may not be best."""
    step: str = "auto"
    """Whether the step is sharded: `auto`, `always` where the optimizer can, or `never`."""
    memory_mib: float = 0.0
    """Memory of a rank for weights, gradients, the optimizer's state and activations; 0: that of the profile."""

    known_values: ClassVar = {"method": METHODS, "step": STEPS}

    def apply(self, schedule: Schedule, problem: Problem) -> Candidate:
        """Return the schedule with norms or the step sharded where that pays, and without where it does not."""
        whole = schedule.unshared
        if whole.mode != Synchronous():  # ranks update by themselves
            return Candidate(schedule=whole)
        replicated = replace(whole, norms=self._norm_owners(problem), operators=self._operator_shares(problem))
        candidates = [Candidate(schedule=replicated, memory_bytes=replicated_bytes(problem))]
        if (sharded := self.sharded(whole, problem)) is not None:
            candidates.append(sharded)
        chosen, _ = select(problem, candidates, memory_bytes(problem, self.memory_mib))
        return replace(chosen, replicated=replicated)

    def _norm_owners(self, problem: Problem) -> tuple[int, ...] | None:
        """Return the ranks that compute norms of layers; None if every rank does, as sharing them does not pay."""
        if not problem.norm_layers or problem.ranks == 1:
            return None
        owners = partition_of(problem, self.method).owners
        return owners if shared_us(problem, owners) < replicated_us(problem) else None

    def _operator_shares(self, problem: Problem) -> OperatorShares | None:
        """Return the owners of operators; None if every rank computes all, as sharing them does not pay."""
        found = best_owners(problem)
        return None if found is None else found.shares

    def sharded(self, schedule: Schedule, problem: Problem) -> Candidate | None:
        """Return the best buckets for a sharded step; None where the step cannot be sharded, or may not.

        Args:
            schedule: buckets for a step in which each rank updates all weights.
            problem: the step.
        """
        if self.step == "never" or not can_share(problem):
            return None
        if any(bucket.features for bucket in schedule.buckets) and not (
            self.step == "always" or needs_more_memory(problem, self.memory_mib)
        ):
            return None  # intra-node and inter-node phases, which parts of all ranks do not have
        late = MergeProblem.of(problem, partial(push_us, problem), non_decreasing=False)
        options = dict.fromkeys(
            [*push_bucketings(problem, schedule), Schedule.from_boundaries(merge_exact(late).stops)]
        )
        found = best_of(problem, [replace(one, mode=mode) for one in options for mode in _modes(problem, one)])
        found = improve_owners(problem, _dropped(problem, found))
        return Candidate(
            schedule=found,
            bound=sharded_bound(problem),
            memory_bytes=sharded_bytes(problem, found),
            measured=costs_known(problem),
            required=self.step == "always",
        )


def _modes(problem: Problem, schedule: Schedule) -> list[Sharded]:
    """Return sharded modes that are tried: in equal parts, or with owners, where parameters are updated whole."""
    if not whole_gradients(problem):
        return [Sharded()]
    return [Sharded(owners=owners) for owners in owners_of_buckets(problem, schedule)]


def sharded_bound(problem: Problem) -> Bound:
    """Return the bound of sharded steps."""
    return Bound(
        step_us=problem.compute_end_us + max([own_update_us(problem), *longest_us(problem)]),
        method="search over buckets of a step that ranks share",
        note="the bound is computation alone",
    )


def _dropped(problem: Problem, schedule: Schedule) -> Schedule:
    """Return fewer buckets, as long as that makes the step shorter: each has to be gathered, too."""
    while (stops := boundaries(schedule.unshared)) is not None and 1 < len(stops) <= DROPPED:
        fewer = [Schedule.from_boundaries(stops[:i] + stops[i + 1 :]) for i in range(len(stops) - 1)]
        found = best_of(problem, [replace(one, mode=schedule.mode) for one in fewer])
        if step_us(problem, found) > step_us(problem, schedule):
            break
        schedule = found
    return schedule
