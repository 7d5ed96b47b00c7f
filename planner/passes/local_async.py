"""Local updaters (LAP-SGD, LPP-SGD): several processes of a rank share its model, and ranks average models beside them.

Legal for relaxed plans: updaters work on models that others have changed since. Asks for the throughput of updaters on
this device and for the parts of backward, both measured (`planner profile --updaters`), and for what a message of the
whole model costs. Of the numbers of updaters that were measured, each is taken while it gets 3 % more done than the one
before and fits into the memory. What they get done includes making minibatches, so other steps are compared with that
added. Blocks are whole layers (see `planner.search.blocks`); without blocks where they save nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from planner.documents.text import format_significant, ms, pluralize
from planner.ir import TIE, Schedule
from planner.model.modes import step_us
from planner.model.modes.local_updaters import (
    LocalUpdaters,
    Work,
    batch_prep_us,
    closed_form_saved_backwards,
    saved_backwards,
    updaters_of,
)
from planner.model.problem import Problem
from planner.passes.base import Bound, Pass, Result
from planner.passes.delay import unsuited
from planner.search.blocks import best_blocks
from runtime.errors import InputError
from runtime.plan import MAX_UPDATERS, Accuracy
from runtime.plan.predicted import UpdatersPoint

UNMEASURED = "local updaters were not measured (`planner profile --updaters 4` does)"

GROWTH = 0.03
"""By how much more updaters have to get more done."""


@dataclass(frozen=True, kw_only=True)
class UpdaterChoice:
    """What so many updaters would give."""

    lap: Schedule
    """All with full backwards."""
    lpp: Schedule
    """Full backwards alternate with blocks."""
    point: UpdatersPoint
    """As a plan says it."""

    @property
    def best(self) -> Schedule:
        """Without blocks where they save nothing."""
        return self.lpp if self.point.lpp_us < self.point.lap_us * (1.0 - TIE) else self.lap


@dataclass(frozen=True, kw_only=True)
class LocalAsync(Pass):
    name: ClassVar[str] = "local_async"
    what: ClassVar[str] = "local updaters"
    accuracy: ClassVar[Accuracy] = "relaxed"

    updaters: int = 0
    """How many updaters; 0: as throughput and memory allow."""

    def apply(self, schedule: Schedule, problem: Problem) -> Result:
        """Local updaters where a rank gets through more minibatches with them, else the schedule as it was."""
        choices = self.choices(problem)
        if not choices:
            return Result(schedule=schedule, why_not=UNMEASURED, measured=False)
        fields = {"updaters": tuple(choice.point for choice in choices)}
        if why_not := unsuited(problem, "local updaters need"):
            return Result(schedule=schedule, why_not=why_not, plan_fields=fields)
        found = best_choice(choices).best
        before_us, found_us = step_us(problem, schedule) + batch_prep_us(problem), step_us(problem, found)
        if found_us >= before_us * (1.0 - TIE):
            why_not = "no number of local updaters would get more done"
            return Result(schedule=schedule, why_not=why_not, plan_fields=fields)
        return Result(
            schedule=found,
            notes=tuple(_notes(problem, found, choices, before_us)),
            plan_fields=fields,
            batch_prep_us=batch_prep_us(problem),
            bound=Bound(
                step_us=min([found_us, *(step_us(problem, choice.best) for choice in choices)]),
                method="each measured number of updaters, with the blocks of least cost by dynamic programming",
                note="the bound is the number of updaters that gets most done; fewer are taken where more hardly help",
            ),
        )

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
            updaters = updaters_of(lpp)
            point = UpdatersPoint(
                updaters=count,
                lap_us=step_us(problem, lap),
                lpp_us=step_us(problem, lpp),
                blocks=len(updaters.blocks),
                saved_backwards=saved_backwards(problem, updaters),
                closed_form=closed_form_saved_backwards(count),
                fits=fits,
            )
            found.append(UpdaterChoice(lap=lap, lpp=lpp, point=point))
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
        if not choice.point.fits or best.point.lap_us < choice.point.lap_us * (1.0 + GROWTH):
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
    return Schedule(buckets=whole.buckets, mode=LocalUpdaters(count=updaters, stops=stops))


def _notes(problem: Problem, schedule: Schedule, choices: Sequence[UpdaterChoice], exact_us: float) -> list[str]:
    updaters, found_us = updaters_of(schedule), step_us(problem, schedule)
    samples = problem.profile.world.batch_per_rank  # where the profile says how many a minibatch has
    rates = [
        f"{problem.ranks * (samples or 1) * 1e6 / time_us:,.4g} {'samples' if samples else 'minibatches'}/s"
        for time_us in (found_us, exact_us)
    ]
    notes = [
        f"{pluralize(updaters.count, 'updater')} of each rank share its model without locks, and ranks average their "
        f"models beside them; a step here is what a rank takes for a minibatch",
        f"predicted {rates[0]} from all ranks; the best plan that synchronizes in every step: {rates[1]}",
        "a rank's time for a minibatch by updaters, LAP-SGD and LPP-SGD: "
        + ", ".join(
            f"{point.updaters}: {format_significant(point.lap_us / 1000)} and {ms(point.lpp_us)}"
            f"{'' if point.fits else ' (more than fits into memory)'}"
            for point in (choice.point for choice in choices)
        )
        + f"; each updater has to bring {GROWTH:.0%} more",
    ]
    if batch_prep_us(problem) > 0.0:
        notes.append(
            f"making a minibatch takes a rank {ms(batch_prep_us(problem))}: it is in the times of "
            f"updaters, and added to the step of the plan that they are compared with"
        )
    if updaters.stops is not None:
        work = Work.of(problem)
        parts = ", ".join(f"{work.partial_us(block) / work.backward.full_us:.0%}" for block in updaters.blocks)
        saved, closed = saved_backwards(problem, updaters), closed_form_saved_backwards(updaters.count)
        notes.append(
            f"after the first tenth every other minibatch updates a block only: "
            f"{pluralize(len(updaters.blocks), 'block')} whose partial backwards take {parts} of a full one; one of "
            f"each updater saves {saved:.2f} full backwards, where (c − 1)/2 = {closed:.2f} would be saved with blocks "
            f"that cost alike"
        )
    notes.append(
        "what updaters cost in accuracy was measured with torch.optim.SGD: they are offered with no other optimizer; "
        "`planner run` trains so, and `runtime.local_async.run_local_async` in a script"
    )
    return notes
