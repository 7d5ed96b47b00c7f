"""The forms that a bucket may have, and every bucket in every form as arrays of what it spends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.phases import measured_curve
from planner.cost.wire import TWO_SHOT, ratio_of
from planner.model.compression import Limits, segments
from planner.model.problem import Problem
from runtime.errors import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DENSE = ("library", "torus_2d")
SPARSE = ("flat", "hitopk")
PHASED = frozenset({"torus_2d", "hitopk"})
"""Intra-node, inter-node, and intra-node again; the others keep the inter-node links busy alone."""


@dataclass(frozen=True)
class Form:
    algorithm: str
    ratio: float = 1.0
    """Of its bytes as they are added up to those that are sent, at the most; 1: dense."""
    dtype: str | None = None
    """On the wire, where all elements travel in fewer bytes."""
    rank: int | None = None
    """Of the products that travel in place of matrices."""

    @property
    def compressor(self) -> str:
        """As in a plan."""
        if self.rank is not None:
            return "powersgd"
        return "wire" if self.dtype is not None else "topk" if self.ratio > 1.0 else "none"

    @property
    def selects(self) -> bool:
        """Whether a part of the elements is sent."""
        return self.compressor == "topk"

    @property
    def dense(self) -> bool:
        """Whether all is sent as it is."""
        return self.compressor == "none"

    @property
    def phased(self) -> bool:
        """Whether it uses the intra-node links, too."""
        return self.algorithm in PHASED


def has_two_links(problem: Problem) -> bool:
    """Whether there are several nodes of several ranks, and costs for both kinds of link."""
    cluster = problem.cost.cluster
    if cluster.nodes == 1 or cluster.ranks_per_node == 1:
        return False
    try:
        return bool(problem.phases("all_reduce", "torus_2d"))
    except InputError:
        return False


def dense_algorithms(problem: Problem) -> tuple[str, ...]:
    """Algorithms that a dense bucket may have: trees, too, where they and the library are known equally well.

    What a tree costs by formula says little beside what the library was measured to take, which may use trees itself.
    NaiveAG is not among the sparse ones: it sends what `flat` does, and starts up twice.
    """
    cluster = problem.cost.cluster
    if measured_curve(cluster, "all_reduce") is not None and measured_curve(cluster, "tree") is None:
        return DENSE
    try:
        return (*DENSE, "tree") if problem.phases("all_reduce", "tree") else DENSE
    except InputError:
        return DENSE


def forms_on_links(forms: Sequence[Form], dense: Sequence[str] = DENSE) -> tuple[Form, ...]:
    """Of forms on one network, those on two kinds of link: dense (first), then the others, flat and by phases."""
    found = [Form(algorithm) for algorithm in dense]
    for form in forms:
        if form.selects:
            found += [replace(form, algorithm=algorithm) for algorithm in SPARSE]
        elif form.algorithm == TWO_SHOT:
            found += [form, replace(form, algorithm="torus_2d")]
        elif not form.dense:
            found.append(form)
    return tuple(found)


def flat_forms(
    ratios: Sequence[float], narrow: Sequence[tuple[str, str]] = (), low_rank: Sequence[Form] = ()
) -> tuple[Form, ...]:
    """The forms on one network, from the least to the most compression: dense, `narrow` ones (dtype, algorithm),
    `low_rank` ones, and flat at every ratio.
    """
    compressed = [Form(algorithm, ratio_of(dtype), dtype) for dtype, algorithm in narrow]
    compressed += [*low_rank, *(Form("flat", ratio) for ratio in ratios)]
    return (Form("library"), *sorted(compressed, key=lambda form: form.ratio))


def low_rank_forms(problem: Problem, limits: Limits, ranks: Sequence[int]) -> list[Form]:
    """Those of the ranks at which a matrix may travel as a product; the ratio is the largest one's."""
    found = []
    for rank in ranks:
        thin = problem.thin(rank)
        possible = thin.factored & ~limits.keep_shape(problem)
        if possible.any():
            ratio = float(1.0 / thin.densities[possible].min())
            found.append(Form("library", ratio, rank=rank))
    return found


class Column(NamedTuple):
    """Buckets of one form that stop at one place, by where they start."""

    scatter_us: Floats
    cost_us: Floats
    gather_us: Floats
    select_us: Floats
    unpack_us: Floats
    densities: Floats


@dataclass(frozen=True, kw_only=True)
class BucketTables:
    """Every bucket between two places of a grid, in every form. Tables have shape (forms, places, places).

    Where a bucket cannot have a form, its cost is infinite.
    """

    places: Ints
    """From 0 to the number of gradients."""
    ready_us: Floats
    """When all gradients before each place are ready, without selection. Shape (places,)."""
    compute_end_us: float
    phased: tuple[bool, ...]
    """Of each form, whether it is on the intra-node links before and after the inter-node ones."""
    scatter_us: Floats
    """On the intra-node links, before."""
    cost_us: Floats
    """On the network; of two kinds of link, on the inter-node one."""
    gather_us: Floats
    """On the intra-node links, after."""
    select_us: Floats
    """Compute time before the bucket is sent."""
    unpack_us: Floats
    """Compute time after backward and after it has arrived."""
    densities: Floats
    """Summed over the gradients of the bucket; 0 where each rank selects from a part of it."""

    @property
    def two_links(self) -> bool:
        """Whether there are forms on intra-node links; else the network is one."""
        return any(self.phased)

    @property
    def unpacks(self) -> bool:
        return bool(self.unpack_us.any())

    def only(self, places: Ints) -> BucketTables:
        """Those of some of the places, which are numbers of gradients here."""
        at = np.ix_(np.arange(len(self.phased)), places, places)
        tables = {name: getattr(self, name)[at] for name in Column._fields}
        return replace(self, places=places, ready_us=self.ready_us[places], **tables)


def bucket_tables(problem: Problem, forms: Sequence[Form], limits: Limits, places: Ints) -> BucketTables:
    """The tables of a problem, on more than one rank, whose buckets may stop at `places`, from 0 to the number of
    gradients.
    """
    shape = len(forms), len(places), len(places)
    tables = Column(np.zeros(shape), np.full(shape, np.inf), *np.zeros((4, *shape)))
    for number, form in enumerate(forms):
        column_of = _COLUMNS[form.compressor](problem, form, limits)
        for column, stop in enumerate(places[1:].tolist(), start=1):
            for table, values in zip(tables, column_of(places[:column], stop), strict=True):
                table[number, :column, column] = values
    return BucketTables(
        places=places,
        ready_us=np.concatenate([[0.0], problem.ready_us])[places],
        compute_end_us=problem.compute_end_us,
        phased=tuple(form.phased for form in forms),
        **tables._asdict(),
    )


ColumnOf = Callable[[Ints, int], Column]
"""(starts, stop) → buckets."""


def _by_link(form: Form, times_us: Sequence[Floats]) -> Sequence[Floats]:
    """Return what is spent on the intra-node links before, on the network, and on the intra-node links after, of the
    times of a form's phases.
    """
    if form.phased:
        return times_us
    nothing = np.zeros(len(times_us[0]))
    return [nothing, *times_us, nothing]


def _dense(problem: Problem, form: Form, _: Limits) -> ColumnOf:
    if form.algorithm == "library":
        curves: list[Callable[[Floats], Floats]] = [problem.cost.all_reduce]
    else:
        curves = [phase.times_us for phase in problem.phases("all_reduce", form.algorithm)]

    def column(starts: Ints, stop: int) -> Column:
        times = [problem.range_time_us(curve, starts, stop) for curve in curves]
        nothing = np.zeros(len(starts))
        scatter_us, cost_us, gather_us = _by_link(form, times)
        return Column(scatter_us, cost_us, gather_us, nothing, nothing, (stop - starts).astype(np.float64))

    return column


def _sparse(problem: Problem, form: Form, limits: Limits) -> ColumnOf:
    ratios = limits.ratios
    selected = _shards_selected(problem, form, ratios) if form.phased else Counts(problem, ratios, form.ratio)
    phases = problem.sparse_phases(form.algorithm)
    costs = problem.selection_cost(form.algorithm), problem.selection_cost(form.algorithm, "unpack")
    before_bytes, before = (np.concatenate([[0], np.cumsum(of)]) for of in (problem.size_bytes, problem.numel))
    shards = problem.shards(form.algorithm)

    def column(starts: Ints, stop: int) -> Column:
        k, densities, possible = selected(starts, stop)
        dense_bytes = (before_bytes[stop] - before_bytes[starts]).astype(np.float64)
        times = [np.asarray(phase.curve(phase.message_bytes(k, dense_bytes))) for phase in phases]
        scatter_us, cost_us, gather_us = _by_link(form, times)
        density = k * shards / np.maximum(1, before[stop] - before[starts])
        select_us, unpack_us = (cost(dense_bytes, density) for cost in costs)
        cost_us = np.where(possible, cost_us, np.inf)
        return Column(scatter_us, cost_us, gather_us, select_us, unpack_us, densities)

    return column


def _narrow(problem: Problem, form: Form, limits: Limits) -> ColumnOf:
    assert form.dtype is not None
    cost, whole = problem.wire_cost(form.dtype, form.algorithm), limits.keep_dtype(problem, form.dtype)
    before, kept = (np.concatenate([[0], np.cumsum(of)]) for of in (problem.numel, whole))

    def column(starts: Ints, stop: int) -> Column:
        elements = before[stop] - before[starts]
        times = [phase.time_us(elements) for phase in cost.phases]
        scatter_us, cost_us, gather_us = _by_link(form, times)
        cost_us = np.where(kept[stop] == kept[starts], cost_us, np.inf)
        densities = (stop - starts) / form.ratio
        return Column(scatter_us, cost_us, gather_us, cost.encode_us(elements), cost.decode_us(elements), densities)

    return column


def _factored(problem: Problem, form: Form, limits: Limits) -> ColumnOf:
    assert form.rank is not None
    cost, thin = problem.low_rank_cost(form.rank), problem.thin(form.rank)
    whole, of_each = limits.keep_shape(problem), thin.densities
    before, left, right, kept, densities = (
        np.concatenate([[0], np.cumsum(of)]) for of in (problem.numel, thin.left, thin.right, whole, of_each)
    )

    def column(starts: Ints, stop: int) -> Column:
        elements, first, second = (of[stop] - of[starts] for of in (before, left, right))
        [scatter_us, cost_us, gather_us] = _by_link(form, [cost.network_us(first, second, elements)])
        cost_us = np.where((kept[stop] == kept[starts]) & (first > 0), cost_us, np.inf)
        sent = densities[stop] - densities[starts]
        return Column(scatter_us, cost_us, gather_us, cost.pack_us(elements), cost.unpack_us(elements), sent)

    return column


_COLUMNS: Mapping[str, Callable[[Problem, Form, Limits], ColumnOf]] = {
    "none": _dense, "topk": _sparse, "wire": _narrow, "powersgd": _factored
}  # fmt: skip
"""By compressor."""


Selected = Callable[[Ints, int], tuple[Floats, Floats, NDArray[np.bool_]]]
"""(starts, stop) → k, the sum of densities, and whether the bucket can have the form."""


def _shards_selected(problem: Problem, form: Form, limits: Floats) -> Selected:
    """As `planner.model.compression.hitopk_at`."""
    before = np.concatenate([[0], np.cumsum(problem.numel)])
    usable = np.where(problem.numel > 0, limits, 1.0)
    shards = problem.cost.cluster.ranks_per_node

    def selected(starts: Ints, stop: int) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        least = np.minimum.accumulate(usable[:stop][::-1])[::-1][starts]
        shard = np.ceil((before[stop] - before[starts]) / shards)
        return np.ceil(shard / np.minimum(least, form.ratio)), np.zeros(len(starts)), least > 1.0

    return selected


class Counts:
    """k of `flat` buckets at one ratio: the sum over their layers, of which the first and the last may be cut."""

    def __init__(self, problem: Problem, limits: Floats, ratio: float) -> None:
        """`limits`: the largest ratio of each gradient."""
        runs = segments(problem, limits)
        self._start = np.array([start for start, _ in runs])
        self._stop = np.array([stop for _, stop in runs])
        self._ratio = np.minimum(limits[self._start], ratio)
        self._run = np.repeat(np.arange(len(runs)), self._stop - self._start)
        self._before = np.concatenate([[0], np.cumsum(problem.numel)])
        whole = self._piece(np.arange(len(runs)), self._start, self._stop)
        self._sums = [np.concatenate([[0.0], np.cumsum(values)]) for values in whole]
        names = problem.layers_by_name
        cut = [a == b and x != y for a, b, x, y in zip(names, names[1:], limits, limits[1:], strict=False)]
        self._cut = np.concatenate([[0], np.cumsum(np.array(cut, dtype=np.int64))])
        self._empty = np.concatenate([[0], np.cumsum(problem.numel == 0)])
        self._lossy = np.concatenate([[0], np.cumsum(limits > 1.0)])

    def __call__(self, starts: Ints, stop: int) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """(k, sum of densities, whether each layer has one k ≥ 1 and something may be left out at all) of buckets."""
        first, last = self._run[starts], self._run[stop - 1]
        inside = first == last
        ends = np.where(inside, stop, self._stop[first])
        heads = self._piece(first, starts, ends)
        tails = self._piece(np.array([last]), np.array([self._start[last]]), np.array([stop]))
        k, densities = (
            head + np.where(inside, 0.0, sums[last] - sums[np.minimum(first + 1, last)] + tail[0])
            for head, tail, sums in zip(heads, tails, self._sums, strict=True)
        )
        whole = (self._cut[stop - 1] == self._cut[starts]) & (self._empty[stop] == self._empty[starts])
        return k, densities, np.asarray(whole & (self._lossy[stop] > self._lossy[starts]))

    def _piece(self, run: Ints, starts: Ints, stops: Ints) -> tuple[Floats, Floats]:
        numel = (self._before[stops] - self._before[starts]).astype(np.float64)
        selected = np.ceil(numel / self._ratio[run])
        density = np.divide(selected, numel, out=np.ones_like(numel), where=numel > 0.0)
        return selected, density * (stops - starts)


def grid(count: int, most: int, schedules: Sequence[Sequence[int]]) -> Ints:
    """Places where buckets may stop: evenly spaced where gradients are many, and those of known schedules."""
    stride = -(-count // most)
    even = np.arange(0, count + 1, stride, dtype=np.int64)
    known = [np.asarray(stops, dtype=np.int64) for stops in schedules if stride > 1]
    return np.unique(np.concatenate([even, np.array([0, count], dtype=np.int64), *known]))


def cheapest_to_end_us(best_us: Floats) -> Floats:
    """The least that buckets from each place on can cost, given the least of each bucket. Shapes (places, places)."""
    rest_us = np.zeros(len(best_us))
    for start in range(len(best_us) - 2, -1, -1):
        rest_us[start] = (best_us[start, start + 1 :] + rest_us[start + 1 :]).min()
    return rest_us
