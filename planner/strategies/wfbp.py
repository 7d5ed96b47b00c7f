"""WFBP (wait-free back-propagation, Zhang et al., ATC 2017): every gradient travels as soon as it is ready.

`wfbp` sends one bucket per gradient, `wfbp:layer` one per layer (run of gradients of one layer), as the papers do.
"""

from __future__ import annotations

from planner.ir import Schedule
from planner.model.problem import Problem
from runtime.errors import InputError


def wfbp(problem: Problem, argument: str | None = None) -> Schedule:
    """One bucket per gradient, or per layer with the argument `layer`."""
    if argument is None:
        return Schedule.from_boundaries(range(1, problem.count + 1))
    if argument != "layer":
        raise InputError(f"found the strategy wfbp:{argument}, expected wfbp or wfbp:layer")
    return Schedule.from_boundaries(stop for _, stop in problem.layer_runs)
