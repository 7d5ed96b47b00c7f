"""Outer steps by name: DiLoCo (arXiv 2311.08105), Streaming DiLoCo (arXiv 2501.18512), and what this planner cuts."""

from __future__ import annotations

from planner.ir import Schedule
from planner.model.problem import Problem
from planner.passes.outer import MAX_PERIOD, best_cut, streaming
from planner.strategies.strategy import Argument, strategy, whole

USUAL_PERIOD, USUAL_FRAGMENTS = 30, 4


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
