"""Flat or by a 2D-torus for each bucket, and which buckets, on a cluster with two kinds of link.

Legal for exact plans: a torus sums what a flat all-reduce does, in another order. Asks the cost model for both over
ranges of gradients; buckets of the two may be inside nodes and between them at the same time. Elsewhere, and where the
cluster has no costs for both kinds of link, the schedule stays as it is. Source of the torus: Mikami et al., 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

from planner.ir import Schedule
from planner.merging.links import LinkForms, forms_of, has_two_links, search
from planner.passes.merge import best_of
from planner.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The pass `topology`."""

    name: ClassVar[str] = "topology"
    accuracy: ClassVar[Literal["exact", "bounded", "relaxed"]] = "exact"

    climbs: int = 3
    """From how many of the best known schedules boundaries and forms are moved."""

    def apply(self, schedule: Schedule, problem: Problem) -> Schedule:
        """The best found; never worse than the one given."""
        if not has_two_links(problem):
            return schedule
        return _found(problem, schedule, self.climbs)


@lru_cache(maxsize=4)
def _found(problem: Problem, schedule: Schedule, climbs: int) -> Schedule:
    forms = LinkForms(problem, forms_of(()))
    torus = _torus(problem)
    candidates = [schedule, torus, *search(forms, known_stops([schedule, torus]), climbs)]
    return best_of(problem, candidates)


def _torus(problem: Problem) -> Schedule:
    from planner.strategies.torus_2d import torus_2d  # strategies know passes

    return torus_2d(problem)


def known_stops(schedules: list[Schedule]) -> list[tuple[int, ...]]:
    """Where buckets of consecutive gradients stop; schedules with others are left out."""
    found = []
    for schedule in schedules:
        stops = tuple(bucket.gradients[-1] + 1 for bucket in schedule.buckets)
        sizes = [len(bucket.gradients) for bucket in schedule.buckets]
        if [stop - start for start, stop in zip((0, *stops[:-1]), stops, strict=True)] == sizes:
            found.append(stops)
    return list(dict.fromkeys(found))
