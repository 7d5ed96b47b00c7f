"""Buckets in one of several forms, dense or at a density, judged quickly and moved as long as the step improves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from planner.ir import TIE, Bucket, Schedule
from planner.model.compression import bucket_at, density_sum, ratio_of
from planner.model.problem import Problem
from planner.model.simulator import bucket_facts, facts_step_us
from planner.search.joint_tables import Floats
from planner.search.neighbours import Choice, neighbours

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

    def _buckets(self, choice: Choice) -> Iterator[_Known | None]:
        start = 0
        for stop, form in choice:
            yield self.known(start, stop, form)
            start = stop

    def possible(self, choice: Choice) -> bool:
        """Whether each bucket can have its form."""
        return all(known is not None for known in self._buckets(choice))

    def schedule(self, choice: Choice) -> Schedule:
        """The schedule of a possible choice."""
        return Schedule(buckets=tuple(known.bucket for known in self._buckets(choice) if known is not None))

    def step_us(self, choice: Choice) -> float:
        """How long the step is, as the simulator says."""
        return facts_step_us(self.problem, [known.facts for known in self._buckets(choice) if known is not None])

    def compression(self, choice: Choice) -> tuple[float, float]:
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
        [facts] = bucket_facts(problem, [bucket])
        return cls(bucket, facts, ratio_of(problem, bucket), density_sum(problem, bucket))


def improve(forms: Forms, choice: Choice, allowed: int) -> Choice:
    """Local search over the first `allowed` densities: other forms, boundaries dropped or moved.

    A step that is no longer is taken for less compression or fewer buckets, too. The effort is counted, not timed; the
    result is never worse.
    """
    work = LOCAL_WORK // 3 if forms.problem.contended else LOCAL_WORK  # there each takes three times as long
    best, changed = (forms.step_us(choice), *forms.compression(choice), len(choice)), True
    while changed and work > 0:
        changed, index = False, 0
        while index < len(choice) and work > 0:
            for trial in neighbours(choice, index, allowed + 1):
                if not forms.possible(trial):
                    continue
                work -= len(trial)
                time_us = forms.step_us(trial)
                if time_us > best[0] * (1.0 + TIE):
                    continue
                rank = (*forms.compression(trial), len(trial))
                if time_us < best[0] * (1.0 - TIE) or rank < best[1:]:
                    choice, best, changed = trial, (min(time_us, best[0]), *rank), True
                    break
            else:
                index += 1
    return choice
