"""Optimal merging on one network without contention: an exact dynamic program for any cost curve.

With prefix finishing times f and ready times r: f(i) = min over j < i of max(f(j), r_i) + T(j, i). Finishing a prefix
earlier is never worse, so this is exact for every T that does not depend on when a bucket starts. O(L²) in the worst
case, vectorized; where T is non-decreasing, only prefixes that end near or after r_i are looked at.

Among optimal schedules: the fewest buckets, then the earliest boundaries (lexicographically, in readiness order).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.ir import TIE, Places
from planner.model.problem import Problem

Floats = NDArray[np.float64]
CostOf = Callable[[Places, Places], Floats]
"""T of buckets by their starts and stops: one of them, a slice or an array."""

TIE_WORK = 150_000_000
"""Pairs of boundaries that breaking ties may look at (about a second); beyond it, ties are broken along one optimum."""


@dataclass(frozen=True)
class MergeProblem:
    """Arrays of one merge problem.

    Args:
        ready_us: when gradient i (0-based) is ready, shape (count,).
        cost_us: `cost_us(starts, stops)` gives T of [start, stop) for a slice of starts and one stop, the reverse, or
            arrays.
        non_decreasing: whether a longer range never costs less.
    """

    ready_us: Floats
    cost_us: CostOf
    non_decreasing: bool

    @classmethod
    def of(cls, problem: Problem, times_us: Callable[[Floats], Floats], non_decreasing: bool) -> MergeProblem:
        """Return the arrays of a step whose messages take `times_us` by their bytes."""
        return cls(problem.ready_us, partial(problem.range_time_us, times_us), non_decreasing)

    @property
    def count(self) -> int:
        return len(self.ready_us)

    def end_us(self, stops: Iterable[int]) -> float:
        """Return the end of the last of these buckets."""
        time_us = 0.0
        for start, stop in pairwise((0, *stops)):
            time_us = max(time_us, float(self.ready_us[stop - 1])) + float(self.cost_us(start, stop))
        return time_us


@dataclass(frozen=True)
class MergeSolution:
    """Stops of buckets, the end of the last one, and whether ties were broken exactly."""

    stops: tuple[int, ...]
    end_us: float
    ties_exact: bool = True


def merge_exact(problem: MergeProblem, tie_work: int = TIE_WORK) -> MergeSolution:
    """Return the optimal buckets; the module's text has the objective and the order among equals."""
    finish_us, predecessor = finish_times(problem)
    end_us = float(finish_us[-1])
    deadline_us = end_us * (1.0 + TIE)
    stops = _fewest_buckets(problem, finish_us, deadline_us, tie_work)
    if stops is not None and problem.end_us(stops) <= deadline_us * (1.0 + TIE):
        return MergeSolution(stops, problem.end_us(stops))
    stops = _drop_boundaries(problem, tuple(walk(predecessor, problem.count)), deadline_us)
    return MergeSolution(stops, problem.end_us(stops), ties_exact=False)


def walk(predecessor: NDArray[np.int64], last: int) -> list[int]:
    """Return the places that lead to the last one, each the predecessor of the next; 0 is left out."""
    walked = [last]
    while predecessor[walked[-1]] > 0:
        walked.append(int(predecessor[walked[-1]]))
    return walked[::-1]


def finish_times(problem: MergeProblem) -> tuple[Floats, NDArray[np.int64]]:
    """Return f(i) for i in 0..count, and the start of the last bucket of a schedule that attains it."""
    count, ready_us = problem.count, problem.ready_us
    finish_us = np.zeros(count + 1)
    predecessor = np.zeros(count + 1, dtype=np.int64)
    low = 0
    for i in range(1, count + 1):
        ready = ready_us[i - 1]
        if problem.non_decreasing:
            # Prefixes that end before `ready` all let the bucket start then: the longest one leaves the least to send.
            while low + 1 < i and finish_us[low + 1] <= ready:
                low += 1
        candidates = np.maximum(finish_us[low:i], ready) + problem.cost_us(slice(low, i), i)
        best = int(candidates.argmin())
        finish_us[i], predecessor[i] = candidates[best], low + best
    return finish_us, predecessor


def merge_by_count(problem: MergeProblem, most: int) -> list[MergeSolution]:
    """Return the optimal buckets of each number of them, from 1 to at most `most`.

    Among optimal ones: the earliest last boundary, then the earliest one before it.
    """
    count = problem.count
    most = min(most, count)
    finish_us = np.full((most + 1, count + 1), np.inf)
    finish_us[0, 0] = 0.0
    predecessor = np.zeros((most + 1, count + 1), dtype=np.int64)
    for i in range(1, count + 1):
        candidates = np.maximum(finish_us[:-1, :i], problem.ready_us[i - 1]) + problem.cost_us(slice(0, i), i)
        predecessor[1:, i] = candidates.argmin(axis=1)
        finish_us[1:, i] = candidates.min(axis=1)
    found = []
    for number in range(1, most + 1):
        walked = [count]
        for left in range(number, 1, -1):
            walked.append(int(predecessor[left, walked[-1]]))
        found.append(MergeSolution(tuple(reversed(walked)), float(finish_us[number, count])))
    return found


def _fewest_buckets(problem: MergeProblem, finish_us: Floats, deadline_us: float, work: int) -> tuple[int, ...] | None:
    """Return the first, in the order among equals, of the schedules within the deadline; None if `work` ran out.

    Level m holds, for each prefix j, the latest time at which it may end so that the rest can be sent in m buckets.
    """
    count, ready_us = problem.count, problem.ready_us
    level = np.full(count + 1, -np.inf)
    level[count] = deadline_us
    levels, best = [level], level.copy()
    active = np.array([count])
    while levels[-1][0] < 0.0:
        level = np.full(count + 1, -np.inf)
        for i in active.tolist():
            work -= i
            if work < 0:
                return None
            latest_us = levels[-1][i] - problem.cost_us(slice(0, i), i)
            usable = (latest_us >= ready_us[i - 1]) & (latest_us >= finish_us[:i])
            np.maximum(level[:i], np.where(usable, latest_us, -np.inf), out=level[:i])
        # A level that allows no later end than one with fewer buckets is of no use.
        active = np.flatnonzero(level > best)
        if active.size == 0:
            return None
        best = np.maximum(best, level)
        levels.append(level)
    return _earliest_boundaries(problem, levels)


def _earliest_boundaries(problem: MergeProblem, levels: list[Floats]) -> tuple[int, ...] | None:
    stops: list[int] = []
    position, time_us = 0, 0.0
    for level in reversed(levels[:-1]):
        stop = slice(position + 1, problem.count + 1)
        end_us = np.maximum(problem.ready_us[position:], time_us) + problem.cost_us(position, stop)
        allowed = np.flatnonzero(end_us <= level[stop] * (1.0 + TIE))
        if allowed.size == 0:
            return None
        time_us = float(end_us[allowed[0]])
        position += 1 + int(allowed[0])
        stops.append(position)
    return tuple(stops)


def _drop_boundaries(problem: MergeProblem, stops: tuple[int, ...], deadline_us: float) -> tuple[int, ...]:
    """Merges neighbours, from the front, as long as the end stays by the deadline.

    `latest[k]` is when bucket k may start at the latest; it is known from the back, so each trial is one step.
    """
    latest_us = [deadline_us]
    for stop, start in pairwise((*reversed(stops), 0)):
        latest_us.append(latest_us[-1] - float(problem.cost_us(start, stop)))
    latest_us.reverse()
    kept: list[int] = []
    time_us, start = 0.0, 0
    for k, stop in enumerate(stops):
        if k + 1 < len(stops):
            merged = max(time_us, float(problem.ready_us[stops[k + 1] - 1]))
            if merged + float(problem.cost_us(start, stops[k + 1])) <= latest_us[k + 2]:
                continue
        time_us = max(time_us, float(problem.ready_us[stop - 1])) + float(problem.cost_us(start, stop))
        kept.append(stop)
        start = stop
    return tuple(kept)
