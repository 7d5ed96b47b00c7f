"""Outer steps by name: DiLoCo (arXiv 2311.08105), Streaming DiLoCo (arXiv 2501.18512), and what this planner cuts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.ir import TIE, Bucket, Codec, Dense, Places, Schedule
from planner.model.codecs import Wire
from planner.model.codecs.codec import prefix_sums
from planner.model.modes import step_us
from planner.model.modes.outer_steps import OuterSteps, compute_us
from planner.model.problem import Problem, memoised
from planner.search.merge import MergeProblem, merge_by_count
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
    return best_cut(problem, every)


@strategy(whole("STEPS", "steps", at_most=MAX_PERIOD), accuracy="relaxed")
def diloco(problem: Problem, every: int = USUAL_PERIOD) -> Schedule:
    """Return DiLoCo: all weights at once after every H local steps, by default 30, which wait for them."""
    return schedule_of((problem.count,), every, 0)


def _read(text: str) -> tuple[int, int]:
    every, _, parts = text.partition(":")
    if not all(one.isascii() and one.isdecimal() and len(one) < 6 for one in (every, parts)):
        raise ValueError
    found = int(every), int(parts)
    if not 1 <= found[1] <= found[0] <= MAX_PERIOD:
        raise ValueError
    return found


_EXPECTED = f"steps H up to {MAX_PERIOD} and at most as many fragments, such as {{name}}:30:4"


@strategy(Argument("STEPS:FRAGMENTS", _EXPECTED, _read), accuracy="relaxed", name="streaming")
def streaming_diloco(problem: Problem, cut: tuple[int, int] = (USUAL_PERIOD, USUAL_FRAGMENTS)) -> Schedule:
    """Return Streaming DiLoCo: a fragment at a time, by default 4 in 30 steps, each taken one step later."""
    every, parts = cut
    return schedule_of(cut_evenly(problem, min(parts, problem.count)), every, min(1, every - 1))


def best_cut(problem: Problem, every: int, codec: Codec = Dense()) -> Schedule:  # noqa: B008
    """Return the fewest late steps, then the fewest fragments, whose step is within 0.2 % of the shortest."""
    options = [
        schedule_of(stops, every, late, codec)
        for late in DELAYS
        if late < every
        for stops in cuts_to_hide(problem, codec, late)
        if len(stops) <= every
    ]
    times_us = [step_us(problem, option) for option in options]
    limit_us = min(times_us) * (1.0 + NEAR_SHORTEST)
    return next(option for option, time_us in zip(options, times_us, strict=True) if time_us <= limit_us)


@memoised
def cuts_to_hide(problem: Problem, codec: Codec, late: int) -> list[tuple[int, ...]]:
    """Return cuts between layers into some numbers of fragments, as one past the last gradient of each fragment.

    Layers are merged as if all were ready at once and a message cost what `late` steps do not hide of it. That finds,
    for each number of fragments, the cut that hides most; more than the fewest that hide all they can are left out.
    """
    edges = np.array([0, *(stop for _, stop in problem.layer_runs)])

    def cost_us(starts: Places, stops: Places) -> NDArray[np.float64]:
        return _exposed_us(problem, codec, late, edges[starts], edges[stops])

    layers = MergeProblem(np.zeros(len(edges) - 1), cost_us, non_decreasing=False)
    found = merge_by_count(layers, MOST_FRAGMENTS)
    least_us = min(one.end_us for one in found)
    enough = next(len(one.stops) for one in found if one.end_us <= least_us * (1.0 + TIE))
    numbers = sorted({enough, *(number for number in NUMBERS if number < enough)})
    return [tuple(edges[list(found[number - 1].stops)].tolist()) for number in numbers]


def _exposed_us(problem: Problem, codec: Codec, late: int, starts: Places, stops: Places) -> NDArray[np.float64]:
    """Return how much longer than `late` steps the messages of fragments [start, stop) take."""
    if isinstance(codec, Wire):
        [phase] = problem.wire_cost(codec.dtype, TWO_SHOT).phases
        (before,) = prefix_sums(problem.numel)
        time_us = phase.time_us(before[stops] - before[starts])
    else:
        time_us = problem.range_cost_us(starts, stops)
    compute, network = problem.range_factors(starts, stops)
    return np.maximum(0.0, time_us * network - late * compute_us(problem) * compute)


def schedule_of(stops: tuple[int, ...], every: int, late: int, codec: Codec = Dense()) -> Schedule:  # noqa: B008
    """Return fragments that end at these gradients, a bucket each, and arrive some steps later."""
    transport = LIBRARY if codec.exact else TWO_SHOT
    made = Schedule.cut(stops, lambda members: Bucket(tuple(members), transport, codec))
    return Schedule(buckets=made.buckets, mode=OuterSteps(every, (1,) * len(stops), late))


def cut_evenly(problem: Problem, parts: int) -> tuple[int, ...]:
    """Return one past the last gradient of each part, of about equal bytes; fewer parts where gradients are large."""
    total = np.cumsum(problem.size_bytes)
    wanted = total[-1] * np.arange(1, parts) / parts
    stops = {int(np.argmin(np.abs(total[:-1] - one))) + 1 for one in wanted} if problem.count > 1 else set()
    return (*sorted(stops), problem.count)
