"""Local updaters (LAP-SGD, LPP-SGD): several processes of a rank share its model, and ranks average models beside them.

Legal for relaxed plans: updaters work on models that others have changed since. Asks for the throughput of updaters on
this device and for the parts of backward, both measured (`planner profile --updaters`), and for what a message of the
whole model costs. Of the numbers of updaters that were measured, each is taken while it gets 3 % more done than the one
before and fits into the memory. What they get done includes making minibatches, so other steps are compared with that
added. Blocks are whole layers (see `planner.search.blocks`); without blocks where they save nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from planner.ir import TIE, Schedule, Updaters
from planner.model.local_async import Work, async_step_us, making_us
from planner.model.problem import Problem
from planner.model.simulator import step_us
from planner.search.blocks import best_blocks
from runtime.errors import InputError
from runtime.plan import MAX_UPDATERS

GROWTH = 0.03
"""By how much more updaters have to get more done."""


@dataclass(frozen=True, kw_only=True)
class UpdaterChoice:
    """What so many updaters would give."""

    updaters: int
    lap: Schedule
    lap_us: float
    """A rank's time for a minibatch, all with full backwards."""
    lpp: Schedule
    lpp_us: float
    """The same, where full backwards alternate with blocks."""
    fits: bool
    """Whether they fit into the memory, as far as that is known."""

    @property
    def best(self) -> Schedule:
        """Without blocks where they save nothing."""
        return self.lpp if self.lpp_us < self.lap_us * (1.0 - TIE) else self.lap


@dataclass(frozen=True, kw_only=True)
class LocalAsync:
    """The pass `local_async`."""

    name: ClassVar[str] = "local_async"
    accuracy: ClassVar[Literal["exact", "bounded", "relaxed"]] = "relaxed"

    updaters: int = 0
    """How many updaters; 0: as throughput and memory allow."""

    def apply(self, schedule: Schedule, problem: Problem) -> Schedule:
        """Local updaters where a rank gets through more minibatches with them, else the schedule as it was."""
        choices = self.choices(problem)
        if not choices:
            return schedule
        found = best_choice(choices).best
        before_us = step_us(problem, schedule) + making_us(problem)
        return found if async_step_us(problem, found) < before_us * (1.0 - TIE) else schedule

    def choices(self, problem: Problem) -> tuple[UpdaterChoice, ...]:
        """What each measured number of updaters would give (or the one asked for); none where nothing was measured.

        Raises:
            InputError: the number asked for is no number of updaters.
        """
        check_updaters(self.updaters or 1, "--passes: local_async{updaters=…}")
        measured = problem.profile.local_async
        if measured is None:
            return ()
        counts = [self.updaters] if self.updaters else [point.updaters for point in measured.curve]
        memory = {point.updaters: point.memory_bytes for point in measured.curve}
        available = measured.memory_available_bytes
        found = []
        for count in counts:
            lap, lpp = updater_schedule(problem, count, blocks=False), updater_schedule(problem, count, blocks=True)
            needed = memory.get(count)
            fits = needed is None or available is None or needed <= available
            lap_us, lpp_us = async_step_us(problem, lap), async_step_us(problem, lpp)
            found.append(UpdaterChoice(updaters=count, lap=lap, lap_us=lap_us, lpp=lpp, lpp_us=lpp_us, fits=fits))
        return tuple(found)


def check_updaters(value: int, where: str) -> int:
    """A number of updaters; raises InputError where it is none."""
    if not (isinstance(value, int) and 1 <= value <= MAX_UPDATERS):  # programs may give anything
        raise InputError(
            f"{where}: found {value!r}, expected a whole number of updaters from 1 to {MAX_UPDATERS}, such as 4; "
            f"correct it"
        )
    return value


def best_choice(choices: tuple[UpdaterChoice, ...]) -> UpdaterChoice:
    """The last one that gets 3 % more done than the one before, and fits."""
    best = choices[0]
    for choice in choices[1:]:
        if not choice.fits or best.lap_us < choice.lap_us * (1.0 + GROWTH):
            break
        best = choice
    return best


def updater_schedule(problem: Problem, updaters: int, *, blocks: bool) -> Schedule:
    """So many updaters, with or without blocks of their own; models travel whole."""
    stops = None
    if blocks:
        work = Work.of(problem)
        stops = tuple(work.stops[layer - 1] for layer in best_blocks(work.backward, updaters))
    whole = Schedule.from_boundaries([problem.count])
    return Schedule(buckets=whole.buckets, updaters=Updaters(count=updaters, stops=stops))
