"""Buckets in one of several forms, dense or at a density, judged quickly and moved as long as the step improves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from planner.ir import Bucket, Schedule
from planner.model.compression import bucket_at, density_sum, ratio_of
from planner.model.problem import Problem
from planner.model.replay import Candidate
from planner.model.step import bucket_costs, bucket_costs_step_us
from planner.search.local_search import local_search
from planner.search.tables import Floats

LOCAL_WORK = 40_000
"""Buckets that a local search may evaluate (some 0.1 s)."""


class Forms:
    """The forms of buckets of one problem; what is known of a bucket is computed once."""

    def __init__(self, problem: Problem, limits: Floats, ratios: Sequence[float]) -> None:
        self.problem, self.ratios, self._limits = problem, tuple(ratios), limits
        self._known: dict[tuple[int, int, int], _Known | None] = {}

    def known(self, start: int, stop: int, form: int) -> _Known | None:
        """The bucket [start, stop) in a form; None where it cannot have that."""
        key = start, stop, form
        if key not in self._known:
            bucket = bucket_at(self.problem, self._limits, start, stop, self.ratios[form])
            self._known[key] = None if bucket is None else _Known.of(self.problem, bucket)
        return self._known[key]

    def _buckets(self, choice: Candidate) -> Iterator[_Known | None]:
        start = 0
        for stop, form in choice:
            yield self.known(start, stop, form)
            start = stop

    def possible(self, choice: Candidate) -> bool:
        """Whether each bucket can have its form."""
        return all(known is not None for known in self._buckets(choice))

    def schedule(self, choice: Candidate) -> Schedule:
        """The schedule of a possible choice."""
        return Schedule(buckets=tuple(known.bucket for known in self._buckets(choice) if known is not None))

    def step_us(self, choice: Candidate) -> float:
        """How long the step is, as the simulator says."""
        return bucket_costs_step_us(self.problem, [known.facts for known in self._buckets(choice) if known is not None])

    def compression(self, choice: Candidate) -> tuple[float, float]:
        """(largest ratio, less the sum of densities)."""
        knowns = [known for known in self._buckets(choice) if known is not None]
        return max(known.ratio for known in knowns), round(-sum(known.densities for known in knowns), 6)


class _Known(NamedTuple):
    bucket: Bucket
    facts: tuple[int, float, float, float, tuple[float, float]]
    ratio: float
    densities: float

    @classmethod
    def of(cls, problem: Problem, bucket: Bucket) -> _Known:
        [facts] = bucket_costs(problem, [bucket])
        return cls(bucket, facts, ratio_of(problem, bucket), density_sum(problem, bucket))


def improve(forms: Forms, choice: Candidate, allowed: int) -> Candidate:
    """The best found over the first `allowed` densities; of equal steps the least compression, then fewest buckets."""
    work = LOCAL_WORK // 3 if forms.problem.contended else LOCAL_WORK  # there each takes three times as long

    def rank(trial: Candidate) -> tuple[float, ...]:
        return *forms.compression(trial), len(trial)

    def end_us(trial: Candidate) -> float | None:
        return forms.step_us(trial) if forms.possible(trial) else None

    return local_search(choice, end_us, work, forms=allowed + 1, rank=rank, then="stay")
