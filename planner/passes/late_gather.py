"""Gather weights during the next forward instead of inside the optimizer's step (DeAR, Zhang et al., ICDCS 2023, but
with an update by owners, as ZeRO-1), with buckets and groups of gathers chosen together.

Legal for exact plans: what is gathered is what the step without it gathers, and no layer runs before its weights are
there. Asks the cost model for reduce-scatter and all-gather, and when forward needs each weight
(`planner.model.forward`). Taken where that makes the step 2 % shorter than the best that all-reduces or gathers inside
the step, for scripts then have old weights until the next forward has waited for new ones: `planner optimize` runs the
pass where that is allowed.

Without contention the program (`planner.search.two_windows`) is exact where its labels were all kept; with it, its
answer and others are where a local search over the simulated step begins, and its bound stays one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import ClassVar

from planner.ir import Schedule, Synchronous
from planner.model.forward import needs
from planner.model.modes import best_of, step_us
from planner.model.modes.late_gather import (
    LateGather,
    by_need,
    described_needs,
    group_stops,
    largest_bytes,
    of_stops,
)
from planner.model.modes.sharded import (
    can_share,
    costs_known,
    flags_us,
    memory_bytes,
    own_update_us,
    owners_of,
    pull_us,
    push_us,
    replicated_bytes,
    sharded_bytes,
)
from planner.model.owned import message_sizes, whole_gradients
from planner.model.problem import Problem
from planner.model.step import Overlap
from planner.passes.base import Bound, Candidate, Pass
from planner.passes.select import select
from planner.passes.shard_updates import sharded_bound
from planner.search.local_search import local_search
from planner.search.merge import MergeProblem, merge_exact
from planner.search.merge_contended import improve, merge_contended
from planner.search.two_windows import TwoWindows, TwoWindowSolution, cuts_of, two_windows
from planner.search.whole_owners import owners_of_buckets
from runtime.plan.interfaces import LATE_GATHER

WHEN = ("auto", "always", "never")
STARTS = 3
"""Schedules that a local search begins with where compute and network slow each other down."""
WORK = 1_500
"""Buckets that each may evaluate."""


@dataclass(frozen=True, kw_only=True)
class LateGathers(Pass):
    """Gathers of weights during the next forward."""

    name: ClassVar[str] = "late_gather"
    decides_update: ClassVar[bool] = True
    interface: ClassVar[str] = LATE_GATHER

    when: str = "auto"
    """`auto`: where the step is 2 % shorter; `always` where the optimizer's step can be shared; `never`."""
    memory_mib: float = 0.0
    """Memory of a rank for weights, gradients, the optimizer's state and activations; 0: that of the profile."""

    known_values: ClassVar = {"when": WHEN}

    def apply(self, schedule: Schedule, problem: Problem) -> Candidate:
        """Return the schedule with all-gathers during the next forward where that pays, else the given one."""
        shares = schedule.mode.shares_update
        present = Candidate(
            schedule=schedule,
            memory_bytes=sharded_bytes(problem, schedule) if shares else replicated_bytes(problem),
        )
        if self.when == "never" or not can_share(problem) or schedule.unshared.mode != Synchronous():
            return present
        best, bound = best_late(problem, schedule)
        late = Candidate(
            schedule=best,
            bound=bound,
            memory_bytes=needed_bytes(problem, best),
            measured=costs_known(problem),
            required=self.when == "always",
        )
        chosen, _ = select(problem, [present, late], memory_bytes(problem, self.memory_mib))
        return chosen if shares else replace(chosen, replicated=schedule)


def best_late(problem: Problem, schedule: Schedule) -> tuple[Schedule, Bound]:
    """Return late gathers, and their bound: with a schedule's owners of whole parameters, or those tried for its
    buckets, each bucket is gathered by itself.
    """
    if not whole_gradients(problem):
        found = late_gathers(problem)
        if not schedule.mode.shares_update:
            return found.schedule, found.bound
        later = by_need(problem, replace(schedule, mode=LateGather()))  # what is gathered in the step, gathered later
        return best_of(problem, [found.schedule, later]), found.bound
    owners = owners_of(schedule)
    tried = owners_of_buckets(problem, schedule) if owners is None else [owners]
    late = (replace(schedule.unshared, mode=LateGather(owners=one)) for one in tried)
    return best_of(problem, [by_need(problem, one) for one in late]), sharded_bound(problem)


def needed_bytes(problem: Problem, schedule: Schedule) -> int | None:
    """Return the memory of a rank with late gathers; None where the optimizer's state is not known."""
    members = [bucket.gradients for bucket in schedule.buckets]
    largest = max(map(sum, message_sizes(problem, members, owners_of(schedule))))
    before = sharded_bytes(problem, schedule)
    return None if before is None else before - int(largest) + largest_bytes(problem, schedule)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best schedule with gathers during forward, and what is known of others."""

    schedule: Schedule
    solution: TwoWindowSolution
    """The solution without contention."""
    bound: Bound
    proven: bool
    """Whether no other choice of buckets, groups and order has a shorter step."""


@lru_cache(maxsize=4)  # the pass asks, and what a plan says of it
def late_gathers(problem: Problem) -> Found:
    """Search for the best late gathers; that the optimizer's step can be sharded is needed to execute them alone."""
    windows = windows_of(problem)
    solution = two_windows(windows, known_stops(problem))
    schedule = by_need(problem, of_stops(solution.buckets, solution.groups))
    if problem.contended:
        schedule = _contended(problem, windows, schedule)
    proven = solution.exact and windows.ordered and not problem.contended
    bound = _bound(problem, solution, proven=proven)
    return Found(schedule=schedule, solution=solution, bound=bound, proven=proven)


def windows_of(problem: Problem) -> TwoWindows:
    """Return the arrays that the search works on; flags of used gradients, behind the last bucket, are left out."""
    scatter = partial(problem.range_time_us, partial(push_us, problem))
    gather = partial(problem.range_time_us, partial(pull_us, problem))
    return TwoWindows.of(problem.ready_us, scatter, needs(problem).need_us, gather, problem.forward_us)


@lru_cache(maxsize=4)
def scatter_stops(problem: Problem) -> tuple[int, ...]:
    """Return the buckets whose reduce-scatters end earliest."""
    return merge_exact(MergeProblem.of(problem, partial(push_us, problem), non_decreasing=False)).stops


def known_stops(problem: Problem) -> list[tuple[int, ...]]:
    """Return buckets that plans without late gathers might have: results are never worse than with these."""
    return [(problem.count,), merge_exact(MergeProblem.of(problem, problem.cost.all_reduce, False)).stops]


def _bound(problem: Problem, solution: TwoWindowSolution, *, proven: bool) -> Bound:
    scattered_us, forward_end_us = solution.bounds_us
    scattered_us += flags_us(problem)
    notes = ["among plans that gather weights beside forward", described_needs(problem)]
    if problem.contended:
        sums_us = solution.sums_us[0] + flags_us(problem), solution.sums_us[1]
        scattered_us = max(scattered_us, problem.forward_us + _least_us(problem, problem.backward_us, sums_us[0]))
        forward_end_us = max(forward_end_us, _least_us(problem, problem.forward_us, sums_us[1]))
        notes.append("the bound has each window's messages as few as can be, and no gap in them, or no contention")
    elif proven:
        notes.append("no other choice of buckets and gathers is shorter")
    return Bound(
        step_us=scattered_us + forward_end_us - problem.forward_us + own_update_us(problem),
        method=f"dynamic programs of both windows, then labels{' and local search' if problem.contended else ''}",
        note="; ".join(notes),
    )


def _least_us(problem: Problem, compute_us: float, messages_us: float) -> float:
    """Return a lower bound on a window with these times of computation and of messages, each without contention.

    While both are busy for x, compute advances by x/c and messages by x/n. So without a gap the window takes
    compute + messages + x·(1 − 1/c − 1/n), where x/c is at most all computation and x/n all messages. Less if c and n
    are less, so the least factors hold for messages of any size.
    """
    overlap = Overlap.of(problem)
    compute, network = overlap.compute, overlap.network
    saved_us = min(
        messages_us * max(0.0, 1.0 - network * (1.0 - 1.0 / compute)),
        compute_us * max(0.0, 1.0 - compute * (1.0 - 1.0 / network)),
    )
    return compute_us + messages_us - saved_us


def _contended(problem: Problem, windows: TwoWindows, schedule: Schedule) -> Schedule:
    """Return the best found where compute and network slow each other down; never worse than `schedule`."""
    overlap, scatters = Overlap.of(problem), windows.scatters
    starts = [schedule]
    buckets = merge_contended(scatters, overlap, 16, [scatter_stops(problem)])
    for stops in dict.fromkeys([buckets, improve(scatters, overlap, buckets)]):
        solution = two_windows(windows, [stops])
        groups = solution.groups
        starts += [
            of_stops(tuple(sorted({*stops, *groups})), groups),
            of_stops(stops, tuple(stop for stop in stops if stop in groups or stop == problem.count)),
            of_stops(stops, stops),
        ]
    starts = sorted(dict.fromkeys(starts), key=lambda one: step_us(problem, one))[:STARTS]
    return best_of(problem, [by_need(problem, _searched(problem, one)) for one in starts] + starts)


def _searched(problem: Problem, schedule: Schedule) -> Schedule:
    def judge(choice: Sequence[tuple[int, int]]) -> float:
        return step_us(problem, of_stops(*cuts_of(choice)))

    closes = set(group_stops(schedule))
    choice = tuple((stop, int(stop in closes)) for stop in schedule.stops)
    return of_stops(*cuts_of(local_search(choice, judge, WORK, forms=2, then="stay", reach=problem.count)))
