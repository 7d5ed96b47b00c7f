"""Modes: the ways in which ranks synchronize, one module each. `MODES` is the only list of them.

A module holds the mode as a frozen value (in `planner.ir` that of the default, synchronous), and answers what is asked
of it here. `runtime.plan.combinations` says what it goes with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from planner.ir import Bucket, Mode, Schedule, Synchronous
from planner.model.modes import delayed, local_updaters, sharded, synchronous
from planner.model.problem import Problem
from runtime.plan.timeline import Timeline

_NORMS = re.compile(r"norms ([0-9]+(?:,[0-9]+)*)")


class ModeModel(Protocol):
    """What is asked of a mode; but for `parse` and `assumptions`, of a schedule that has it."""

    def parse(self, line: str, /) -> Mode | None:
        """Return the inverse of `str`; None for a line of something else."""

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
        """Return what its prediction rests on beside the all-reduce, and whether costs follow from others'."""

    def plan_fields(self, problem: Problem, schedule: Schedule, /) -> dict[str, Any]:
        """Return its fields of `runtime.plan.Plan`."""

    def explain(self, problem: Problem, schedule: Schedule, timeline: Timeline, /) -> list[str]:
        """Return why each bucket is what it is, a phrase each; `timeline`: as `simulate` gave it."""


MODES: Mapping[type[Mode], ModeModel] = {
    Synchronous: synchronous,
    sharded.Sharded: sharded,
    delayed.Delayed: delayed,
    local_updaters.LocalUpdaters: local_updaters,
}
"""Registry: value → module. Add a mode here and the contract test covers it."""


def model_of(schedule: Schedule) -> ModeModel:
    """Return the module of a schedule's mode."""
    return MODES[type(schedule.mode)]


def parse_schedule(text: str) -> Schedule:
    """Return the schedule whose `str` is `text`. Raises InputError where there is none."""
    mode: Mode = Synchronous()
    lines = text.splitlines()
    found = next((made for model in MODES.values() if lines and (made := model.parse(lines[0]))), None)
    if found is not None:
        mode, lines = found, lines[1:]
    norms = _NORMS.fullmatch(lines[0]) if lines else None
    return Schedule(
        buckets=tuple(map(Bucket.parse, lines[1:] if norms else lines)),
        mode=mode,
        norms=tuple(map(int, norms[1].split(","))) if norms else None,
    )
