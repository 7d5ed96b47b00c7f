"""The time of the update where ranks share parts of it: norms of layers, operators of matrices."""

from __future__ import annotations

from planner.ir import Schedule
from planner.model.norms import most_saved_us, saved_us
from planner.model.operator_costs import operator_costs
from planner.model.problem import Problem


def update_us(problem: Problem, schedule: Schedule) -> float:
    """Return the update where every rank does all of it: as measured, but for what sharing parts of it changes."""
    if schedule.norms is None and schedule.operators is None:
        return problem.update_us
    saved = saved_us(problem, schedule.norms)
    if schedule.operators is not None and (costs := operator_costs(problem)) is not None:
        saved += costs.unshared_us - costs.update(schedule.operators).update_us
    return max(0.0, problem.update_us - saved)


def update_bound_us(problem: Problem) -> float:
    """Return a lower bound of the update, however its parts are shared."""
    saved, costs = most_saved_us(problem), operator_costs(problem)
    if costs is not None:
        saved += max(0.0, costs.unshared_us - costs.bound_us)
    return max(0.0, problem.update_us - saved)
