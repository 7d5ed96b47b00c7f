"""Delayed synchronization (SSD-SGD, arXiv 2012.05396): push in every step, pull after every k-th, update locally.

Legal for relaxed plans: between pulls each rank goes on with weights of its own. Asks the cost model for reduce-scatter
and all-gather of ranges of gradients, the local update, and contention. k is the smallest whose simulated mean step is
within 2 % of the best up to `max_delay`, for less delay harms less; how pushes are merged is chosen among the buckets
given, the best merge for the costs of a push, one bucket, and DDP's. Where the cluster says what selection costs,
pushes of selected elements (`planner.search.sparse_pushes`) are looked at, too, and have to win by 2 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from planner.cost.ssd import mean_step_us
from planner.documents.text import format_significant, ms
from planner.ir import TIE, Schedule, Synchronous
from planner.model.codecs import TopK, compression
from planner.model.compression import ratio_limits
from planner.model.delay import CycleTimeline
from planner.model.delay_load import StepWork
from planner.model.modes import delayed, simulate_schedule, step_us
from planner.model.modes.delayed import Delayed, delay_spec
from planner.model.problem import Problem
from planner.passes.base import GAIN, Bound, Pass, Result
from planner.passes.joint import Codecs, compress_of
from planner.passes.merge import best_of
from planner.search.merge import MergeProblem, merge_exact
from planner.search.sparse_pushes import best_selected
from planner.strategies.baselines import ddp
from runtime.errors import InputError
from runtime.plan import Accuracy
from runtime.plan.predicted import DelayPoint
from runtime.plan.transports import LIBRARY

DEFAULT_MAX_DELAY = 4
"""Table 2 of SSD-SGD shows loss of accuracy at 5."""
MAX_DELAY = 32
"""More than anybody trained with, by far."""

CASES = {1: "pulls are late", 2: "the network is never idle", 3: "nothing is exposed"}
"""Of Eq. 4."""

NEAR = 0.02
"""Share of the best mean step that a smaller k may cost."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best buckets found for one k; `point`: as a plan says it."""

    schedule: Schedule
    point: DelayPoint


@dataclass(frozen=True, kw_only=True)
class Delay(Pass):
    name: ClassVar[str] = "delay"
    what: ClassVar[str] = "delay"
    accuracy: ClassVar[Accuracy] = "relaxed"

    max_delay: int = 0
    """The largest k that may be chosen; 0: 4."""
    max_ratio: float = 0.0
    """As of `joint`: the largest ratio of elements to those that are pushed."""
    protect: str = ""
    """As of `joint`: names that are pushed whole."""
    compress: str = ""
    """As of `joint`: where it allows no selected elements, all are pushed."""

    @property
    def codecs(self) -> Codecs:
        return compress_of(self.compress)

    def apply(self, schedule: Schedule, problem: Problem) -> Result:
        """The chosen k with its buckets where that makes the step shorter, else the schedule as it was.

        A local update that nobody measured is not taken as free here: it has to be worth it when it takes as long as
        the optimizer's update.
        """
        if why_not := unsuited(problem, "delay needs"):
            return Result(schedule=schedule, why_not=why_not)
        choices = self.choices(schedule, problem)
        if not choices:
            why_not = ""
            if problem.cost.cluster.ranks_per_node > 1 and problem.node_costs is None:
                why_not = "delay is between nodes, and here all ranks share one"
                if problem.cost.cluster.nodes > 1:
                    why_not = "delay is between nodes of several ranks here, and the cluster does not say what both "
                    why_not += "kinds of link cost"
            return Result(schedule=schedule, why_not=why_not)
        found = best_choice(choices)
        fields = {"delays": tuple(choice.point for choice in choices)}
        before_us = step_us(problem, schedule) * (1.0 - TIE)
        cautious_us = cautious_step_us(problem, found.schedule)
        if not (found.point.iteration_us < before_us and cautious_us < before_us):
            return Result(schedule=schedule, plan_fields=fields)
        load = StepWork.of(problem, found.schedule)
        return Result(
            schedule=found.schedule,
            notes=tuple(_notes(problem, found, choices)),
            plan_fields=fields,
            bound=Bound(
                step_us=load.compute_us + load.take_us / found.point.steps,
                method="each k simulated with several merges",
                note="the bound is a step without communication",
            ),
            judged_us=max(step_us(problem, found.schedule), cautious_us),
        )

    def choices(self, schedule: Schedule, problem: Problem) -> tuple[Choice, ...]:
        """The best buckets for each k up to the largest; none on one worker, which sends nothing. Where ranks share a
        node the node is the worker, and both kinds of link have to be known.

        Raises:
            InputError: the largest k is out of range.
        """
        largest = check_max_delay(self.max_delay or DEFAULT_MAX_DELAY)
        if problem.ranks == 1 or (problem.cost.cluster.ranks_per_node > 1 and problem.node_costs is None):
            return ()
        options = candidates(problem, schedule)
        limits = ratio_limits(problem, self.max_ratio or None, self.protect)
        selected = None
        if TopK in self.codecs:
            selected = best_selected(
                problem, limits, lambda schedule: step_us(problem, replace(schedule, mode=Delayed(largest)))
            )
        found = []
        for k in range(1, largest + 1):
            chosen = delayed_schedule(problem, k, options)
            mean_us = step_us(problem, chosen)
            if selected is not None:
                lossy = replace(selected, mode=Delayed(k))
                lossy_us = step_us(problem, lossy)
                if lossy_us <= mean_us * (1.0 - GAIN):
                    chosen, mean_us = lossy, lossy_us
            terms = StepWork.of(problem, chosen).terms
            point = DelayPoint(
                steps=k,
                iteration_us=mean_us,
                closed_form_us=mean_step_us(terms, k),
                case=terms.case,
                buckets=len(chosen.buckets),
            )
            found.append(Choice(schedule=chosen, point=point))
        return tuple(found)


def check_max_delay(value: int, where: str = "--max-delay") -> int:
    """The largest k; raises InputError where it is none."""
    if not (isinstance(value, int) and 1 <= value <= MAX_DELAY):  # programs may give anything
        raise InputError(
            f"{where}: found {value!r}, expected a whole number of steps from 1 to {MAX_DELAY}, such as "
            f"{DEFAULT_MAX_DELAY}; correct it"
        )
    return value


def best_choice(choices: tuple[Choice, ...]) -> Choice:
    """The smallest k within 2 % of the best."""
    limit_us = min(choice.point.iteration_us for choice in choices) * (1.0 + NEAR)
    return next(choice for choice in choices if choice.point.iteration_us <= limit_us)


def cautious_step_us(problem: Problem, schedule: Schedule) -> float:
    """The mean step with a local update that takes as long as the optimizer's, where the cluster does not say."""
    known = problem.cost.cluster.local_update is not None
    return delayed.step_us(problem, schedule, None if known else problem.update_us)


def candidates(problem: Problem, given: Schedule | None = None) -> tuple[Schedule, ...]:
    """Buckets of whole pushes, without delay: those given (if dense), merged for pushes, one, and DDP's."""
    pushes = MergeProblem.of(problem, problem.push.curve, problem.push.curve.non_decreasing)
    found = [Schedule.from_boundaries(merge_exact(pushes).stops), Schedule.from_boundaries([problem.count])]
    if problem.dtype_count == 1:  # with several, DDP's may interleave, which a plan cannot hold
        found.append(ddp(problem))
    if given is not None and all(bucket.whole for bucket in given.buckets):
        library = tuple(replace(bucket, transport=LIBRARY) for bucket in given.buckets)
        found.insert(0, replace(given, mode=Synchronous(), buckets=library))
    return tuple(dict.fromkeys(found))


def delayed_schedule(problem: Problem, k: int, options: Sequence[Schedule]) -> Schedule:
    """The shortest mean step among the options with delay of k steps; of equal ones the fewest buckets."""
    return best_of(problem, [replace(option, mode=Delayed(k)) for option in options])


def unsuited(problem: Problem, what: str) -> str:
    """Why the step's optimizer is none for relaxed plans; empty where it is."""
    optimizer, norms = problem.profile.compute.optimizer, problem.profile.compute.norms
    name = optimizer.name if optimizer is not None else norms.optimizer if norms is not None else "SGD"
    return "" if name == "SGD" else f"{what} torch.optim.SGD, and this step's optimizer is {name}"


def _notes(problem: Problem, found: Choice, choices: Sequence[Choice]) -> list[str]:
    k, schedule = found.point.steps, found.schedule
    times = ", ".join(
        f"{point.steps}: {ms(point.iteration_us)} ({format_significant(point.closed_form_us / 1000)} by "
        f"Eq. 4, case {point.case}: {CASES[point.case]})"
        for point in (choice.point for choice in choices)
    )
    notes = [
        f"delay: gradients are pushed in every step, new weights come after every {f'{k} steps' if k != 1 else 'step'} "
        f"and are used one step later; in between ranks hold weights of their own",
        f"mean step by k, simulated: {times}; k = {k} is the smallest within {NEAR:.0%} of the best",
        f"the optimizer has to be torch.optim.SGD; the first {delay_spec(k).warmup_steps} steps are synchronous",
        f"reduce-scatter: {problem.push.source}; all-gather: {problem.pull.source}",
    ]
    if problem.ranks_per_worker > 1:
        notes.append(
            f"the worker is the node: its {problem.ranks_per_worker} ranks average their gradients in every step and "
            f"have the same weights"
        )
    lossy = [bucket for bucket in schedule.buckets if not bucket.whole]
    if lossy:
        ratio, _ = compression(problem, lossy)
        notes.append(
            f"pushes of {len(lossy)} of {len(schedule.buckets)} buckets carry their largest elements, one in "
            f"{ratio:.0f} at the least; each worker holds the rest back and pushes it later; the synchronous steps and "
            f"the pulls carry everything"
        )
    if problem.cost.cluster.local_update is None:
        notes.append(
            "the local update is taken as free, for the cluster has no `local_update` cost; delay had to pay with "
            "one as long as the optimizer's update: time it on that machine and add it"
        )
    timeline = simulate_schedule(problem, schedule)
    if isinstance(timeline, CycleTimeline) and timeline.error_us > 0.0:
        notes.append(f"steps do not repeat exactly: the mean step may be off by {timeline.error_us:.3g} us")
    return notes
