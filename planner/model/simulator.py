"""How long a step of a schedule is, as its mode says: the judge of all that passes and strategies make."""

from __future__ import annotations

from planner.ir import Schedule
from planner.model.modes import model_of
from planner.model.problem import Problem
from runtime.plan.timeline import Timeline


def simulate_schedule(problem: Problem, schedule: Schedule) -> Timeline:
    """Return the timeline of one step; of modes whose steps overlap, of a cycle of steps and the mean of them."""
    return model_of(schedule).simulate(problem, schedule)


def step_us(problem: Problem, schedule: Schedule) -> float:
    """Return `simulate_schedule(…).iteration_us`, without the timeline that comparing schedules has no use for."""
    return model_of(schedule).step_us(problem, schedule)
