"""Delayed synchronization (SSD-SGD, arXiv 2012.05396): push in every step, pull after every k-th, update locally.

Legal for relaxed plans: between pulls each rank has weights of its own. Asks the cost model for reduce-scatter and
all-gather of ranges of gradients, the local update, and contention. k is the smallest whose simulated mean step is
within 2 % of the best up to `max_delay`, for less delay harms less; how pushes are merged is chosen among the buckets
given, the best merge for the costs of a push, one bucket, and DDP's. Where the cluster says what selection costs,
pushes of selected elements (`planner.search.sparse_pushes`) are looked at, too, and have to win by 2 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from planner.cost.ssd import mean_step_us
from planner.ir import GAIN, TIE, Schedule, Synchronous
from planner.model.codecs import TopK
from planner.model.compression import ratio_limits
from planner.model.delay_load import StepWork
from planner.model.modes import best_of, delayed, step_us
from planner.model.modes.delayed import NEAR, Delayed
from planner.model.problem import Problem
from planner.passes.base import Bound, Candidate, Pass, check_count
from planner.passes.joint import Codecs, compress_of
from planner.search.merge import MergeProblem, merge_exact
from planner.search.sparse_pushes import best_selected
from planner.strategies.baselines import ddp
from runtime.plan import Accuracy
from runtime.plan.predicted import DelayPoint
from runtime.plan.transports import LIBRARY

DEFAULT_MAX_DELAY = 4
"""Table 2 of SSD-SGD shows loss of accuracy at 5."""
MAX_DELAY = 32
"""Upper limit of k, far above published ones."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best buckets found for one k; `point`: its entry in a plan."""

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
    """The largest ratio of elements to those that are pushed; 0: that of `joint`."""
    protect: str = ""
    """Names that are pushed whole, as for `joint`."""
    compress: str = ""
    """Names of encodings, as for `joint`; unless it allows selected elements, all are pushed."""
    steps: int = 0
    """Steps of the training, as for `joint`."""

    @property
    def codecs(self) -> Codecs:
        return compress_of(self.compress)

    def apply(self, schedule: Schedule, problem: Problem) -> Candidate:
        """Return the chosen k with its buckets where that makes the step shorter, else the schedule as it was.

        If the local update was not measured, delay has to be worth it with one as long as the optimizer's update.
        """
        if why_not := unsuited(problem, "delay needs"):
            return Candidate(schedule=schedule, why_not=why_not)
        choices = self.choices(schedule, problem)
        if not choices:
            return Candidate(schedule=schedule, why_not=_unknown_links(problem))
        found = best_choice(choices)
        fields = {"delays": tuple(choice.point for choice in choices)}
        before_us = step_us(problem, schedule) * (1.0 - TIE)
        cautious_us = cautious_step_us(problem, found.schedule)
        if not (found.point.iteration_us < before_us and cautious_us < before_us):
            return Candidate(schedule=schedule, plan_fields=fields)
        load = StepWork.of(problem, found.schedule)
        return Candidate(
            schedule=found.schedule,
            notes=tuple(delayed.notes(problem, found.schedule, fields["delays"])),
            plan_fields=fields,
            bound=Bound(
                step_us=load.compute_us + load.take_us / found.point.steps,
                method="each k simulated with several merges",
                note="the bound is a step without communication",
            ),
            judged_us=max(step_us(problem, found.schedule), cautious_us),
        )

    def choices(self, schedule: Schedule, problem: Problem) -> tuple[Choice, ...]:
        """Return the best buckets for each k up to the largest; none on one worker, which sends nothing. Where ranks
        share a node the node is the worker, and costs of intra-node and inter-node links have to be known.

        Raises:
            InputError: the largest k is out of range.
        """
        largest = check_max_delay(self.max_delay or DEFAULT_MAX_DELAY)
        if problem.ranks == 1 or (problem.cost.cluster.ranks_per_node > 1 and problem.node_costs is None):
            return ()
        options = push_bucketings(problem, schedule)
        limits = ratio_limits(problem, self.max_ratio or None, self.protect, self.steps)
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


def check_max_delay(value: int) -> int:
    """Return the largest k. Raises InputError where it is none."""
    return check_count(value, "--max-delay", "steps", MAX_DELAY)


def _unknown_links(problem: Problem) -> str:
    """Return why nothing can be delayed where ranks share nodes; empty where no rank shares one."""
    cluster = problem.cost.cluster
    if cluster.ranks_per_node == 1 or problem.node_costs is not None:
        return ""
    if cluster.nodes == 1:
        return "delay is between nodes, and here all ranks share one"
    return "delay is between nodes of several ranks here, and the cluster does not say what both kinds of link cost"


def best_choice(choices: tuple[Choice, ...]) -> Choice:
    """Return the smallest k within 2 % of the best."""
    limit_us = min(choice.point.iteration_us for choice in choices) * (1.0 + NEAR)
    return next(choice for choice in choices if choice.point.iteration_us <= limit_us)


def cautious_step_us(problem: Problem, schedule: Schedule) -> float:
    """Return the mean step with a local update as long as the optimizer's, where the cluster has no cost of it."""
    known = problem.cost.cluster.local_update is not None
    return delayed.step_us(problem, schedule, None if known else problem.update_us)


def push_bucketings(problem: Problem, given: Schedule | None = None) -> tuple[Schedule, ...]:
    """Return buckets of dense pushes, without delay: those given (if dense), merged for pushes, one, and DDP's."""
    pushes = MergeProblem.of(problem, problem.push.curve, problem.push.curve.non_decreasing)
    found = [Schedule.from_boundaries(merge_exact(pushes).stops), Schedule.from_boundaries([problem.count])]
    if problem.dtype_count == 1:  # with several, DDP's may interleave, which a plan cannot hold
        found.append(ddp(problem))
    if given is not None and all(bucket.whole for bucket in given.buckets):
        library = tuple(replace(bucket, transport=LIBRARY) for bucket in given.buckets)
        found.insert(0, replace(given, mode=Synchronous(), buckets=library))
    return tuple(dict.fromkeys(found))


def delayed_schedule(problem: Problem, k: int, options: Sequence[Schedule], servers: int = 0) -> Schedule:
    """Return the shortest mean step among the options with delay of k steps; of equal ones the fewest buckets.
    `servers` is that of `Delayed`.
    """
    return best_of(problem, [replace(option, mode=Delayed(k, servers)) for option in options])


def unsuited(problem: Problem, what: str) -> str:
    """Return why the step's optimizer does not go with relaxed plans; empty where it does."""
    optimizer, norms = problem.profile.compute.optimizer, problem.profile.compute.norms
    name = optimizer.name if optimizer is not None else norms.optimizer if norms is not None else "SGD"
    return "" if name == "SGD" else f"{what} torch.optim.SGD, and this step's optimizer is {name}"
