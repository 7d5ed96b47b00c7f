"""SyncEASGD: all gradients in one message at the end of backward."""

from __future__ import annotations

from planner.ir import Schedule
from planner.model.problem import Problem
from planner.strategies.arguments import refuse_argument


def single(problem: Problem, argument: str | None = None) -> Schedule:
    """One bucket."""
    refuse_argument("single", argument)
    return Schedule.from_boundaries([problem.count])
