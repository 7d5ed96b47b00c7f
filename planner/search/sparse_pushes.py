"""Pushes of which only the largest elements travel: buckets that they may be made of, and the best of them.

What is pushed is selected from each owner's part of a bucket, and parts do not follow gradients: so a bucket that
selects holds nothing that is protected. It is made of the largest gradients that are not, and what lies between is
pushed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from planner.ir import TIE, Bucket, Schedule
from planner.model.codecs import TopK, compression
from planner.model.compression import selected
from planner.model.problem import Problem
from runtime.plan.transports import FLAT

RATIOS = (4.0, 16.0, 64.0, 250.0, 1000.0)
"""Ratios of the pass `joint`."""
COUNTS = (1, 2, 4, 8, 16, 32)
"""Numbers of largest gradients that select."""


def best_selected(
    problem: Problem, limits: NDArray[np.float64], step_us: Callable[[Schedule], float]
) -> Schedule | None:
    """Return the shortest step, then the least compression; None where nothing can be selected, or at unknown cost.

    `limits` has the largest ratio of each gradient; `step_us` knows the delay that is meant.
    """
    if problem.cost.cluster.sparsify is None:
        return None
    found = [(step_us(schedule), schedule) for schedule in dict.fromkeys(_schedules(problem, limits))]
    if not found:
        return None
    limit_us = min(time_us for time_us, _ in found) * (1.0 + TIE)
    equals = [schedule for time_us, schedule in found if time_us <= limit_us]
    return min(equals, key=lambda schedule: compression(problem, schedule.buckets))


def _schedules(problem: Problem, limits: NDArray[np.float64]) -> Iterator[Schedule]:
    free = [index for index in range(problem.count) if limits[index] > 1.0 and problem.numel[index] > 0]
    by_size = sorted(free, key=lambda index: (-int(problem.size_bytes[index]), index))
    for ratio in RATIOS:
        for count in COUNTS:
            if count == COUNTS[0] or count <= len(free):
                chosen = frozenset(by_size[:count])
                if chosen:
                    yield Schedule(buckets=tuple(_buckets(problem, limits, chosen, ratio)))


def _buckets(problem: Problem, limits: NDArray[np.float64], chosen: frozenset[int], ratio: float) -> Iterator[Bucket]:
    """Runs of chosen gradients of one dtype select, those between them do not."""

    def kind(index: int) -> tuple[bool, int]:
        return index in chosen, int(problem.dtype_ids[index]) if index in chosen else 0

    for (selects, _), run in groupby(range(problem.count), key=kind):
        members = tuple(run)
        yield _selected(problem, limits, members, ratio) if selects else Bucket(members)


def _selected(problem: Problem, limits: NDArray[np.float64], members: Sequence[int], ratio: float) -> Bucket:
    numel = int(problem.numel[list(members)].sum())
    k = selected(numel, float(limits[list(members)].min()), ratio)
    return Bucket(tuple(members), FLAT, TopK(k))
