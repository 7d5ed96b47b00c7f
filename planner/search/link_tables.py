"""What buckets in every form spend on two kinds of link and on compute, as arrays. See `planner.search.links`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.model.problem import Problem
from planner.search.joint import BucketTables
from planner.search.joint_tables import Counts
from planner.search.link_forms import Form

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LinkTables(BucketTables):
    """Every bucket in every form, on two kinds of link: `cost_us` is on those between nodes."""

    phased: tuple[bool, ...]
    """Of each form, whether it is inside nodes before and after that."""
    scatter_us: Floats
    """Inside nodes, before."""
    gather_us: Floats
    """Inside nodes, after."""

    def only(self, places: Ints) -> LinkTables:
        """Those of some of the places, which are numbers of gradients here."""
        at = np.ix_(np.arange(len(self.phased)), places, places)
        tables = {name: getattr(self, name)[at] for name in Column._fields}
        return replace(self, places=places, ready_us=self.ready_us[places], **tables)


class Column(NamedTuple):
    """Buckets of one form that stop at one place, by where they start."""

    scatter_us: Floats
    cost_us: Floats
    gather_us: Floats
    select_us: Floats
    unpack_us: Floats


ColumnOf = Callable[[Ints, int], Column]
"""(starts, stop) → buckets."""


def link_tables(problem: Problem, forms: Sequence[Form], limits: Floats, places: Ints) -> LinkTables:
    """The tables of a problem with two kinds of link.

    Args:
        problem: the step.
        forms: how buckets may travel.
        limits: the largest ratio of each gradient; only looked at for forms with a ratio.
        places: where buckets may stop, from 0 to the number of gradients.
    """
    shape = len(forms), len(places), len(places)
    tables = Column(np.zeros(shape), np.full(shape, np.inf), *np.zeros((3, *shape)))
    for number, column_of in enumerate(columns(problem, forms, limits)):
        for column, stop in enumerate(places[1:].tolist(), start=1):
            for table, values in zip(tables, column_of(places[:column], stop), strict=True):
                table[number, :column, column] = values
    return LinkTables(
        places=places,
        ready_us=np.concatenate([[0.0], problem.ready_us])[places],
        compute_end_us=problem.compute_end_us,
        phased=tuple(form.phased for form in forms),
        scatter_us=tables.scatter_us,
        cost_us=tables.cost_us,
        gather_us=tables.gather_us,
        select_us=tables.select_us,
        unpack_us=tables.unpack_us,
    )


def columns(problem: Problem, forms: Sequence[Form], limits: Floats) -> Iterator[ColumnOf]:
    """For each form what gives its columns."""
    for form in forms:
        yield _sparse(problem, form, limits) if form.ratio > 1.0 else _dense(problem, form)


def _dense(problem: Problem, form: Form) -> ColumnOf:
    if form.algorithm == "library":
        curves: list[Callable[[Floats], Floats]] = [problem.cost.all_reduce]
    else:
        curves = [phase.times_us for phase in problem.phases("all_reduce", form.algorithm)]

    def column(starts: Ints, stop: int) -> Column:
        times = [problem.range_time_us(curve, starts, stop) for curve in curves]
        nothing = np.zeros(len(starts))
        scatter_us, cost_us, gather_us = times if form.phased else [nothing, *times, nothing]
        return Column(scatter_us, cost_us, gather_us, nothing, nothing)

    return column


def _sparse(problem: Problem, form: Form, limits: Floats) -> ColumnOf:
    selected = _shards_selected(problem, form, limits) if form.phased else _selected(problem, form, limits)
    phases = problem.sparse_phases(form.algorithm)
    costs = problem.selection_cost(form.algorithm), problem.selection_cost(form.algorithm, "unpack")
    before_bytes, before = (np.concatenate([[0], np.cumsum(of)]) for of in (problem.size_bytes, problem.numel))
    shards = problem.shards(form.algorithm)

    def column(starts: Ints, stop: int) -> Column:
        k, possible = selected(starts, stop)
        dense_bytes = (before_bytes[stop] - before_bytes[starts]).astype(np.float64)
        times = [np.asarray(phase.curve(phase.message_bytes(k, dense_bytes))) for phase in phases]
        nothing = np.zeros(len(starts))
        scatter_us, cost_us, gather_us = times if form.phased else [nothing, *times, nothing]
        density = k * shards / np.maximum(1, before[stop] - before[starts])
        spent = [cost(dense_bytes, density) for cost in costs]
        return Column(scatter_us, np.where(possible, cost_us, np.inf), gather_us, *spent)

    return column


Selected = Callable[[Ints, int], tuple[Floats, NDArray[np.bool_]]]
"""(starts, stop) → k, and whether the bucket can have the form."""


def _selected(problem: Problem, form: Form, limits: Floats) -> Selected:
    count = Counts(problem, limits, form.ratio)
    return lambda starts, stop: (count(starts, stop)[0], count.possible(starts, stop))


def _shards_selected(problem: Problem, form: Form, limits: Floats) -> Selected:
    """As `planner.model.compression.hitopk_at`."""
    before = np.concatenate([[0], np.cumsum(problem.numel)])
    usable = np.where(problem.numel > 0, limits, 1.0)
    shards = problem.cost.cluster.ranks_per_node

    def selected(starts: Ints, stop: int) -> tuple[Floats, NDArray[np.bool_]]:
        least = np.minimum.accumulate(usable[:stop][::-1])[::-1][starts]
        shard = np.ceil((before[stop] - before[starts]) / shards)
        return np.ceil(shard / np.minimum(least, form.ratio)), least > 1.0

    return selected
