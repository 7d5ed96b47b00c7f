"""Eq. 19 of LAGS-SGD (Shi et al., ECAI 2020): of each layer, as little compression as hides.

A layer's message has to hide behind the backward of the layer that comes next, selection included; the last layer in
backward has nothing to hide behind. A layer whose dense all-reduce hides stays dense. Otherwise the most elements whose
gather hides are sent, but never fewer than 1/c_u of them.

A message of few elements takes little more than its start-up. The paper's rule against that is a buffer of selected
elements (`fill_buffers`); `merge_layers` merges the same elements so that the step is shortest. Neither changes a k.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.sparse import SelectionCost, SparsePhase
from planner.ir import Bucket, Schedule
from planner.model.codecs import DENSE_FORM, Form, TopK
from planner.model.compression import Limits
from planner.model.modes import best_of, step_us
from planner.model.problem import Problem
from planner.search.forms import FlatForms
from planner.search.labels import search
from planner.search.tables import bucket_tables
from runtime.plan.transports import FLAT

DEFAULT_BUFFER = 2048
"""Selected elements of a full buffer, by default: 16 KiB of values and indices from each rank."""
CONTENDED_LABELS = 8
"""Labels of a prefix where compute and network slow each other down, of which labels know nothing."""


def layer_wise(problem: Problem, limits: NDArray[np.float64], *, by_layer: bool = False) -> Schedule:
    """Return every layer by Eq. 19.

    Args:
        problem: the step.
        limits: c_u of each gradient. Gradients with 1, and those without elements, stay dense in buckets of their own,
            and the rest of their layer has the less to hide behind.
        by_layer: whether each k is told by the layers that gradients' names tell, as plans need it.
    """
    runs, gather = problem.layer_runs, _Gather(problem)
    budgets_us = [_backward_us(problem, run) for run in runs[1:]] + [0.0]
    buckets = [
        bucket
        for run, budget_us in zip(runs, budgets_us, strict=True)
        for bucket in _layer(problem, gather, run, budget_us, limits, by_layer=by_layer)
    ]
    return Schedule(buckets=tuple(buckets))


def _backward_us(problem: Problem, run: tuple[int, int]) -> float:
    gradients = problem.profile.compute.gradients[slice(*run)]
    return math.fsum(gradient.backward_us for gradient in gradients)


def _layer(
    problem: Problem,
    gather: _Gather,
    run: tuple[int, int],
    budget_us: float,
    limits: NDArray[np.float64],
    *,
    by_layer: bool,
) -> list[Bucket]:
    """Return the buckets of one layer, with `budget_us` to hide behind: one, where all of it has one limit."""
    if int(problem.numel[slice(*run)].sum()) == 0 or float(problem.range_cost_us(*run)) <= budget_us:
        return [Bucket(tuple(range(*run)))]
    if not by_layer:
        k = _count(problem, gather, run, budget_us, float(limits[run[0]]))
        return [Bucket(tuple(range(*run)), FLAT, TopK(k))]
    pieces = _pieces(problem, run, limits)
    dense = [piece for piece, limit in pieces if limit == 1.0]
    left_us = budget_us - sum(float(problem.range_cost_us(*piece)) for piece in dense)
    buckets = []
    for piece, limit in pieces:
        members = tuple(range(*piece))
        if limit == 1.0:
            buckets.append(Bucket(members))
            continue
        elements = problem.layer_elements(Bucket(members))
        ks = apportion(_count(problem, gather, piece, left_us, limit), elements, limit)
        left_us -= float(gather.times_us(sum(ks), *_sizes(problem, piece)))
        buckets.append(Bucket(members, FLAT, TopK.of_layers(ks)))
    return buckets


def _pieces(problem: Problem, run: tuple[int, int], limits: NDArray[np.float64]) -> list[tuple[tuple[int, int], float]]:
    """Return the pieces of a layer, cut where limits change."""
    pieces: list[tuple[tuple[int, int], float]] = []
    for index in range(*run):
        limit = float(limits[index]) if problem.numel[index] else 1.0
        if pieces and pieces[-1][1] == limit:
            pieces[-1] = ((pieces[-1][0][0], index + 1), limit)
        else:
            pieces.append(((index, index + 1), limit))
    return pieces


def apportion(k: int, elements: list[int], limit: float) -> list[int]:
    """Return k shared by the elements of runs, each with at least what its limit asks for."""
    total, shares, before = sum(elements), [], 0
    for numel in elements:
        after = before + numel
        shares.append(max(math.ceil(numel / limit), k * after // total - k * before // total))
        before = after
    return shares


def _count(problem: Problem, gather: _Gather, piece: tuple[int, int], budget_us: float, limit: float) -> int:
    """Return Eq. 19's k of a piece that does not hide dense."""
    numel, size_bytes = _sizes(problem, piece)
    return max(math.ceil(numel / limit), gather.most_that_hide(numel, size_bytes, budget_us))


def _sizes(problem: Problem, piece: tuple[int, int]) -> tuple[int, float]:
    """(elements, bytes)."""
    return int(problem.numel[slice(*piece)].sum()), float(problem.size_bytes[slice(*piece)].sum())


class _Gather:
    """Times of layers' selected elements, on the network, of selection and of unpacking, over their number k."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    @cached_property
    def _phases(self) -> tuple[SparsePhase, ...]:
        return self._problem.sparse_phases(FLAT)

    @cached_property
    def _selection(self) -> tuple[SelectionCost, SelectionCost]:
        return self._problem.selection_cost(FLAT), self._problem.selection_cost(FLAT, "unpack")

    def times_us(self, k: ArrayLike, numel: int, size_bytes: float) -> NDArray[np.float64]:
        """Return the times of a layer of these elements and dense bytes; elementwise."""
        spent_us = sum((cost(size_bytes, np.asarray(k) / numel) for cost in self._selection), np.zeros(()))
        return sum((phase.curve(phase.message_bytes(k, size_bytes)) for phase in self._phases), spent_us)

    def most_that_hide(self, numel: int, size_bytes: float, budget_us: float) -> int:
        """Return the largest k whose gather and selection fit into the budget; 0 if none does.

        Measured times may fall while k rises, so each stretch on which they are a line is looked at.
        """
        ends = self._line_ends(numel)
        fitting = np.flatnonzero(self.times_us(ends, numel, size_bytes) <= budget_us)
        if fitting.size == 0:
            return 0
        last = int(fitting[-1])
        low, high = int(ends[last]), int(ends[min(last + 1, ends.size - 1)])
        while high - low > 1:
            middle = (low + high) // 2
            fits = bool(self.times_us(middle, numel, size_bytes) <= budget_us)
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _line_ends(self, numel: int) -> NDArray[np.int64]:
        """Return ascending k from 1 to `numel`: between neighbours, and those next to them, times are a line."""
        gathers = [phase.curve.bends_bytes / float(phase.message_bytes(1, 0.0)) for phase in self._phases]
        bends = np.concatenate([*gathers, *(cost.density * numel for cost in self._selection), [1.0, numel]])
        bends = np.clip(bends, 1.0, numel)
        return np.unique(np.concatenate([np.floor(bends), np.ceil(bends)])).astype(np.int64)


def fill_buffers(problem: Problem, schedule: Schedule, buffer: int) -> Schedule:
    """Return a schedule whose sparse buckets are merged by the rule of LAGS-SGD's buffer (Section 5).

    Selected elements of one layer after the other are stored; what is stored is sent as one message once it holds
    `buffer` elements, or the first layer has come. A dense bucket sends what is stored before it, for a bucket holds
    consecutive gradients.

    Args:
        problem: the step.
        schedule: buckets as `layer_wise` returns them with `by_layer`.
        buffer: selected elements of a full buffer; 0: each bucket is sent by itself.
    """
    return Schedule(buckets=tuple(_buffered(problem, schedule.buckets, buffer)))


def _buffered(problem: Problem, buckets: Iterable[Bucket], buffer: int) -> Iterator[Bucket]:
    stored: Bucket | None = None
    for bucket in buckets:
        if not isinstance(bucket.codec, TopK):
            yield from [stored, bucket] if stored else [bucket]
            stored = None
            continue
        stored = _joined(problem, stored, bucket) if stored else bucket
        if isinstance(stored.codec, TopK) and stored.codec.k >= buffer:
            yield stored
            stored = None
    if stored:
        yield stored


def _joined(problem: Problem, first: Bucket, second: Bucket) -> Bucket:
    """Return one bucket with the elements of two that follow each other."""
    ks, more = (list(bucket.codec.ks or ()) if isinstance(bucket.codec, TopK) else [] for bucket in (first, second))
    names = problem.layers_by_name
    if names[first.gradients[-1]] == names[second.gradients[0]]:  # a bucket has one k for each run of a name
        more[0] += ks.pop()
    return Bucket(first.gradients + second.gradients, FLAT, TopK.of_layers(ks + more))


def merge_layers(problem: Problem, schedule: Schedule) -> Schedule:
    """Return a schedule whose consecutive buckets are merged so that the step is shortest; k of every layer stays.

    Dense buckets merge among themselves, and with sparse ones, whose message then holds all of their elements. Exact
    up to 16 buckets, and where selection has no start-up; with contention the best found; never longer than given.

    Args:
        problem: the step.
        schedule: buckets as `layer_wise` returns them with `by_layer`.
    """
    if problem.ranks == 1 or all(bucket.whole for bucket in schedule.buckets):
        return schedule
    limits = Limits(_own_ratios(problem, schedule), Limits.nothing(problem).whole)
    forms = FlatForms(problem, [DENSE_FORM, Form(FLAT, TopK(), float(limits.ratios.max()))], limits)
    places = np.array([0, *schedule.stops], dtype=np.int64)
    tables = bucket_tables(problem, forms.forms, limits, places)
    sparse = np.concatenate([[0], np.cumsum(limits.ratios > 1.0)])[places]
    # A dense bucket of layers that are selected from would send more than their k.
    tables.cost_us[0][sparse[None, :] > sparse[:, None]] = np.inf
    # The labels are exact on up to 16 places that are numbered one after the other.
    tables = replace(tables, places=np.arange(len(places)))
    found, end_us = [schedule], step_us(problem, schedule) - problem.update_us
    if problem.contended:  # labels know of no contention: messages take what they do alone, or while backward runs
        factors = sorted({1.0, problem.contention.network})
        slowed = [replace(tables, cost_us=tables.cost_us * factor) for factor in factors]
        solutions = [search(each, len(forms.forms), math.inf, labels=CONTENDED_LABELS) for each in slowed]
    else:
        solutions = [search(tables, len(forms.forms), end_us)]
    for solution in filter(None, solutions):
        stops = places[np.array(solution.stops)].tolist()
        found.append(forms.schedule(tuple(zip(stops, solution.forms, strict=True))))
    return best_of(problem, found)


def _own_ratios(problem: Problem, schedule: Schedule) -> NDArray[np.float64]:
    """Return for each gradient the ratio whose k is the one that its layer has here; 1 where it is sent whole."""
    ratios = np.ones(problem.count)
    for number, bucket in enumerate(schedule.buckets):
        if not isinstance(bucket.codec, TopK):
            continue
        names = [problem.layers_by_name[index] for index in bucket.gradients]
        edges = [place for place in range(1, len(names)) if names[place] != names[place - 1]]
        for (start, stop), k in zip(pairwise([0, *edges, len(names)]), bucket.codec.ks or (), strict=True):
            run = slice(bucket.gradients[0] + start, bucket.gradients[0] + stop)
            # Between k − 1 and k, so that rounding up gives k; buckets that follow each other never have one ratio,
            # for two that share a layer's name must not count as one run.
            ratios[run] = int(problem.numel[run].sum()) / (k - 0.5 + 0.25 * (number % 2))
    return ratios
