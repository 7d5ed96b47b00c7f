"""Which buckets, and by which of the collectives on one or two kinds of link each.

A bucket goes flat through all ranks, or by phases inside nodes and between them; dense, or at a density. Labels
(`labels.py`) find the best where gradients are few, and else where to begin; then boundaries and forms are moved.
Choices are judged by a replay of the step on two networks without contention, in the simulator's order of phases; the
caller judges what is found by the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.ir import TIE, Bucket, Schedule
from planner.model.compression import bucket_at, hitopk_at
from planner.model.problem import Problem
from planner.model.replay import Candidate, Work, steps_end_us
from planner.search.labels import least_ends_us
from planner.search.labels import search as search_labels
from planner.search.local_search import local_search
from planner.search.tables import BucketTables, Form, bucket_tables, grid

WORK = 12_000
"""Buckets that a search may evaluate: the effort is counted, not timed."""
MAX_CELLS = 28_000
"""Places squared times forms that labels look at, so that they take some tenths of a second."""
MAX_PLACES = 96
BOUNDED_CELLS = 600_000
"""Likewise, of all places, where a bound is computed from them."""


class _Known(NamedTuple):
    bucket: Bucket
    work: Work


class LinkForms:
    """The forms of one problem's buckets; what is known of a bucket is computed once."""

    def __init__(self, problem: Problem, forms: Sequence[Form], limits: NDArray[np.float64] | None = None) -> None:
        """`limits`: the largest ratio of each gradient; only needed for forms with a ratio."""
        self.problem, self.forms = problem, tuple(forms)
        self.limits = np.ones(problem.count) if limits is None else limits
        self._flat = "inter" if problem.cost.cluster.nodes > 1 else "intra"
        self._known: dict[tuple[int, int, int], _Known | None] = {}

    def dense(self, algorithm: str) -> int:
        """The number of a dense form."""
        return self.forms.index(Form(algorithm))

    def _bucket(self, start: int, stop: int, form: Form) -> Bucket | None:
        if form.ratio <= 1.0:
            return Bucket(gradients=tuple(range(start, stop)), algorithm=form.algorithm)
        if form.algorithm == "hitopk":
            return hitopk_at(self.problem, self.limits, start, stop, form.ratio)
        return bucket_at(self.problem, self.limits, start, stop, form.ratio)

    def known(self, start: int, stop: int, form: int) -> _Known | None:
        """The bucket [start, stop) in a form; None where it cannot have that."""
        key = start, stop, form
        if key not in self._known:
            bucket = self._bucket(start, stop, self.forms[form])
            self._known[key] = None if bucket is None else self._facts(bucket)
        return self._known[key]

    def _facts(self, bucket: Bucket) -> _Known:
        problem = self.problem
        phases = [(self._flat if on == "network" else on, us) for on, _, us in problem.phase_times(bucket)]
        unpack_us = problem.selection_us(bucket, "unpack")
        ready_us = problem.ready_list_us[max(bucket.gradients)]
        return _Known(bucket, Work(ready_us, phases, problem.selection_us(bucket), unpack_us))

    def of(self, choice: Candidate) -> list[_Known] | None:
        """What is known of every bucket; None where one cannot have its form."""
        found, start = [], 0
        for stop, form in choice:
            known = self.known(start, stop, form)
            if known is None:
                return None
            found.append(known)
            start = stop
        return found

    def schedule(self, choice: Candidate) -> Schedule:
        """The schedule of a possible choice."""
        return Schedule(buckets=tuple(known.bucket for known in self.of(choice) or ()))

    def end_us(self, choice: Candidate) -> float:
        """When everything has ended but the update; infinite where a bucket cannot have its form."""
        found = self.of(choice)
        if found is None:
            return math.inf
        return steps_end_us([known.work for known in found], self.problem.compute_end_us)


def improve(forms: LinkForms, choice: Candidate) -> Candidate:
    """The best found: other forms, boundaries dropped or moved."""
    return local_search(choice, forms.end_us, WORK, forms=len(forms.forms))


def starts(forms: LinkForms, boundaries: Sequence[tuple[int, ...]]) -> list[Candidate]:
    """Known boundaries, with all buckets in one form, as far as each can have it; the others are dense."""
    found: list[Candidate] = []
    for stops in boundaries:
        for form, like in enumerate(forms.forms):
            fallback = forms.dense("torus_2d" if like.algorithm == "hitopk" else "library")
            bounds = zip((0, *stops[:-1]), stops, strict=True)
            found.append(
                tuple(
                    (stop, form if forms.known(start, stop, form) is not None else fallback) for start, stop in bounds
                )
            )
    return list(dict.fromkeys(found))


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found on two kinds of link."""

    schedules: tuple[Schedule, ...]
    """The best in the eyes of the replay is among them."""
    end_us: float
    """When that one ends, the update left out."""
    bound_us: float
    """No choice ends earlier."""
    exact: bool
    """Whether the bound is when the best one ends."""
    tables: BucketTables | None = None
    """With every place between gradients, where these are not too many."""


def search(forms: LinkForms, boundaries: Sequence[tuple[int, ...]], climbs: int = 3) -> SearchResult:
    """The best found by labels, and from the best of known boundaries with all buckets in one form."""
    known, problem, count = _known(forms, boundaries), forms.problem, len(forms.forms)
    everywhere = np.arange(problem.count + 1)
    whole = len(everywhere) ** 2 * count <= BOUNDED_CELLS
    tables = bucket_tables(problem, forms.forms, forms.limits, everywhere) if whole else None
    bound_us = problem.compute_end_us if tables is None else least_ends_us(tables, count)
    shorter = [stops for stops in boundaries if len(stops) <= MAX_PLACES]
    places = grid(problem.count, min(MAX_PLACES, int(math.sqrt(MAX_CELLS / count))), shorter)
    if tables is None:
        looked_at = bucket_tables(problem, forms.forms, forms.limits, places)
    else:
        looked_at = tables if len(places) == len(everywhere) else tables.only(places)
    solution = search_labels(looked_at, count, forms.end_us(known[0]))
    found = [] if solution is None else [tuple(zip(solution.stops, solution.forms, strict=True))]
    exact = solution is not None and solution.exact and looked_at is tables
    if not exact and not (found and forms.end_us(found[0]) <= bound_us * (1.0 + TIE)):
        found += known[: max(1, climbs - 1)]
    found = [improve(forms, choice) for choice in dict.fromkeys(found)]
    end_us = min(forms.end_us(choice) for choice in found)
    exact = exact or end_us <= bound_us * (1.0 + TIE)
    return SearchResult(
        schedules=tuple(dict.fromkeys(forms.schedule(choice) for choice in found)),
        end_us=end_us,
        bound_us=end_us if exact else bound_us,
        exact=exact,
        tables=tables,
    )


def climb(forms: LinkForms, boundaries: Sequence[tuple[int, ...]], climbs: int) -> list[Schedule]:
    """The best found from the best few of known boundaries alone."""
    return [forms.schedule(improve(forms, choice)) for choice in _known(forms, boundaries)[:climbs]]


def _known(forms: LinkForms, boundaries: Sequence[tuple[int, ...]]) -> list[Candidate]:
    """Possible choices, the best first."""
    possible = [choice for choice in starts(forms, boundaries) if forms.of(choice) is not None]
    return sorted(possible, key=lambda choice: (forms.end_us(choice), len(choice)))
