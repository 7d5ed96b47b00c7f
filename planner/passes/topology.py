"""Buckets, each flat, by a 2D-torus or by trees, on a cluster with intra-node and inter-node links.

Legal for exact plans: a torus and trees sum what a flat all-reduce does, in another order. Asks the cost model for all
of them over ranges of gradients; buckets may be inside nodes and between them at the same time. Elsewhere, and where
the cluster lacks costs of one of them, the schedule stays as it is. Source of the torus: Mikami et al., 2018;
of the trees: Sanders, Speck, Träff, 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar

from planner.ir import Schedule
from planner.model.modes import best_of
from planner.model.problem import Problem
from planner.passes.base import Candidate, Pass
from planner.passes.merge import merge_without_contention
from planner.search.forms import LinkForms
from planner.search.links import SearchResult, climb, search
from planner.search.tables import dense_transports, forms_on_links, has_two_links
from planner.strategies.topologies import torus_2d


@dataclass(frozen=True, kw_only=True)
class Topology(Pass):
    name: ClassVar[str] = "topology"

    climbs: int = 3
    """Number of the best known schedules from which boundaries and forms are moved."""

    def apply(self, schedule: Schedule, problem: Problem) -> Candidate:
        """Return the best schedule found; never worse than the one given."""
        if not has_two_links(problem):
            return Candidate(schedule=schedule)
        candidates = [schedule, torus_2d(problem), *links_without_contention(problem, self.climbs).schedules]
        if problem.contended:  # where what is given knows more of contention than the labels do
            forms = LinkForms(problem, forms_on_links((), dense_transports(problem)))
            candidates += climb(forms, known_stops([schedule]), self.climbs)
        return Candidate(schedule=best_of(problem, candidates))


@lru_cache(maxsize=4)
def links_without_contention(problem: Problem, climbs: int) -> SearchResult:
    """Return the best exact buckets that are known without contention; cached for pass and certificate.

    `climbs` has no default, for a cache takes a call that leaves it to one for another call.

    Raises:
        InputError: costs of intra-node or inter-node links are missing; see `has_two_links`.
    """
    forms = LinkForms(problem, forms_on_links((), dense_transports(problem)))
    flat = Schedule.from_boundaries(merge_without_contention(problem).stops)
    return search(forms, known_stops([flat, torus_2d(problem)]), climbs)


def known_stops(schedules: list[Schedule]) -> list[tuple[int, ...]]:
    """Return the boundaries of schedules whose buckets are consecutive gradients; others are left out."""
    found = []
    for schedule in schedules:
        sizes = [len(bucket.gradients) for bucket in schedule.buckets]
        if [stop - start for start, stop in pairwise((0, *schedule.stops))] == sizes:
            found.append(schedule.stops)
    return list(dict.fromkeys(found))
