"""Local updaters (LAP-SGD, LPP-SGD): several processes of a rank share its model, while ranks average their models.

Legal for relaxed plans: updaters work on models that others have changed since. Asks for the throughput of updaters on
this device and for the parts of backward, both measured (`planner profile --updaters`), and for what a message of the
whole model costs. Of the numbers of updaters that were measured, each is taken while it has 3 % more throughput than
the one before and fits into the memory. Their throughput includes making minibatches, so other steps are compared with
that added. Blocks are whole layers (see `planner.search.blocks`); without blocks where they save nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from planner.ir import TIE, Schedule
from planner.model.modes import local_updaters, step_us
from planner.model.modes.local_updaters import (
    GROWTH,
    LocalUpdaters,
    Work,
    batch_prep_us,
    closed_form_saved_backwards,
    saved_backwards,
    updaters_of,
)
from planner.model.problem import Problem
from planner.passes.base import Bound, Candidate, Pass, check_count
from planner.passes.delay import unsuited
from planner.search.blocks import best_blocks
from runtime.plan import MAX_UPDATERS, Accuracy
from runtime.plan.predicted import UpdatersPoint

UNMEASURED = "local updaters were not measured (`planner profile --updaters 4` does)"


@dataclass(frozen=True, kw_only=True)
class UpdaterChoice:
    """The best schedule with one number of updaters, and predictions with and without blocks."""

    schedule: Schedule
    """The schedule whose full backwards alternate with blocks, or, where these save nothing, that without."""
    point: UpdatersPoint
    """Entry in a plan."""


@dataclass(frozen=True, kw_only=True)
class LocalAsync(Pass):
    name: ClassVar[str] = "local_async"
    what: ClassVar[str] = "local updaters"
    accuracy: ClassVar[Accuracy] = "relaxed"

    updaters: int = 0
    """Number of updaters; 0: as throughput and memory allow."""

    def apply(self, schedule: Schedule, problem: Problem) -> Candidate:
        """Return local updaters where a rank gets through more minibatches with them, else the schedule as it was."""
        choices = self.choices(problem)
        if not choices:
            return Candidate(schedule=schedule, why_not=UNMEASURED, measured=False)
        fields = {"updaters": tuple(choice.point for choice in choices)}
        if why_not := unsuited(problem, "local updaters need"):
            return Candidate(schedule=schedule, why_not=why_not, plan_fields=fields)
        found = best_choice(choices).schedule
        before_us, found_us = step_us(problem, schedule) + batch_prep_us(problem), step_us(problem, found)
        if found_us >= before_us * (1.0 - TIE):
            why_not = "no number of local updaters would get more done"
            return Candidate(schedule=schedule, why_not=why_not, plan_fields=fields)
        return Candidate(
            schedule=found,
            notes=tuple(local_updaters.notes(problem, found, fields["updaters"], before_us)),
            plan_fields=fields,
            batch_prep_us=batch_prep_us(problem),
            bound=Bound(
                step_us=min([found_us, *(step_us(problem, choice.schedule) for choice in choices)]),
                method="each measured number of updaters, with the blocks of least cost by dynamic programming",
                note="the bound is the number of updaters that gets most done; fewer are taken where more hardly help",
            ),
        )

    def choices(self, problem: Problem) -> tuple[UpdaterChoice, ...]:
        """Return what each measured number of updaters would give (or the one asked for); none without measurements.

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
            best = lpp if point.lpp_us < point.lap_us * (1.0 - TIE) else lap
            found.append(UpdaterChoice(schedule=best, point=point))
        return tuple(found)


def check_updaters(value: int, where: str) -> int:
    """Return a number of updaters. Raises InputError where it is none."""
    return check_count(value, where, "updaters", MAX_UPDATERS)


def best_choice(choices: tuple[UpdaterChoice, ...]) -> UpdaterChoice:
    """Return the last one with 3 % more throughput than the one before that fits."""
    best = choices[0]
    for choice in choices[1:]:
        if not choice.point.fits or best.point.lap_us < choice.point.lap_us * (1.0 + GROWTH):
            break
        best = choice
    return best


def updater_schedule(problem: Problem, updaters: int, *, blocks: bool) -> Schedule:
    """Return a number of updaters, with or without blocks of their own; models are sent whole."""
    stops = None
    if blocks:
        work = Work.of(problem)
        stops = tuple(work.stops[layer - 1] for layer in best_blocks(work.backward, updaters))
    whole = Schedule.from_boundaries([problem.count])
    return Schedule(buckets=whole.buckets, mode=LocalUpdaters(count=updaters, stops=stops))
