"""Merging for collectives with phases inside, between, and again inside nodes: a flow shop on two networks.

The networks take their tasks sorted by bucket + phase, then bucket: inside the nodes the gather of bucket b−2 comes
before the scatter of bucket b. So what a prefix of buckets leaves behind is three numbers: when the network inside is
free for the next scatter, when the one between nodes is free, and how long the last bucket's gather will take. Smaller
is never worse in any of them, so a program over prefixes that keeps the labels that do not dominate one another is
exact while every prefix may keep all of them and every boundary is allowed. Where gradients are many, boundaries are
chosen among evenly spread ones and then moved one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.ir import TIE, Places
from planner.model.replay import Replay, Work, messages_end_us
from planner.search.labels import pareto
from planner.search.local_search import Stops, moved
from planner.search.merge import CostOf, MergeProblem, merge_exact, walk

MAX_PLACES = 96
"""Places where buckets may stop before boundaries are moved one by one."""
MAX_LABELS = 32
"""Labels that a prefix may keep."""
WORK = 12_000
"""Buckets that moving boundaries may evaluate."""


@dataclass(frozen=True)
class PhasedProblem:
    """Arrays of one merge problem on two networks.

    Args:
        ready_us: when each gradient is ready, shape (count,).
        links: the network of each phase.
        cost_us: for each phase, T of [start, stop) for a slice of starts and one stop, or the reverse, or for pairs.
        non_decreasing: whether a longer range never costs less, in any phase.
    """

    ready_us: NDArray[np.float64]
    links: tuple[str, ...]
    cost_us: tuple[CostOf, ...]
    non_decreasing: bool = False

    def total_us(self, starts: Places, stops: Places) -> NDArray[np.float64]:
        """All phases of a bucket, one after the other."""
        return np.asarray(sum(cost(starts, stops) for cost in self.cost_us))

    def end_us(self, stops: Stops) -> float:
        """When the last phase ends; each network takes its tasks sorted by bucket + phase, then bucket."""
        starts, ends = np.array((0, *stops[:-1])), np.array(stops)
        times = np.column_stack([cost(starts, ends) for cost in self.cost_us]).tolist()
        ready_us: list[float] = self.ready_us[ends - 1].tolist()
        works = [Work(ready, list(zip(self.links, of, strict=True))) for ready, of in zip(ready_us, times, strict=True)]
        return max(messages_end_us(works)[0])


def merge_phased(problem: PhasedProblem, starts: Sequence[Stops] = ()) -> Stops:
    """The best boundaries found; `starts` are tried as well."""
    if len(set(problem.links)) == 1:  # nothing overlaps: one network
        return merge_exact(MergeProblem(problem.ready_us, problem.total_us, problem.non_decreasing)).stops
    if len(problem.links) != 3 or problem.links[0] != problem.links[2]:
        raise NotImplementedError(f"phases on {problem.links}: expected one network, or there, elsewhere and back")
    places = _places(problem)
    found = _labels(problem, places)
    best = min([found, *starts], key=lambda stops: (problem.end_us(stops), len(stops)))
    return best if len(places) == len(problem.ready_us) else moved(best, replay(problem), WORK)


def _places(problem: PhasedProblem) -> NDArray[np.int64]:
    """Where buckets may stop: everywhere, or at `MAX_PLACES` places that are evenly spread in time and in cost."""
    count = len(problem.ready_us)
    if count <= MAX_PLACES:
        return np.arange(1, count + 1)
    to_here_us = problem.total_us(0, slice(1, count + 1))
    scale = to_here_us / max(float(to_here_us[-1]), 1e-9) + problem.ready_us / max(float(problem.ready_us[-1]), 1e-9)
    wanted = np.linspace(scale[0], scale[-1], MAX_PLACES)
    return np.unique(np.append(np.searchsorted(scale, wanted, side="left").clip(0, count - 1) + 1, count))


def _labels(problem: PhasedProblem, places: NDArray[np.int64]) -> Stops:
    """The program over prefixes. Columns of a label: inside free, between free, pending gather, where it came from."""
    scatter, between, gather = problem.cost_us
    labels = np.zeros((1, 3))
    prefix, parent = np.zeros(1, dtype=np.int64), np.full(1, -1)
    for stop in places.tolist():
        start = prefix
        ready = float(problem.ready_us[stop - 1])
        bounds = np.unique(start)
        costs = [cost(bounds, stop) for cost in (scatter, between, gather)]
        at = np.searchsorted(bounds, start)
        scattered = np.maximum(labels[:, 0], ready) + costs[0][at]
        begun = np.maximum(scattered, labels[:, 1])
        # The gather of the bucket before waits for both, as this bucket's exchange between nodes does.
        inside = np.where(start > 0, begun + labels[:, 2], scattered)
        new = np.column_stack([inside, begun + costs[1][at], costs[2][at]])
        ends_us = np.maximum(new[:, 0], new[:, 1]) + new[:, 2]
        kept, _ = pareto(list(new.T), np.argsort(ends_us, kind="stable"), MAX_LABELS)
        labels = np.concatenate([labels, new[kept]])
        prefix = np.concatenate([prefix, np.full(len(kept), stop)])
        parent = np.concatenate([parent, kept])
    last = np.flatnonzero(prefix == len(problem.ready_us))
    ends_us = np.maximum(labels[last, 0], labels[last, 1]) + labels[last, 2]
    number = int(last[np.flatnonzero(ends_us <= ends_us.min() * (1.0 + TIE))[0]])
    return tuple(prefix[walk(parent, number)].tolist())


def replay(problem: PhasedProblem) -> Replay:
    """As `PhasedProblem.end_us`, on two networks; for what a prefix leaves behind, see the module's text."""
    ready: list[float] = problem.ready_us.tolist()

    def costs(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[tuple[float, ...]]:
        return list(zip(*(cost(starts, stops).tolist() for cost in problem.cost_us), strict=True))

    def send(before: tuple[float, ...], start: int, stop: int, cost: tuple[float, ...]) -> tuple[float, ...]:
        (inside_us, between_us, pending_us), (scatter_us, exchange_us, gather_us) = before, cost
        scattered_us = max(ready[stop - 1], inside_us) + scatter_us
        begun_us = max(scattered_us, between_us)
        return begun_us + pending_us if start else scattered_us, begun_us + exchange_us, gather_us

    return Replay(costs, send, lambda left: max(left[0], left[1]) + left[2], (0.0, 0.0, 0.0))
