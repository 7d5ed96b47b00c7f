"""Which buckets, and by which of the collectives on one or two kinds of link each.

A bucket goes flat through all ranks, or by phases inside nodes and between them; dense, narrow, or at a density. Labels
(`labels.py`) find the best where gradients are few, and else where to begin; then boundaries and forms are moved.
Choices are judged by a replay of the step on two networks without contention, in the simulator's order of phases; the
caller judges what is found by the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.ir import TIE, Schedule
from planner.model.replay import Candidate
from planner.search.forms import LinkForms
from planner.search.labels import least_ends_us
from planner.search.labels import search as search_labels
from planner.search.tables import BucketTables, bucket_tables, grid

MAX_CELLS = 28_000
"""Places squared times forms that labels look at, so that they take some tenths of a second."""
MAX_PLACES = 96
BOUNDED_CELLS = 600_000
"""Likewise, of all places, where a bound is computed from them."""


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
    found = [forms.improve(choice) for choice in dict.fromkeys(found)]
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
    return [forms.schedule(forms.improve(choice)) for choice in _known(forms, boundaries)[:climbs]]


def _known(forms: LinkForms, boundaries: Sequence[tuple[int, ...]]) -> list[Candidate]:
    """Possible choices, the best first."""
    possible = [choice for choice in forms.starts(boundaries) if forms.of(choice) is not None]
    return sorted(possible, key=lambda choice: (forms.end_us(choice), len(choice)))
