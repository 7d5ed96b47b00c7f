"""Owners of whole parameters in a sharded step: the longest first, then moves while the step gets shorter.

What is even for the update need not be for messages, whose length the node and rank with most decide: parameters go to
the rank with the least work, or with the least of their bucket. Effort is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from planner.ir import Schedule
from planner.model.modes import step_us
from planner.model.modes.sharded import Sharded, owners_of
from planner.model.owned import loads_us, whole_gradients, work_us
from planner.model.problem import Problem
from runtime.plan.lpt import longest_first

MOVES = 20_000
"""Gradients times evaluations of the local search."""
NEAR = 1e-6
"""Least relative gain of a move."""


def owners_of_buckets(problem: Problem, schedule: Schedule) -> list[tuple[int, ...]]:
    """Return owners that are tried for a schedule's buckets: of even work, and of even messages."""
    whole, times_us = whole_gradients(problem), work_us(problem)
    nodes, inside = problem.cost.cluster.nodes, problem.cost.cluster.ranks_per_node
    parts = longest_first([times_us[gradient] for gradient in whole], problem.ranks)
    by_work = _owners(problem, whole, [part % nodes * inside + part // nodes for part in parts])  # node after node
    bucket_of = {one: place for place, bucket in enumerate(schedule.buckets) for one in bucket.gradients}
    sizes: list[float] = problem.size_bytes.tolist()
    ranks, even = range(problem.ranks), [-1] * problem.count
    loads = [0.0] * problem.ranks
    held = [[0.0] * problem.ranks for _ in schedule.buckets]
    of_node = [[0.0] * nodes for _ in schedule.buckets]
    for gradient in sorted(whole, key=lambda one: (-sizes[one], one)):
        here, node = held[bucket_of[gradient]], of_node[bucket_of[gradient]]
        owner = min(ranks, key=lambda rank: (node[rank // inside], here[rank], loads[rank], rank))
        even[gradient] = owner
        here[owner] += sizes[gradient]
        node[owner // inside] += sizes[gradient]
        loads[owner] += times_us[gradient]
    return list(dict.fromkeys([by_work, tuple(even)]))


def _owners(problem: Problem, whole: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    found = [-1] * problem.count
    for gradient, owner in zip(whole, ranks, strict=True):
        found[gradient] = owner
    return tuple(found)


def improve_owners(problem: Problem, schedule: Schedule) -> Schedule:
    """Return the schedule with owners moved, or exchanged, one after the other while that makes the step shorter."""
    owners = owners_of(schedule)
    if owners is None:
        return schedule
    best_us, left = step_us(problem, schedule), max(1, MOVES // problem.count)
    moved = True
    while moved and left > 0:
        moved = False
        for other in _changes(problem, owners):
            left -= 1
            tried = replace(schedule, mode=Sharded(owners=other))
            if (tried_us := step_us(problem, tried)) < best_us * (1.0 - NEAR):
                schedule, owners, best_us, moved = tried, other, tried_us, True
                break
            if left <= 0:
                break
    return schedule


def _changes(problem: Problem, owners: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield owners in which the rank with most work gives a parameter away, or exchanges it for a smaller one."""
    loads, times_us = loads_us(problem, owners), work_us(problem)
    most = max(range(problem.ranks), key=lambda rank: (loads[rank], -rank))
    mine = sorted((one for one, owner in enumerate(owners) if owner == most), key=lambda one: (-times_us[one], one))
    for rank in sorted((one for one in range(problem.ranks) if one != most), key=lambda one: (loads[one], one)):
        theirs: list[int | None] = [None, *(one for one, owner in enumerate(owners) if owner == rank)]
        for gradient in mine:
            for other in theirs:
                gives_us = times_us[gradient] - (0.0 if other is None else times_us[other])
                if not 0.0 < gives_us < loads[most] - loads[rank]:
                    continue
                changed = list(owners)
                changed[gradient] = rank
                if other is not None:
                    changed[other] = most
                yield tuple(changed)
