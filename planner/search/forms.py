"""Buckets in one of several forms (dense, narrow or at a density, flat or by phases), judged quickly and moved as long
as that makes the step shorter. What a step spends on a bucket is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

from planner.ir import Bucket, Schedule
from planner.model.codecs import DENSE, Form, codec_of
from planner.model.compression import Limits
from planner.model.problem import Problem
from planner.model.replay import Candidate, Work, steps_end_us
from planner.model.spending import spending
from planner.model.step import BucketCost, bucket_costs, bucket_costs_step_us
from planner.search.local_search import local_search
from runtime.plan.transports import LIBRARY, TORUS_2D

FLAT_WORK, LINK_WORK = 40_000, 12_000
"""Buckets that a local search may evaluate (some 0.1 s): on one network, and on two kinds of link."""

Spent = TypeVar("Spent")


class Forms(Generic[Spent]):
    """The buckets of one problem in each of some forms, of which a choice names the place here; the first is dense.

    `limits` are only needed for forms that are not.
    """

    def __init__(self, problem: Problem, forms: Sequence[Form], limits: Limits | None = None) -> None:
        self.problem, self.forms = problem, tuple(forms)
        self.limits = limits or Limits.nothing(problem)
        self._buckets = [form.codec.buckets(problem, form, self.limits) for form in self.forms]
        self._known: dict[tuple[int, int, int], tuple[Bucket, Spent] | None] = {}

    def spent(self, bucket: Bucket) -> Spent:
        """What a step spends on it, as `end_us` needs it."""
        raise NotImplementedError

    def end_us(self, choice: Candidate) -> float:
        """When a choice ends; infinite where a bucket cannot have its form."""
        raise NotImplementedError

    def known(self, start: int, stop: int, form: int) -> tuple[Bucket, Spent] | None:
        """The bucket [start, stop) in a form; None where it cannot have that."""
        key = start, stop, form
        if key not in self._known:
            bucket = self._buckets[form](start, stop)
            self._known[key] = None if bucket is None else (bucket, self.spent(bucket))
        return self._known[key]

    def of(self, choice: Candidate) -> list[tuple[Bucket, Spent]] | None:
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
        return Schedule(buckets=tuple(bucket for bucket, _ in self.of(choice) or ()))


class _Flat(NamedTuple):
    cost: BucketCost
    ratio: float
    densities: float


class FlatForms(Forms[_Flat]):
    """On one network, judged as the simulator does."""

    def spent(self, bucket: Bucket) -> _Flat:
        """Its cost, largest ratio and sum of densities."""
        [cost] = bucket_costs(self.problem, [bucket])
        codec = codec_of(bucket)
        return _Flat(cost, codec.ratio(self.problem, bucket), codec.densities(self.problem, bucket))

    def end_us(self, choice: Candidate) -> float:
        """The whole step, with contention."""
        found = self.of(choice)
        return math.inf if found is None else bucket_costs_step_us(self.problem, [of.cost for _, of in found])

    def rank(self, choice: Candidate) -> tuple[float, ...]:
        """Largest ratio, less the sum of densities, and buckets: of equal steps the least is best."""
        found = [of for _, of in self.of(choice) or ()]
        return max(of.ratio for of in found), round(-sum(of.densities for of in found), 6), len(choice)

    def improve(self, choice: Candidate, allowed: int) -> Candidate:
        """The best found over the first `allowed` forms beside dense."""
        work = FLAT_WORK // 3 if self.problem.contended else FLAT_WORK  # there each takes three times as long

        def end_us(trial: Candidate) -> float | None:
            time_us = self.end_us(trial)
            return None if math.isinf(time_us) else time_us

        return local_search(choice, end_us, work, forms=allowed + 1, rank=self.rank, then="stay")


class LinkForms(Forms[Work]):
    """On two kinds of link, judged by a replay without contention, in the simulator's order of phases."""

    def spent(self, bucket: Bucket) -> Work:
        """What it asks of compute and both kinds of link; flat messages pass through all ranks."""
        problem, flat = self.problem, "inter" if self.problem.cost.cluster.nodes > 1 else "intra"
        found, ready_us = spending(problem, bucket), problem.ready_list_us[max(bucket.gradients)]
        phases = [(flat if of.resource == "network" else of.resource, of.time_us) for of in found.messages]
        return Work(ready_us, phases, found.before_us, found.after_us)

    def end_us(self, choice: Candidate) -> float:
        """All but the update, without contention."""
        found = self.of(choice)
        return math.inf if found is None else steps_end_us([of for _, of in found], self.problem.compute_end_us)

    def improve(self, choice: Candidate) -> Candidate:
        """The best found: other forms, boundaries dropped or moved."""
        return local_search(choice, self.end_us, LINK_WORK, forms=len(self.forms))

    def starts(self, boundaries: Sequence[tuple[int, ...]]) -> list[Candidate]:
        """Known boundaries with all buckets in one form, as far as each can have it; the others are dense."""
        found: list[Candidate] = []
        for stops in boundaries:
            for form, like in enumerate(self.forms):
                fallback = self.forms.index(Form(TORUS_2D if like.transport.hierarchical else LIBRARY, DENSE))
                possible = [self.known(*place, form) is not None for place in pairwise((0, *stops))]
                forms = [form if there else fallback for there in possible]
                found.append(tuple(zip(stops, forms, strict=True)))
        return list(dict.fromkeys(found))
