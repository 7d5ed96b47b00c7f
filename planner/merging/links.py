"""Which buckets, and by which of the collectives on one or two kinds of link each: a local search.

A bucket goes flat through all ranks, or by phases inside nodes and between them; dense, or at a density. Choices are
judged by a replay of the step on two networks without contention, in the simulator's order of phases; the caller judges
what is found by the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.ir import Bucket, Schedule
from planner.merging.exact import TIE
from planner.merging.neighbours import Choice, neighbours
from planner.problem import Problem
from planner.selection import bucket_at, hitopk_at
from runtime.errors import InputError

WORK = 12_000
"""Buckets that a search may evaluate: the effort is counted, not timed."""
DENSE = ("library", "torus_2d")
SPARSE = ("flat", "hitopk")


@dataclass(frozen=True)
class Form:
    """How a bucket may travel."""

    algorithm: str
    ratio: float = 1.0


class _Known(NamedTuple):
    bucket: Bucket
    last: int
    select_us: float
    unpack_us: float
    phases: list[tuple[str, float]]


def has_two_links(problem: Problem) -> bool:
    """Whether there are several nodes of several ranks, and costs for both kinds of link."""
    cluster = problem.cost.cluster
    if cluster.nodes == 1 or cluster.ranks_per_node == 1:
        return False
    try:
        return bool(problem.phases("all_reduce", "torus_2d"))
    except InputError:
        return False


def forms_of(ratios: Sequence[float]) -> tuple[Form, ...]:
    """Flat and by phases, dense (first) and at every ratio above 1."""
    dense = [Form(algorithm) for algorithm in DENSE]
    return (*dense, *(Form(algorithm, ratio) for ratio in ratios if ratio > 1.0 for algorithm in SPARSE))


class LinkForms:
    """The forms of one problem's buckets; what is known of a bucket is computed once."""

    def __init__(self, problem: Problem, forms: Sequence[Form], limits: NDArray[np.float64] | None = None) -> None:
        """`limits`: the largest ratio of each gradient; only needed for forms with a ratio."""
        self.problem, self.forms = problem, tuple(forms)
        self._limits = np.ones(problem.count) if limits is None else limits
        self._flat = "inter" if problem.cost.cluster.nodes > 1 else "intra"
        self._known: dict[tuple[int, int, int], _Known | None] = {}

    def _bucket(self, start: int, stop: int, form: Form) -> Bucket | None:
        if form.ratio <= 1.0:
            return Bucket(gradients=tuple(range(start, stop)), algorithm=form.algorithm)
        if form.algorithm == "hitopk":
            return hitopk_at(self.problem, self._limits, start, stop, form.ratio)
        return bucket_at(self.problem, self._limits, start, stop, form.ratio)

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
        return _Known(bucket, max(bucket.gradients), problem.selection_us(bucket), unpack_us, phases)

    def of(self, choice: Choice) -> list[_Known] | None:
        """What is known of every bucket; None where one cannot have its form."""
        found, start = [], 0
        for stop, form in choice:
            known = self.known(start, stop, form)
            if known is None:
                return None
            found.append(known)
            start = stop
        return found

    def schedule(self, choice: Choice) -> Schedule:
        """The schedule of a possible choice."""
        return Schedule(buckets=tuple(known.bucket for known in self.of(choice) or ()))

    def end_us(self, choice: Choice) -> float:
        """When everything has ended but the update; infinite where a bucket cannot have its form."""
        found = self.of(choice)
        if found is None:
            return math.inf
        delay_us, done_us = 0.0, []
        for known in found:  # buckets are consecutive, so in order of readiness
            delay_us += known.select_us
            done_us.append(self.problem.ready_list_us[known.last] + delay_us)
        free_us = {"intra": 0.0, "inter": 0.0}
        most = max(len(known.phases) for known in found)
        for wave in range(len(found) + most - 1):
            for index in range(max(0, wave - most + 1), min(wave, len(found) - 1) + 1):
                phases = found[index].phases
                if wave - index < len(phases):
                    link, time_us = phases[wave - index]
                    done_us[index] = free_us[link] = max(done_us[index], free_us[link]) + time_us
        end_us = self.problem.compute_end_us + delay_us
        for known, arrived_us in zip(found, done_us, strict=True):
            end_us = max(end_us, arrived_us) + known.unpack_us if known.unpack_us else end_us
        return max(end_us, *done_us)


def improve(forms: LinkForms, choice: Choice) -> Choice:
    """Other forms, boundaries dropped or moved, as long as the step gets shorter; never worse than what is given."""
    best_us, left, improved = forms.end_us(choice), WORK, True
    while improved and left > 0:
        improved = False
        for index in range(len(choice)):
            for trial in neighbours(choice, index, len(forms.forms)):
                left -= len(trial)
                end_us = forms.end_us(trial)
                if end_us < best_us * (1.0 - TIE):
                    choice, best_us, improved = trial, end_us, True
                    break
                if left <= 0:
                    return choice
            if improved:
                break
    return choice


def starts(forms: LinkForms, boundaries: Sequence[tuple[int, ...]]) -> list[Choice]:
    """Known boundaries, with all buckets in one form, as far as each can have it; the others are dense."""
    found: list[Choice] = []
    for stops in boundaries:
        for form, like in enumerate(forms.forms):
            fallback = DENSE.index("torus_2d" if like.algorithm == "hitopk" else "library")
            bounds = zip((0, *stops[:-1]), stops, strict=True)
            found.append(
                tuple(
                    (stop, form if forms.known(start, stop, form) is not None else fallback) for start, stop in bounds
                )
            )
    return list(dict.fromkeys(found))


def search(forms: LinkForms, boundaries: Sequence[tuple[int, ...]], climbs: int = 3) -> list[Schedule]:
    """The best found from the best few starts."""
    known = sorted(starts(forms, boundaries), key=lambda choice: (forms.end_us(choice), len(choice)))
    return [forms.schedule(improve(forms, choice)) for choice in known[:climbs] if forms.of(choice) is not None]
