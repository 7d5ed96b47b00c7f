"""Outer steps by name: DiLoCo (arXiv 2311.08105), Streaming DiLoCo (arXiv 2501.18512), and what this planner cuts."""

from __future__ import annotations

import numpy as np

from planner.ir import Bucket, Codec, Dense, Schedule
from planner.model.modes import step_us
from planner.model.modes.outer_steps import OuterSteps
from planner.model.problem import Problem
from planner.strategies.strategy import Argument, strategy, whole
from runtime.plan.transports import LIBRARY, TWO_SHOT

USUAL_PERIOD, USUAL_FRAGMENTS, MAX_PERIOD = 30, 4, 10_000
FRAGMENTS = (1, 2, 4, 8, 16)
"""Numbers of fragments that are looked at."""
DELAYS = (0, 1, 2, 4, 8)
"""Numbers of steps from a round's launch to its end that are looked at."""
NEAR_SHORTEST = 0.002
"""Share of the step that a smaller delay, or fewer fragments, may cost."""


@strategy(whole("STEPS", "steps", at_most=MAX_PERIOD), accuracy="relaxed", name="outer")
def outer_steps(problem: Problem, every: int = USUAL_PERIOD) -> Schedule:
    """Return outer steps after every H local steps, by default 30; fragments and delay make the shortest step."""
    return best_cut(problem, every)


@strategy(whole("STEPS", "steps", at_most=MAX_PERIOD), accuracy="relaxed")
def diloco(problem: Problem, every: int = USUAL_PERIOD) -> Schedule:
    """Return DiLoCo: all weights at once after every H local steps, by default 30, which wait for them."""
    return streaming(problem, every, 1, 0)


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
    return streaming(problem, every, min(parts, problem.count), min(1, every - 1))


def best_cut(problem: Problem, every: int, codec: Codec = Dense()) -> Schedule:  # noqa: B008
    """Return the fewest late steps, then the fewest fragments, whose step is within 0.2 % of the shortest."""
    options = [
        streaming(problem, every, parts, late, codec)
        for late in DELAYS
        if late < every
        for parts in FRAGMENTS
        if parts <= min(every, problem.count)
    ]
    times_us = [step_us(problem, option) for option in options]
    limit_us = min(times_us) * (1.0 + NEAR_SHORTEST)
    return next(option for option, time_us in zip(options, times_us, strict=True) if time_us <= limit_us)


def streaming(problem: Problem, every: int, parts: int, late: int, codec: Codec = Dense()) -> Schedule:  # noqa: B008
    """Return fragments of about equal bytes, a bucket each, that arrive some steps later."""
    transport = LIBRARY if codec.exact else TWO_SHOT
    stops = cut_evenly(problem, parts)
    made = Schedule.cut(stops, lambda members: Bucket(tuple(members), transport, codec))
    return Schedule(buckets=made.buckets, mode=OuterSteps(every, (1,) * len(stops), late))


def cut_evenly(problem: Problem, parts: int) -> tuple[int, ...]:
    """Return one past the last gradient of each part, of about equal bytes; fewer parts where gradients are large."""
    total = np.cumsum(problem.size_bytes)
    wanted = total[-1] * np.arange(1, parts) / parts
    stops = {int(np.argmin(np.abs(total[:-1] - one))) + 1 for one in wanted} if problem.count > 1 else set()
    return (*sorted(stops), problem.count)
