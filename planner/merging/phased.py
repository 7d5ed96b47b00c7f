"""Merging for collectives of several phases on two networks: a flow shop, which the dynamic program cannot solve.

Started with the exact answers to two simpler problems (all phases one after the other; only the slowest phase), and
with the usual buckets, boundaries are dropped and moved as long as the step gets shorter. What is found is the best
known, not proven to be the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.merging.exact import TIE, MergeProblem, merge_exact

EVALUATIONS = 4000
"""Schedules that the search may look at: its effort is counted, not timed, so that equal inputs give equal plans."""

Stops = tuple[int, ...]


@dataclass(frozen=True)
class PhasedProblem:
    """Arrays of one merge problem on two networks.

    Args:
        ready_us: when each gradient is ready, shape (count,).
        links: the network of each phase.
        cost_us: for each phase, T of [start, stop) for a slice of starts and one stop, or the reverse.
        non_decreasing: whether a longer range never costs less, in any phase.
    """

    ready_us: NDArray[np.float64]
    links: tuple[str, ...]
    cost_us: tuple[Callable[[slice | int, slice | int], NDArray[np.float64]], ...]
    non_decreasing: bool = False

    def end_us(self, stops: Stops) -> float:
        """When the last phase ends; each network takes its tasks sorted by bucket + phase, then bucket."""
        starts = (0, *stops[:-1])
        times = [[float(cost(a, b)) for cost in self.cost_us] for a, b in zip(starts, stops, strict=True)]
        done_us = [float(self.ready_us[stop - 1]) for stop in stops]
        free_us = dict.fromkeys(self.links, 0.0)
        count, phases = len(stops), len(self.links)
        for wave in range(count + phases - 1):
            for bucket in range(max(0, wave - phases + 1), min(wave, count - 1) + 1):
                link = self.links[wave - bucket]
                done_us[bucket] = max(done_us[bucket], free_us[link]) + times[bucket][wave - bucket]
                free_us[link] = done_us[bucket]
        return max(done_us)


def merge_phased(problem: PhasedProblem, starts: Sequence[Stops], evaluations: int = EVALUATIONS) -> Stops:
    """The best boundaries found; `starts` are tried as well."""
    candidates = dict.fromkeys([*starts, *_simpler(problem)])
    best = min(candidates, key=lambda stops: (problem.end_us(stops), len(stops)))
    best_us, left = problem.end_us(best), evaluations - len(candidates)
    improved = True
    while improved and left > 0:
        improved = False
        for stops in _neighbours(best, len(problem.ready_us)):
            left -= 1
            end_us = problem.end_us(stops)
            if end_us < best_us * (1.0 - TIE) or (end_us <= best_us * (1.0 + TIE) and len(stops) < len(best)):
                best, best_us, improved = stops, min(end_us, best_us), True
                break
            if left <= 0:
                break
    return best


def _simpler(problem: PhasedProblem) -> list[Stops]:
    """The optimum if all phases shared one network, and if only each phase alone counted."""

    def total(starts: slice | int, stops: slice | int) -> NDArray[np.float64]:
        return np.asarray(sum(cost(starts, stops) for cost in problem.cost_us))

    costs = [total, *problem.cost_us]
    return [merge_exact(MergeProblem(problem.ready_us, cost, problem.non_decreasing)).stops for cost in costs]


def _neighbours(stops: Stops, count: int) -> list[Stops]:
    """One boundary less, one moved by a power of two, one more in the middle of a bucket."""
    found: list[Stops] = []
    bounds = (0, *stops)
    for index in range(len(stops) - 1):
        found.append(stops[:index] + stops[index + 1 :])
        low, here, high = bounds[index], stops[index], stops[index + 1]
        for distance in (1, 2, 4, 8, 16, 32, 64):
            for moved in (here - distance, here + distance):
                if low < moved < high:
                    found.append((*stops[:index], moved, *stops[index + 1 :]))
    for low, high in zip(bounds, stops, strict=False):
        if high - low > 1:
            found.append(tuple(sorted({*stops, (low + high) // 2})))
    return found
