"""Modes: the ways in which ranks synchronize, one module each. `MODES` is the only list of them.

A module holds the mode as a frozen value (in `planner.ir` that of the default, synchronous), and answers what is asked
of it here. `runtime.plan.combinations` says what it goes with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from planner.ir import TIE, Mode, Schedule, Synchronous
from planner.model.modes import delayed, late_gather, local_updaters, outer_steps, sharded, synchronous
from planner.model.problem import Problem
from planner.model.reasons import PlanWords
from runtime.plan import Plan
from runtime.plan.timeline import Timeline


class ModeModel(Protocol):
    """Functions of a mode's module; all but `assumptions` take a schedule of that mode."""

    def defect(self, schedule: Schedule, gradients: int, /) -> str | None:
        """Return what must not be in a schedule of so many gradients, whatever the step; None where all is well."""

    def step_us(self, problem: Problem, schedule: Schedule, /) -> float:
        """Return the mean step, equal to `simulate(…).iteration_us`."""

    def simulate(self, problem: Problem, schedule: Schedule, /) -> Timeline:
        """Return the timeline of a step, or of a cycle of steps."""

    def critical_path(self, problem: Problem, schedule: Schedule, /) -> dict[str, float]:
        """Return, by kind of task, its share of the tasks without a gap that the step's length comes from."""

    def message_bytes(self, problem: Problem, schedule: Schedule, /) -> dict[str, float]:
        """Return, by network, bytes of the messages that one rank gives to the collectives of a mean step."""

    def assumptions(self, problem: Problem, /) -> tuple[list[str], bool]:
        """Return what its prediction rests on next to the all-reduce, and whether costs follow from others'."""

    def plan_fields(self, problem: Problem, schedule: Schedule, /) -> dict[str, Any]:
        """Return its fields of `runtime.plan.Plan`."""

    def describe(self, plan: Plan, /) -> PlanWords | None:
        """Return what is said of a plan of the mode; None for a plan of another one."""

    def explain(self, problem: Problem, schedule: Schedule, timeline: Timeline, /) -> list[str]:
        """Return why each bucket is what it is, a phrase each; `timeline`: as `simulate` gave it."""


MODES: Mapping[type[Mode], ModeModel] = {
    Synchronous: synchronous,
    sharded.Sharded: sharded,
    late_gather.LateGather: late_gather,
    delayed.Delayed: delayed,
    outer_steps.OuterSteps: outer_steps,
    local_updaters.LocalUpdaters: local_updaters,
}
"""Registry: value → module. Add a mode here and the contract test covers it."""


def model_of(schedule: Schedule) -> ModeModel:
    """Return the module of a schedule's mode."""
    return MODES[type(schedule.mode)]


def simulate_schedule(problem: Problem, schedule: Schedule) -> Timeline:
    """Return the timeline of one step, or of a cycle where steps overlap: all schedules are judged by it."""
    return model_of(schedule).simulate(problem, schedule)


def step_us(problem: Problem, schedule: Schedule) -> float:
    """Return `simulate_schedule(…).iteration_us`, without the timeline where comparing schedules can do without."""
    return model_of(schedule).step_us(problem, schedule)


def best_of(
    problem: Problem,
    schedules: Iterable[Schedule],
    order: Callable[[Schedule], Any] = lambda schedule: len(schedule.buckets),
) -> Schedule:
    """Return the schedule of the shortest step; among equals the first in `order`, by default of the fewest buckets."""
    unique = list(dict.fromkeys(schedules))
    times_us = [step_us(problem, schedule) for schedule in unique]
    limit_us = min(times_us) * (1.0 + TIE)
    return min((one for one, time_us in zip(unique, times_us, strict=True) if time_us <= limit_us), key=order)


def describe(plan: Plan) -> PlanWords:
    """Return what the mode that a plan asks for says of it."""
    said = (model.describe(plan) for model in MODES.values() if model is not synchronous)
    return next(filter(None, said), synchronous.describe(plan))
