"""HiTopKComm (CommLib, MLSys 2021): top-k between nodes only, merged for its own cost.

Gradients are summed inside a node, each rank selects from its shard of the sum, the selections are gathered between
nodes and then inside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost.sparse import SparsePhase, selected_elements
from planner.ir import Bucket, Schedule
from planner.model.codecs import TopK
from planner.model.compression import shard_elements
from planner.model.problem import Problem
from planner.search.local_search import Stops, moved, stops_of
from planner.search.merge_phased import PhasedProblem, merge_phased
from planner.strategies.baselines import mg_wfbp, single, wfbp
from planner.strategies.strategy import share, strategy
from runtime.plan.transports import HITOPK

GUESSES = (1, 16)
"""Numbers of buckets that are tried where each bucket's selection has a start-up."""
CLIMBS = 4
"""Schedules from which boundaries are moved then."""
WORK = 4_000
"""Buckets that the moves from each may evaluate."""

Floats = NDArray[np.float64]


@strategy(share(), accuracy="bounded")
def hitopk(problem: Problem, density: float = 0.01) -> Schedule:
    """Return merged buckets, of which each rank sends a share of its shard's elements, by default 0.01.

    Raises:
        InputError: the cluster has no cost of intra-node or inter-node links.
    """
    phases = problem.sparse_phases(HITOPK)
    if not phases or not problem.numel.any():
        return Schedule.from_boundaries([problem.count])
    usual = [single(problem), wfbp(problem, "layer"), mg_wfbp(problem)]
    found = [schedule.stops for schedule in usual]
    arrays = _arrays(problem, phases, density)
    # Numbers of buckets by whose start-ups backward may be delayed; any one where selection has none.
    starts_up = problem.selection_cost(HITOPK).alpha_us.any()
    for buckets in GUESSES if starts_up else (1,):
        if buckets <= problem.count:
            found.append(merge_phased(arrays.guessed(buckets), found[:3]))
    if arrays.start_up_us > 0.0:
        subsampled = [thin for stops in found for thin in _subsample(stops)]
        best = sorted(dict.fromkeys(subsampled), key=lambda stops: (arrays.end_us(stops), len(stops)))
        found = [moved(stops, lambda choice: arrays.end_us(stops_of(choice)), WORK) for stops in best[:CLIMBS]]
    return _schedule(problem, min(found, key=lambda stops: (arrays.end_us(stops), len(stops))), density)


def _subsample(stops: Stops) -> Iterator[Stops]:
    """Yield all boundaries, every second one, every fourth …, the last always: fewer are better for hidden messages."""
    stride = 1
    while stride < 2 * len(stops):
        yield stops[::-1][::stride][::-1]
        stride *= 2


def _schedule(problem: Problem, stops: Stops, density: float) -> Schedule:
    """Return the buckets that end there. One without elements has nothing to select from and stays dense."""
    buckets = []
    for start, stop in pairwise((0, *stops)):
        members, numel = tuple(range(start, stop)), int(problem.numel[start:stop].sum())
        if numel == 0:
            buckets.append(Bucket(members))
            continue
        k = selected_elements(density, shard_elements(problem, numel))
        buckets.append(Bucket(members, HITOPK, TopK(k)))
    return Schedule(buckets=tuple(buckets))


@dataclass(frozen=True)
class _Delayed(PhasedProblem):
    """A merge problem in which each bucket's selection delays backward, by its bytes (which `ready_us` holds, for they
    do not depend on where buckets end) and by a start-up.
    """

    start_up_us: float = 0.0

    def guessed(self, buckets: int) -> PhasedProblem:
        """Return the problem with the start-ups of a number of buckets spread evenly over backward."""
        count = len(self.ready_us)
        before = np.minimum(np.arange(1, count + 1) * (buckets / count), buckets)
        ready_us = self.ready_us + self.start_up_us * before
        return PhasedProblem(ready_us, self.links, self.cost_us, self.non_decreasing)

    def end_us(self, stops: Stops) -> float:
        """Return when the last phase ends, with start-ups where they fall."""
        ready_us = self.ready_us.copy()
        ready_us[np.array(stops) - 1] += self.start_up_us * np.arange(1, len(stops) + 1)
        return PhasedProblem(ready_us, self.links, self.cost_us).end_us(stops)


def _arrays(problem: Problem, phases: tuple[SparsePhase, ...], density: float) -> _Delayed:
    size_bytes = np.cumsum(problem.size_bytes)
    alpha_us, beta_us_per_byte = problem.selection_cost(HITOPK).line(density)
    numel = np.concatenate([[0], np.cumsum(problem.numel)])
    dense = np.concatenate([[0], size_bytes])

    def cost_us(phase: SparsePhase, starts: slice | int, stops: slice | int) -> Floats:
        shard = np.ceil((numel[stops] - numel[starts]) / problem.cost.cluster.ranks_per_node)
        selected = np.minimum(shard, np.maximum(1.0, np.floor(density * shard)))
        return phase.curve(phase.message_bytes(selected, dense[stops] - dense[starts]))

    return _Delayed(
        ready_us=problem.ready_us + beta_us_per_byte * size_bytes,
        links=tuple(phase.link for phase in phases),
        cost_us=tuple(partial(cost_us, phase) for phase in phases),
        non_decreasing=all(phase.curve.non_decreasing for phase in phases),
        start_up_us=float(alpha_us),
    )
