"""Merge gradients into buckets (the aim of MG-WFBP, Shi et al., INFOCOM 2019), optimally.

Legal for exact buckets: merging changes neither what is summed nor, up to the order of summation, the result. Asks
the cost model for the all-reduce of ranges of gradients. Without contention the result is optimal for any cost curve;
with it, the best found.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from planner.ir import Schedule
from planner.model.modes import best_of
from planner.model.problem import Problem
from planner.model.step import Overlap
from planner.passes.base import Candidate, Pass
from planner.search.merge import MergeProblem, MergeSolution, merge_exact
from planner.search.merge_contended import end_us, improve, merge_contended
from runtime.plan.transports import LIBRARY, Transport


def merge_problem(problem: Problem) -> MergeProblem:
    """Return the arrays that the dynamic programs work on."""
    # With several dtypes a range of a new dtype only adds messages, so a curve that never falls makes no falling cost.
    return MergeProblem.of(problem, problem.cost.all_reduce, problem.cost.all_reduce.non_decreasing)


@lru_cache(maxsize=4)
def merge_without_contention(problem: Problem) -> MergeSolution:
    """Return the optimum without contention, which is a lower bound with it; cached for pass and certificate."""
    return merge_exact(merge_problem(problem))


@dataclass(frozen=True, kw_only=True)
class Merge(Pass):
    name: ClassVar[str] = "merge"

    labels: int = 32
    """Labels that a prefix may keep when compute and network slow each other down; fewer where gradients are many."""

    def apply(self, schedule: Schedule, problem: Problem) -> Candidate:
        """Return the best merge of the gradients; with contention, never worse than the given buckets."""
        optimum = merge_without_contention(problem).stops
        if not problem.contended:
            return Candidate(schedule=Schedule.from_boundaries(optimum))
        overlap, arrays = Overlap.of(problem), merge_problem(problem)
        given = boundaries(schedule) or optimum
        found = merge_contended(arrays, overlap, self.labels, [optimum, given])
        starts = [(problem.count,), optimum, found, given]
        best = min(starts, key=lambda stops: (end_us(arrays, overlap, stops), len(stops)))
        better = [improve(arrays, overlap, stops) for stops in dict.fromkeys([best, found, optimum])]
        made = [Schedule.from_boundaries(stops) for stops in (*better, *starts)]
        return Candidate(schedule=best_of(problem, [*made, schedule]))


def boundaries(schedule: Schedule, transport: Transport = LIBRARY) -> tuple[int, ...] | None:
    """Return the boundaries of buckets; None unless these are runs of consecutive gradients, all of one transport."""
    stops = schedule.stops
    return stops if schedule.with_update_of(None) == Schedule.from_boundaries(stops, transport) else None
