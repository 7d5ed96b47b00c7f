"""Merge gradients into buckets (the aim of MG-WFBP, Shi et al., INFOCOM 2019), optimally.

Legal for exact buckets: merging changes neither what is summed nor, up to the order of summation, the result. Asks
the cost model for the all-reduce of ranges of gradients. Without contention the result is optimal for any cost curve;
with it, the best found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from planner.ir import TIE, Schedule
from planner.model.modes import step_us
from planner.model.problem import Problem
from planner.model.step import Overlap
from planner.passes.base import Pass, Result
from planner.search.merge import MergeProblem, MergeSolution, merge_exact
from planner.search.merge_contended import end_us, improve, merge_contended
from runtime.plan.transports import LIBRARY, Transport


def merge_problem(problem: Problem) -> MergeProblem:
    """The arrays that the dynamic programs work on."""
    # With several dtypes a range of a new dtype only adds messages, so a curve that never falls makes no falling cost.
    return MergeProblem.of(problem, problem.cost.all_reduce, problem.cost.all_reduce.non_decreasing)


@lru_cache(maxsize=4)
def merge_without_contention(problem: Problem) -> MergeSolution:
    """The factor-free optimum: the answer without contention, a lower bound with it. Kept: pass and certificate ask."""
    return merge_exact(merge_problem(problem))


@dataclass(frozen=True, kw_only=True)
class Merge(Pass):
    name: ClassVar[str] = "merge"

    labels: int = 32
    """Labels that a prefix may keep when compute and network slow each other down; fewer where gradients are many."""

    def apply(self, schedule: Schedule, problem: Problem) -> Result:
        """The best merge of the gradients: without contention whatever the buckets were before, with it never worse."""
        optimum = merge_without_contention(problem).stops
        if not problem.contended:
            return Result(schedule=Schedule.from_boundaries(optimum))
        overlap, arrays = Overlap.of(problem), merge_problem(problem)
        given = boundaries(schedule) or optimum
        found = merge_contended(arrays, overlap, self.labels, [optimum, given])
        starts = [(problem.count,), optimum, found, given]
        best = min(starts, key=lambda stops: (end_us(arrays, overlap, stops), len(stops)))
        better = [improve(arrays, overlap, stops) for stops in dict.fromkeys([best, found, optimum])]
        made = [Schedule.from_boundaries(stops) for stops in (*better, *starts)]
        return Result(schedule=best_of(problem, [*made, schedule]))


def boundaries(schedule: Schedule, transport: Transport = LIBRARY) -> tuple[int, ...] | None:
    """Where the buckets stop; None where they are not runs of consecutive gradients, of one transport."""
    stops = schedule.stops
    return stops if replace(schedule, norms=None) == Schedule.from_boundaries(stops, transport) else None


def best_of(problem: Problem, candidates: list[Schedule]) -> Schedule:
    """The schedule of the shortest step; among equals the one with the fewest buckets, then the first given."""
    times_us = [step_us(problem, candidate) for candidate in candidates]
    limit_us = min(times_us) * (1.0 + TIE)
    equals = [candidate for candidate, time_us in zip(candidates, times_us, strict=True) if time_us <= limit_us]
    return min(equals, key=lambda candidate: len(candidate.buckets))
