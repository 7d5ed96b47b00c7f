"""Merging and compression decided together (the aim of LAGS-SGD and MG-WFBP at once): each bucket is dense, narrow (all
its elements in fewer bytes), of low rank (products in place of matrices) or sparse (the largest elements).

Legal for bounded plans: what is left out of a step stays in a residual and is sent later. Asks the cost model for the
all-reduce of ranges of gradients, for encoding, two shots and decoding, for products and the all-reduces of their
factors, and for selection, gather and unpacking.
Shortest step first, then the least compression (smallest largest ratio, then the largest sum of densities), fewest
buckets, earliest boundaries. Exact on the grid of forms where gradients are few and nothing contends; else the best
found. Of the frontier, which goes from the least to the most compression, the first point within 2 % of the shortest
step is taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from planner.ir import Schedule
from planner.model.codecs import DENSE_FORM, LOSSY, CodecModel, Form, Steps, TopK, Wire, compression
from planner.model.compression import Limits, make_limits, partially_protected_boundaries
from planner.model.modes import best_of, step_us
from planner.model.problem import Problem
from planner.model.replay import Candidate as Choice
from planner.passes.base import Candidate, Frontier, Pass, Point
from planner.passes.topology import known_stops
from planner.search.forms import FlatForms, LinkForms
from planner.search.labels import least_ends_us
from planner.search.labels import search as search_labels
from planner.search.lags import layer_wise
from planner.search.links import SearchResult, search
from planner.search.tables import (
    BucketTables,
    bucket_tables,
    dense_transports,
    flat_forms,
    forms_on_links,
    grid,
    has_two_links,
)
from runtime.errors import InputError
from runtime.plan import Accuracy
from runtime.plan.document import LARGEST_RANK

DENSITIES = "0.25|0.0625|0.015625|0.004|0.001"
MAX_DENSITIES = 32
MAX_RANK = 4

MAX_PLACES = 200
"""Places that labels look at where gradients are more, besides boundaries of known schedules."""
CONTENDED_LABELS = 8
"""Labels of a prefix where compute and network slow each other down: what they give is only where to begin then."""
FEW = 300
"""Boundaries of a known schedule that are added to the places, at most."""


@dataclass(frozen=True, kw_only=True)
class Joint(Pass):
    name: ClassVar[str] = "joint"
    accuracy: ClassVar[Accuracy] = "bounded"

    max_ratio: float = 0.0
    """The largest ratio of elements to those that are sent; 0: 1000, and 250 for recurrent and embedding layers."""
    protect: str = ""
    """Names that are sent whole, as patterns separated by `|`; with `none`, biases and norms need not."""
    densities: str = DENSITIES
    """Shares of elements that a bucket may send, separated by `|`."""
    compress: str = ""
    """Allowed encodings: names of `COMPRESS` separated by `|`; by default `wire`, which costs the least accuracy."""
    max_rank: int = 0
    """The largest rank of products in place of matrices; 0: 4."""
    steps: int = 0
    """Steps of the training, which limit ratios where `max_ratio` is 0; 0: not known."""

    def apply(self, schedule: Schedule, problem: Problem) -> Candidate:
        """Return the schedule of the least compression within 2 % of the best one; never worse than the one given."""
        frontier = self.frontier(schedule, problem)
        return Candidate(schedule=frontier.chosen.schedule, frontier=frontier)

    def frontier(self, schedule: Schedule, problem: Problem) -> Frontier:
        """Return the best schedule for each form, from the least to the most compression; the given one comes first."""
        limits = self._limits(problem)
        return _frontier(problem, schedule, limits, flat_forms(self.forms(problem)))

    def forms(self, problem: Problem) -> list[Form]:
        """Return the forms of compressed buckets that the search looks at: those of the allowed encodings."""
        limits = self._limits(problem)
        steps = Steps(parse_densities(self.densities), check_max_rank(self.max_rank or MAX_RANK))
        return [form for codec in LOSSY if codec in self.codecs for form in codec.forms(problem, limits, steps)]

    def _limits(self, problem: Problem) -> Limits:
        return make_limits(problem, self.max_ratio or None, self.protect, self.steps)

    @property
    def codecs(self) -> Codecs:
        return compress_of(self.compress)


Codecs = frozenset[type[CodecModel]]
"""Lossy codecs that a plan may have."""

COMPRESS: Mapping[str, Codecs] = {
    "all": frozenset(LOSSY), **{codec.option: frozenset({codec}) for codec in LOSSY}, "none": frozenset()
}  # fmt: skip


DEFAULT_COMPRESS = Wire.option


def compress_of(names: str) -> Codecs:
    """Return what the option of a pass allows, by default `wire`. Raises InputError: an unknown name."""
    return check_compress(names or DEFAULT_COMPRESS)


def check_compress(names: str, where: str = "--compress") -> Codecs:
    """Return what names of `COMPRESS`, separated by commas or `|`, allow. Raises InputError: an unknown one; its
    message begins with `where`.
    """
    allowed: Codecs = frozenset()
    for name in re.split(r"[,|]", names):
        if name.strip() not in COMPRESS:
            known = ", ".join(COMPRESS)
            raise InputError(f"{where}: found {names!r}, expected one of {known}, or several such as wire,lowrank")
        allowed |= COMPRESS[name.strip()]
    return allowed


def check_max_rank(value: int) -> int:
    """Return the largest rank allowed. Raises InputError where it is none."""
    if not isinstance(value, int) or not 1 <= value <= LARGEST_RANK:
        raise InputError(f"--max-rank: found {value!r}, expected a whole number from 1 to {LARGEST_RANK}, such as 4")
    return value


def parse_densities(text: str) -> tuple[float, ...]:
    """Return ratios, ascending, of densities such as `0.25|0.01`.

    Raises:
        InputError: none, too many, or one outside (0, 1].
    """
    parts = [part.strip() for part in text.split("|") if part.strip()]
    try:
        values = [float(part) for part in parts]
    except ValueError:
        values = []
    if not 0 < len(values) <= MAX_DENSITIES or not all(1e-12 <= value <= 1.0 for value in values):
        raise InputError(
            f"--passes: joint{{densities={text}}}: expected 1 to {MAX_DENSITIES} shares of elements above 0 and up to "
            f"1, separated by '|', such as 0.1|0.01"
        )
    return tuple(sorted({1.0 / value for value in values if value < 1.0}))


def _frontier(problem: Problem, given: Schedule, limits: Limits, ladder: tuple[Form, ...]) -> Frontier:
    start_us = step_us(problem, given)
    points = [Point(form=DENSE_FORM, schedule=given, iteration_us=start_us, exact=False)]
    if problem.ranks == 1 or len(ladder) == 1:
        return Frontier(points=tuple(points), bound_us=start_us, limits=limits.ratios)
    forms = FlatForms(problem, ladder, limits)
    stops = [*known_stops([given, layer_wise(problem, limits.ratios, by_layer=True)]), (problem.count,)]
    known = [partially_protected_boundaries(problem, limits.ratios), *(of for of in stops if len(of) <= FEW)]
    places = grid(problem.count, MAX_PLACES, known)
    tables = bucket_tables(problem, forms.forms, limits, places)
    links: SearchResult | None = None
    for allowed in range(1, len(ladder)):
        point, links = _point(problem, forms, tables, allowed, points[-1], limits)
        points.append(point)
    everywhere = len(places) == problem.count + 1
    bound_us = least_ends_us(tables, len(ladder)) if everywhere else 0.0
    if links is not None:
        bound_us, everywhere = links.bound_us, links.tables is not None
    bound_us = min(start_us, bound_us + problem.update_us)
    best = Frontier(points=tuple(points), bound_us=bound_us, limits=limits.ratios).best
    bound_us = best.iteration_us if points[-1].exact else bound_us
    compute_us = problem.compute_end_us + problem.update_us
    return Frontier(
        points=tuple(points),
        bound_us=max(bound_us, min(compute_us, start_us)),
        limits=limits.ratios,
        tables=(links.tables if links else tables) if everywhere and not problem.contended else None,
    )


def _point(
    problem: Problem, forms: FlatForms, tables: BucketTables, allowed: int, before: Point, limits: Limits
) -> tuple[Point, SearchResult | None]:
    """Return the best with dense and the first `allowed` forms, and the result on intra-node and inter-node links.

    `before` is the point with one form less.
    """
    ladder, fixed = forms.forms[: allowed + 1], [before.schedule]
    if isinstance(ladder[-1].codec, TopK):
        fixed.append(layer_wise(problem, np.minimum(limits.ratios, ladder[-1].ratio), by_layer=True))
    # Every gradient in one bucket (SLGS by layer), and the buckets known so far, in each form.
    cuts = [(problem.count,), *known_stops([before.schedule])]
    choices = [tuple((stop, form) for stop in stops) for stops in cuts for form in range(allowed + 1)]
    starts: list[Choice] = [choice for choice in choices if forms.of(choice) is not None]
    known = [forms.schedule(choice) for choice in starts]
    exact = False
    if problem.contended:
        # Labels know of no contention: messages are slowed by the least and the most that was measured.
        measured = [by_size for by_size in (problem.contention.by_size, problem.contention.gathers_by_size) if by_size]
        for factor in sorted({1.0, problem.contention.network, *(by_size[0][2] for by_size in measured)}):
            slowed = replace(tables, cost_us=tables.cost_us * factor)
            solution = search_labels(slowed, 1 + allowed, np.inf, labels=CONTENDED_LABELS)
            if solution is not None:
                starts.append(tuple(zip(solution.stops, solution.forms, strict=True)))
    else:
        ends_us = [step_us(problem, schedule) - problem.update_us for schedule in (*fixed, *known)]
        solution = search_labels(tables, 1 + allowed, min(ends_us))
        if solution is not None:
            exact = solution.exact
            starts.append(tuple(zip(solution.stops, solution.forms, strict=True)))
    if not exact:
        best = min(starts, key=forms.end_us)
        starts = [forms.improve(choice, allowed) for choice in dict.fromkeys([best, starts[-1]])]
    candidates = [*fixed, *(forms.schedule(choice) for choice in starts)]
    links: SearchResult | None = None
    if has_two_links(problem):
        both = [form for form in forms_on_links(ladder, dense_transports(problem)) if _has_cost(problem, form)]
        known_here = known_stops([_least(problem, candidates), *fixed[:1]])
        links = search(LinkForms(problem, both, limits), known_here)
        candidates += links.schedules
        exact = links.exact and not problem.contended
    schedule = _least(problem, candidates)
    return Point(form=ladder[-1], schedule=schedule, iteration_us=step_us(problem, schedule), exact=exact), links


def _has_cost(problem: Problem, form: Form) -> bool:
    """Return whether the cluster has costs for a form on intra-node and inter-node links."""
    try:
        return form.codec.has_cost(problem, form)
    except InputError:
        return False


def _least(problem: Problem, schedules: Sequence[Schedule]) -> Schedule:
    """Return the schedule of the shortest step, then the least compression, fewest buckets, earliest boundaries."""

    def order(schedule: Schedule) -> tuple[float, float, int, tuple[int, ...]]:
        largest, densities = compression(problem, schedule.buckets)
        return largest, round(densities, 6), len(schedule.buckets), tuple(b.gradients[-1] for b in schedule.buckets)

    return best_of(problem, schedules, order)
