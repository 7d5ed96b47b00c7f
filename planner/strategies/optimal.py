"""The best exact schedule that this planner knows: the pass `merge`."""

from __future__ import annotations

from planner.ir import Schedule
from planner.passes.merge import Merge
from planner.problem import Problem
from planner.strategies.arguments import refuse_argument


def optimal(problem: Problem, argument: str | None = None) -> Schedule:
    """What `planner optimize` chooses among exact plans."""
    refuse_argument("optimal", argument)
    return Merge().apply(Schedule.from_boundaries([problem.count]), problem)
