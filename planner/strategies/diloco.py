"""Outer steps by name: DiLoCo (arXiv 2311.08105), Streaming DiLoCo (arXiv 2501.18512), and what this planner cuts.

Workers are nodes where these have several ranks and the costs of both links are known, else ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from planner.ir import TIE, Bucket, Codec, Dense, Places, Schedule
from planner.model.modes import step_us
from planner.model.modes.outer_steps import OuterSteps, mode_of
from planner.model.outer_load import (
    RANK,
    SHARDED_NODE,
    Worker,
    average_us,
    costs_of_nodes,
    local_us,
    possible_workers,
    round_us,
    scatter_us,
)
from planner.model.problem import Problem, memoised
from planner.search.merge import MergeProblem, merge_by_count, merge_exact
from planner.strategies.strategy import Argument, strategy, whole
from runtime.plan.transports import LIBRARY, TWO_SHOT

USUAL_PERIOD, USUAL_FRAGMENTS, MAX_PERIOD = 30, 4, 10_000
MOST_FRAGMENTS = 64
NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Numbers of fragments that are looked at, below the fewest that hide all they can."""
DELAYS = (0, 1, 2, 4, 8)
"""Numbers of steps from a round's launch to its end that are looked at."""
NEAR_SHORTEST = 0.002
"""Share of the step that a smaller delay may cost."""


@strategy(whole("STEPS", "steps", at_most=MAX_PERIOD), accuracy="relaxed", name="outer")
def outer_steps(problem: Problem, every: int = USUAL_PERIOD) -> Schedule:
    """Return outer steps after every H local steps, by default 30; fragments and delay make the shortest step."""
    return best_cut(problem, every, Dense(), possible_workers(problem)[0])


@strategy(whole("STEPS", "steps", at_most=MAX_PERIOD), accuracy="relaxed")
def diloco(problem: Problem, every: int = USUAL_PERIOD) -> Schedule:
    """Return DiLoCo: all weights at once after every H local steps, by default 30, which wait for them."""
    return named_schedule(problem, (problem.count,), every, 0)


def _read(text: str) -> tuple[int, int]:
    every, parts = map(_COUNT.read, text.partition(":")[::2])
    if parts > every:
        raise ValueError
    return every, parts


_COUNT = whole("", "steps", at_most=MAX_PERIOD)


_EXPECTED = f"steps H up to {MAX_PERIOD} and at most as many fragments, such as {{name}}:30:4"


@strategy(Argument("STEPS:FRAGMENTS", _EXPECTED, _read), accuracy="relaxed", name="streaming")
def streaming_diloco(problem: Problem, cut: tuple[int, int] = (USUAL_PERIOD, USUAL_FRAGMENTS)) -> Schedule:
    """Return Streaming DiLoCo: a fragment at a time, by default 4 in 30 steps, each taken one step later."""
    every, parts = cut
    return named_schedule(problem, cut_evenly(problem, min(parts, problem.count)), every, min(1, every - 1))


@memoised
def best_cut(problem: Problem, every: int, codec: Codec, worker: Worker) -> Schedule:
    """Return the fewest late steps, then the fewest fragments, whose step is within 0.2 % of the shortest."""
    options = [
        schedule_of(stops, every, late, codec, worker, inside)
        for late in DELAYS
        if late < every
        for stops in cuts_to_hide(problem, codec, late, worker)
        if len(stops) <= every
        for inside in ((), *cuts_inside(problem, worker))
    ]
    times_us = [step_us(problem, option) for option in options]
    limit_us = min(times_us) * (1.0 + NEAR_SHORTEST)
    return next(option for option, time_us in zip(options, times_us, strict=True) if time_us <= limit_us)


@memoised
def cuts_inside(problem: Problem, worker: Worker) -> list[tuple[int, ...]]:
    """Return the best merges of buckets that are averaged inside of nodes, as one past the last gradient of each; none
    where ranks are workers. Where the step is sharded, backward hides half of an average.
    """
    if (costs := costs_of_nodes(problem, worker)) is None:
        return []
    rises = costs.scatter.curve.non_decreasing and costs.gather.curve.non_decreasing
    hidden = (average_us, scatter_us) if worker == SHARDED_NODE else (average_us,)
    found = [merge_exact(MergeProblem.of(problem, partial(time_us, problem), rises)).stops for time_us in hidden]
    return list(dict.fromkeys(found))


@memoised
def cuts_to_hide(problem: Problem, codec: Codec, late: int, worker: Worker) -> list[tuple[int, ...]]:
    """Return cuts between layers into some numbers of fragments, as one past the last gradient of each fragment.

    Layers are merged as if all were ready at once and a message cost what `late` steps do not hide of it. That finds,
    for each number of fragments, the cut that hides most; more than the fewest that hide all they can are left out.
    """
    edges = np.array([0, *(stop for _, stop in problem.layer_runs)])
    stops_inside = next(iter(cuts_inside(problem, worker)), (problem.count,))
    hidden_us = late * local_us(problem, worker, Schedule.from_boundaries(stops_inside).buckets)

    def cost_us(starts: Places, stops: Places) -> NDArray[np.float64]:
        time_us = round_us(problem, worker, codec, edges[starts], edges[stops])
        compute, network = problem.range_factors(edges[starts], edges[stops])
        return np.maximum(0.0, time_us * network - hidden_us * compute)

    layers = MergeProblem(np.zeros(len(edges) - 1), cost_us, non_decreasing=False)
    found = merge_by_count(layers, MOST_FRAGMENTS)
    least_us = min(one.end_us for one in found)
    enough = next(len(one.stops) for one in found if one.end_us <= least_us * (1.0 + TIE))
    numbers = sorted({enough, *(number for number in NUMBERS if number < enough)})
    return [tuple(edges[list(found[number - 1].stops)].tolist()) for number in numbers]


def schedule_of(
    stops: tuple[int, ...], every: int, late: int, codec: Codec = Dense(), worker: Worker = RANK,  # noqa: B008
    inside: tuple[int, ...] = (),
) -> Schedule:  # fmt: skip
    """Return fragments that end at these gradients and arrive some steps later; each is one bucket, or divided where a
    bucket ends that is averaged `inside` of nodes.

    Rounds that block take the mean of weights: DiLoCo's outer optimizer, which no local steps soften there, cost up to
    60 % of the loss (docs/results/outer.md).
    """
    edges = sorted({*stops, *inside})
    transport = LIBRARY if codec.exact else TWO_SHOT
    made = Schedule.cut(edges, lambda members: Bucket(tuple(members), transport, codec))
    counts = np.diff(np.searchsorted(edges, (0, *stops), side="right"))
    return Schedule(buckets=made.buckets, mode=OuterSteps(every, tuple(counts.tolist()), late, worker, mean=late == 0))


def named_schedule(problem: Problem, stops: tuple[int, ...], every: int, late: int) -> Schedule:
    """Return `schedule_of` with DiLoCo's outer optimizer, and whole weights between the fewest workers there may be."""
    worker = possible_workers(problem)[0]
    found = schedule_of(stops, every, late, worker=worker, inside=next(iter(cuts_inside(problem, worker)), ()))
    return replace(found, mode=replace(mode_of(found), mean=False))


def cut_evenly(problem: Problem, parts: int) -> tuple[int, ...]:
    """Return one past the last gradient of each part, of about equal bytes; fewer parts where gradients are large."""
    total = np.cumsum(problem.size_bytes)
    wanted = total[-1] * np.arange(1, parts) / parts
    stops = {int(np.argmin(np.abs(total[:-1] - one))) + 1 for one in wanted} if problem.count > 1 else set()
    return (*sorted(stops), problem.count)
