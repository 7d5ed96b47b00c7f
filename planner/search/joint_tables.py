"""The tables that merging and densities are decided on together: every bucket in every form, as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.model.compression import segments
from planner.model.problem import Problem
from planner.search.joint import JointTables

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def joint_tables(problem: Problem, limits: Floats, ratios: Sequence[float], places: Ints) -> JointTables:
    """The tables of a problem on a grid of places.

    Args:
        problem: the step; on more than one rank.
        limits: the largest ratio of each gradient.
        ratios: largest ratio of each form but the dense one, from the least to the most compression.
        places: where buckets may stop.
    """
    shape = (1 + len(ratios), len(places), len(places))
    cost_us, select_us, unpack_us, densities = np.full(shape, np.inf), *np.zeros((3, *shape))
    counts = [Counts(problem, limits, ratio) for ratio in ratios]
    prefix_bytes = np.concatenate([[0], np.cumsum(problem.size_bytes)])
    prefix_numel = np.concatenate([[0], np.cumsum(problem.numel)])
    costs = problem.selection_cost("flat"), problem.selection_cost("flat", "unpack")
    (phase,) = problem.sparse_phases("flat")
    for column, stop in enumerate(places[1:].tolist(), start=1):
        starts = places[:column]
        dense_bytes = (prefix_bytes[stop] - prefix_bytes[starts]).astype(np.float64)
        numel = np.maximum(1, prefix_numel[stop] - prefix_numel[starts])
        cost_us[0, :column, column] = problem.range_cost_us(starts, stop)
        densities[0, :column, column] = stop - starts
        for form, count in enumerate(counts, start=1):
            at = form, slice(0, column), column
            selected, densities[at] = count(starts, stop)
            gathered = phase.curve(phase.message_bytes(selected, dense_bytes))
            cost_us[at] = np.where(count.possible(starts, stop), gathered, np.inf)
            for table, cost in zip((select_us, unpack_us), costs, strict=True):
                table[at] = cost(dense_bytes, selected / numel)
    return JointTables(
        places=places,
        ready_us=np.concatenate([[0.0], problem.ready_us])[places],
        compute_end_us=problem.compute_end_us,
        cost_us=cost_us,
        select_us=select_us,
        unpack_us=unpack_us,
        densities=densities,
    )


class Counts:
    """k of `flat` buckets at one ratio: the sum over their layers, of which the first and the last may be cut."""

    def __init__(self, problem: Problem, limits: Floats, ratio: float) -> None:
        """`limits`: the largest ratio of each gradient."""
        runs = segments(problem, limits)
        self._start = np.array([start for start, _ in runs])
        self._stop = np.array([stop for _, stop in runs])
        self._ratio = np.minimum(limits[self._start], ratio)
        self._run = np.repeat(np.arange(len(runs)), self._stop - self._start)
        self._before = np.concatenate([[0], np.cumsum(problem.numel)])
        whole = self._piece(np.arange(len(runs)), self._start, self._stop)
        self._sums = [np.concatenate([[0.0], np.cumsum(values)]) for values in whole]
        names = problem.layers_by_name
        torn = [a == b and x != y for a, b, x, y in zip(names, names[1:], limits, limits[1:], strict=False)]
        self._torn = np.concatenate([[0], np.cumsum(np.array(torn, dtype=np.int64))])
        self._empty = np.concatenate([[0], np.cumsum(problem.numel == 0)])
        self._lossy = np.concatenate([[0], np.cumsum(limits > 1.0)])

    def __call__(self, starts: Ints, stop: int) -> tuple[Floats, Floats]:
        """(k, sum of densities) of buckets."""
        first, last = self._run[starts], self._run[stop - 1]
        inside = first == last
        ends = np.where(inside, stop, self._stop[first])
        heads = self._piece(first, starts, ends)
        tails = self._piece(np.array([last]), np.array([self._start[last]]), np.array([stop]))
        results = [
            head + np.where(inside, 0.0, sums[last] - sums[np.minimum(first + 1, last)] + tail[0])
            for head, tail, sums in zip(heads, tails, self._sums, strict=True)
        ]
        return results[0], results[1]

    def possible(self, starts: Ints, stop: int) -> NDArray[np.bool_]:
        """Whether each layer of a bucket has one k ≥ 1, and something may be left out at all."""
        whole = (self._torn[stop - 1] == self._torn[starts]) & (self._empty[stop] == self._empty[starts])
        return np.asarray(whole & (self._lossy[stop] > self._lossy[starts]))

    def _piece(self, run: Ints, starts: Ints, stops: Ints) -> tuple[Floats, Floats]:
        numel = (self._before[stops] - self._before[starts]).astype(np.float64)
        selected = np.ceil(numel / self._ratio[run])
        density = np.divide(selected, numel, out=np.ones_like(numel), where=numel > 0.0)
        return selected, density * (stops - starts)
