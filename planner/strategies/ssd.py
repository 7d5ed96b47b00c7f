"""SSD-SGD (arXiv 2012.05396): pushes in every step, pulls after every k-th, merged as suits the pushes."""

from __future__ import annotations

from planner.ir import Schedule
from planner.model.problem import Problem
from planner.passes.delay import DEFAULT_MAX_DELAY, MAX_DELAY, candidates, delayed_schedule
from planner.strategies.arguments import whole_number


def ssd(problem: Problem, argument: str | None = None) -> Schedule:
    """Delay of k steps: `ssd:K`, by default 4; its step is the mean of the steady state."""
    k = DEFAULT_MAX_DELAY if argument is None else whole_number("ssd", argument, "steps", at_most=MAX_DELAY)
    return delayed_schedule(problem, k, candidates(problem))
