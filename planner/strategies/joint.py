"""The best bounded schedule that this planner knows: the pass `joint`, begun with the best exact one."""

from __future__ import annotations

from planner.ir import Schedule
from planner.model.compression import MAX_RATIO
from planner.model.problem import Problem
from planner.passes.joint import Joint
from planner.strategies.arguments import positive_number
from planner.strategies.optimal import optimal


def joint(problem: Problem, argument: str | None = None) -> Schedule:
    """Buckets and densities together; `joint:MAX_RATIO` sets the largest ratio of all layers. Biases and norms are
    protected.
    """
    max_ratio = 0.0
    if argument is not None:
        max_ratio = positive_number("joint", argument, "times of compression", at_most=MAX_RATIO, at_least=1.0)
    return Joint(max_ratio=max_ratio).apply(optimal(problem), problem)
