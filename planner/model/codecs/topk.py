"""Buckets of which the largest elements are sent, as values and indices: of each layer, of a bucket, or of a shard."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from planner.cost.sparse import SELECTED_BYTES, flat_is_implied
from planner.documents.text import mib, pluralize
from planner.ir import Bucket, Codec, Schedule
from planner.model.codecs.codec import (
    BucketOf,
    CodecModel,
    Column,
    ColumnOf,
    Elements,
    Floats,
    Form,
    Ints,
    Message,
    Spending,
    Steps,
    prefix_sums,
)
from planner.model.compression import Limits, segments, selected, shard_elements, steps_of_ratio
from planner.model.problem import Problem
from runtime.errors import InputError
from runtime.pages import page
from runtime.plan import CompressorSpec, PlanBucket
from runtime.plan.names import numbered
from runtime.plan.predicted import FrontierPoint
from runtime.plan.transports import FLAT, HITOPK


@dataclass(frozen=True, slots=True)
class TopK(CodecModel):
    """The largest elements.

    >>> str(Bucket((3,), FLAT, TopK(120)))
    '[3] sparse/flat topk k=120'
    >>> str(Bucket((3, 4), FLAT, TopK(121, (120, 1))))
    '[3-4] sparse/flat topk k=121 ks=120,1'
    """

    name: ClassVar[str] = "topk"
    option: ClassVar[str] = "sparse"
    counted_as: ClassVar[str] = "sparse_buckets"

    k: int = 0
    """Number of elements selected from the bucket, by a hierarchical transport from each shard of a node; 0 in forms,
    where it follows from the ratio.
    """
    ks: tuple[int, ...] | None = None
    """The same by layer: for each run of gradients of one layer in the bucket; their sum is `k`. None: from all."""

    @classmethod
    def of_layers(cls, ks: Sequence[int]) -> TopK:
        """Return the codec that selects so many elements of each run of gradients of one layer."""
        return cls(sum(ks), tuple(ks))

    def __str__(self) -> str:
        text = f"{self.name} k={self.k}"
        return text if self.ks is None else f"{text} ks={','.join(map(str, self.ks))}"

    @classmethod
    def parse(cls, text: str) -> Codec | None:
        match = re.fullmatch(r"topk k=([0-9]{1,12})(?: ks=([0-9]{1,12}(?:,[0-9]{1,12})*))?", text)
        if match is None:
            return None
        return cls(int(match[1]), None if match[2] is None else tuple(map(int, match[2].split(","))))

    @property
    def by_layer(self) -> bool:
        return self.ks is not None

    def defect(self, bucket: Bucket, elements: Elements | None) -> str | None:
        if self.k < 1 or not bucket.transport.sparse:
            return "k ≥ 1 belongs to topk, and a sparse topk needs it"
        if self.ks is None:
            return None
        if sum(self.ks) != self.k or min(self.ks, default=0) < 1:
            return "ks has to hold numbers of at least 1 whose sum is k"
        if elements is None:
            return None
        present = elements(bucket)
        if len(present) != len(self.ks):
            return f"found {len(self.ks)} ks for {len(present)} runs of layers"
        runs = enumerate(zip(self.ks, present, strict=True))
        return next(
            (f"selects {k} of the {numel} elements of run {run}" for run, (k, numel) in runs if k > numel), None
        )

    def spend(self, problem: Problem, bucket: Bucket) -> Spending:
        """Return one message per phase, whatever the dtypes."""
        transport, k = bucket.transport, self.k
        dense_bytes, elements = int(problem.size_bytes[list(bucket.gradients)].sum()), problem.elements(bucket)
        messages = tuple(
            Message(
                phase.link if transport.staged else "network",
                phase.name,
                float(phase.message_bytes(k, dense_bytes)),
                phase.time_us(k, dense_bytes),
            )
            for phase in problem.sparse_phases(transport)
        )
        density = k * problem.shards(transport) / max(1, elements)
        select, unpack = problem.selection_cost(transport), problem.selection_cost(transport, "unpack")
        return Spending(messages, float(select(dense_bytes, density)), float(unpack(dense_bytes, density)))

    @classmethod
    def of_spec(cls, spec: CompressorSpec, problem: Problem, bucket: Bucket) -> Bucket:
        if spec.k is not None:
            return replace(bucket, codec=cls.of_layers(tuple(spec.k.values())))
        k = max(1, int((spec.density or 1.0) * cls()._selected_from(problem, bucket)))
        return replace(bucket, codec=cls(k))

    def spec(self, problem: Problem, bucket: Bucket) -> CompressorSpec:
        """Return the density, or k for each layer; a layer that comes back in the bucket is numbered: `conv#2`."""
        if self.ks is None:
            # The floor of density times elements is k, however that is rounded.
            density = min(1.0, (self.k + 0.5) / self._selected_from(problem, bucket))
            selector = problem.selector(bucket.transport)
            return CompressorSpec(name=self.name, selector=selector, density=density, scope="bucket")
        names = [problem.layers_by_name[index] for index in bucket.gradients]
        runs = [name for index, name in enumerate(names) if index == 0 or name != names[index - 1]]
        k: dict[str, int] = {}
        for name, unique, count in zip(runs, numbered(runs), self.ks, strict=True):
            if unique in k or (unique != name and unique in runs):
                raise InputError(
                    f"the layer {unique!r}: found it beside two runs of gradients of the layer {name!r} in one bucket, "
                    f"expected names that tell them apart; rename the layer, or add --protect '{name}.*'"
                )
            k[unique] = count
        return CompressorSpec(name=self.name, selector="exact", k=k)

    def _selected_from(self, problem: Problem, bucket: Bucket) -> int:
        """Return the number of elements that a bucket's k are selected from."""
        elements = problem.elements(bucket)
        return shard_elements(problem, elements) if bucket.transport.hierarchical else elements

    def ratio(self, problem: Problem, bucket: Bucket) -> float:
        if self.ks is None:
            return self._selected_from(problem, bucket) / self.k
        return max(numel / k for numel, k in zip(problem.layer_elements(bucket), self.ks, strict=True))

    def densities(self, problem: Problem, bucket: Bucket) -> float:
        elements, position = problem.layer_elements(bucket), -1
        whole = max(1, self._selected_from(problem, bucket))
        total, before = 0.0, None
        for index in bucket.gradients:
            layer = problem.layers_by_name[index]
            position += layer != before
            before = layer
            total += self.ks[position] / elements[position] if self.ks else self.k / whole
        return total

    def sent_elements(self, problem: Problem, bucket: Bucket) -> int:
        return min(problem.elements(bucket), problem.shards(bucket.transport) * self.k)

    def pushed_bytes(self, problem: Problem, bucket: Bucket) -> float:
        return float(SELECTED_BYTES * self.k)

    def sent_text(self) -> str:
        return f"{self.k:,}"

    def content_text(self, bucket: Bucket) -> str:
        return f"k = {self.k:,}"

    def on_links(self, form: Form) -> list[Form]:
        """Return both; naive_all_gather is none of them: it sends what `flat` does, and starts up twice."""
        return [Form(transport, self, form.ratio) for transport in (FLAT, HITOPK)]

    def has_cost(self, problem: Problem, form: Form) -> bool:
        return bool(problem.sparse_phases(form.transport))

    def columns(self, problem: Problem, form: Form, limits: Limits) -> ColumnOf:
        transport = form.transport
        select = _shards_selected if transport.hierarchical else Counts
        selected = select(problem, limits.ratios, form.ratio)
        phases = problem.sparse_phases(transport)
        costs = problem.selection_cost(transport), problem.selection_cost(transport, "unpack")
        before_bytes, before = prefix_sums(problem.size_bytes, problem.numel)
        shards = problem.shards(transport)

        def column(starts: Ints, stop: int) -> Column:
            k, densities, possible = selected(starts, stop)
            dense_bytes = (before_bytes[stop] - before_bytes[starts]).astype(np.float64)
            times = [np.asarray(phase.curve(phase.message_bytes(k, dense_bytes))) for phase in phases]
            scatter_us, cost_us, gather_us = form.by_link(times)
            density = k * shards / np.maximum(1, before[stop] - before[starts])
            select_us, unpack_us = (cost(dense_bytes, density) for cost in costs)
            cost_us = np.where(possible, cost_us, np.inf)
            return Column(scatter_us, cost_us, gather_us, select_us, unpack_us, densities)

        return column

    def buckets(self, problem: Problem, form: Form, limits: Limits) -> BucketOf:
        make = shard_bucket if form.transport.hierarchical else layer_bucket
        return lambda start, stop: make(problem, limits.ratios, start, stop, form.ratio)

    def form_text(self, form: Form) -> str:
        return f"1/{form.ratio:,.4g} of the elements"

    @classmethod
    def forms(cls, problem: Problem, limits: Limits, steps: Steps) -> list[Form]:
        """Return flat ones at every ratio below the largest limit, and at that in place of those above."""
        most = float(limits.ratios.max())
        ratios = dict.fromkeys(min(ratio, most) for ratio in steps.ratios)
        return [Form(FLAT, cls(), ratio) for ratio in ratios if ratio > 1.0]

    @classmethod
    def forms_text(cls, forms: Sequence[Form]) -> str:
        ratios = ", ".join(f"{form.ratio:g}" for form in forms)
        return f"have, in each layer not limited further, a ratio of {ratios}"

    @classmethod
    def point_text(cls, point: FrontierPoint) -> str | None:
        return "sparse" if point.max_ratio > 1.0 and point.dtype is None and not point.rank else None

    @classmethod
    def notes(cls, problem: Problem, schedule: Schedule, buckets: Sequence[Bucket], limits: Floats) -> list[str]:
        members = [index for bucket in buckets for index in bucket.gradients]
        codecs = [(bucket.codec, bucket) for bucket in buckets if isinstance(bucket.codec, TopK)]
        sent_bytes = SELECTED_BYTES * sum(codec.sent_elements(problem, bucket) for codec, bucket in codecs)
        largest = max(codec.ratio(problem, bucket) for codec, bucket in codecs)
        notes = [
            "what is held back is learnt late, and costs most in the first steps: --from-step makes those exact "
            f"({page('concepts/compression')})",
            f"{pluralize(len(buckets), 'sparse bucket')} of {len(schedule.buckets)}: "
            f"{mib(int(problem.size_bytes[members].sum()))} of gradients travel as {mib(sent_bytes)} of values "
            f"and indices from each rank; largest ratio {largest:,.4g}",
            f"a ratio of {largest:,.4g} needs about {float(f'{steps_of_ratio(largest):.2g}'):,.0f} steps: from there "
            "on ratio³ / steps (LAGS-SGD, Eq. 18) is at most 1; --steps limits ratios to what the training covers",
        ]
        protected = [index for index in range(problem.count) if limits[index] <= 1.0]
        if protected:
            share = int(problem.numel[protected].sum()) / max(1, int(problem.numel.sum()))
            notes.append(
                f"nothing is selected from {pluralize(len(protected), 'gradient')} of {problem.count} ({share:.2%} of "
                f"the elements)"
            )
        cluster = problem.cost.cluster
        if cluster.sparsify is None:
            notes.append(
                "selection is taken as free, for the cluster has no `sparsify` cost: the gain may be less, or none; "
                "time it on that machine and add it"
            )
        if flat_is_implied(cluster):
            notes.append("gathers are taken to cost what follows from the all-reduce")
        return notes

    @classmethod
    def summary(cls, buckets: Sequence[PlanBucket]) -> str:
        by_layer = [bucket.compressor.k for bucket in buckets if bucket.compressor.k is not None]
        kept = sum(sum(k.values()) for k in by_layer)
        sent = f", {kept:,} elements of these are sent" if len(buckets) == len(by_layer) else ""
        return f"{len(buckets)} of them sparse{sent}"


def layer_bucket(problem: Problem, limits: Floats, start: int, stop: int, ratio: float) -> Bucket | None:
    """Return the bucket [start, stop) at a ratio; dense at 1, None where its layers cannot be selected from apart.

    That is where a layer is protected in part, or has no elements, for a plan has one k ≥ 1 for each layer in a bucket;
    and where all are protected.
    """
    members = tuple(range(start, stop))
    if ratio <= 1.0:
        return Bucket(members)
    if not (limits[start:stop] > 1.0).any():
        return None
    ks: list[int] = []
    elements, before = 0, None
    for index in members:
        layer, numel = problem.layers_by_name[index], int(problem.numel[index])
        torn = layer == before and limits[index] != limits[index - 1]
        if torn or numel == 0:
            return None
        if layer == before:
            ks.pop()
        else:
            elements = 0
        elements, before = elements + numel, layer
        ks.append(selected(elements, float(limits[index]), ratio))
    return Bucket(members, FLAT, TopK.of_layers(ks))


def shard_bucket(problem: Problem, limits: Floats, start: int, stop: int, ratio: float) -> Bucket | None:
    """Return the bucket [start, stop) at a ratio, selected from the shards of a node; None where one of its gradients
    is protected, or has no elements: shards do not follow gradients, so protected ones cannot be told apart there.
    """
    numel = problem.numel[start:stop]
    limit = min(float(limits[start:stop].min()), ratio)
    if limit <= 1.0 or not numel.all():
        return None
    k = selected(shard_elements(problem, int(numel.sum())), limit, ratio)
    return Bucket(tuple(range(start, stop)), HITOPK, TopK(k))


Selected = Callable[[Ints, int], tuple[Floats, Floats, NDArray[np.bool_]]]
"""(starts, stop) → k, the sum of densities, and whether the bucket can have the form."""


def _shards_selected(problem: Problem, limits: Floats, ratio: float) -> Selected:
    """Return k of buckets as `shard_bucket` has them."""
    [before] = prefix_sums(problem.numel)
    usable = np.where(problem.numel > 0, limits, 1.0)
    shards = problem.cost.cluster.ranks_per_node

    def selected(starts: Ints, stop: int) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        least = np.minimum.accumulate(usable[:stop][::-1])[::-1][starts]
        shard = np.ceil((before[stop] - before[starts]) / shards)
        return np.ceil(shard / np.minimum(least, ratio)), np.zeros(len(starts)), least > 1.0

    return selected


class Counts:
    """k of flat buckets at one ratio, as `layer_bucket` has them: the sum over their layers; the first and the last may
    be cut.
    """

    def __init__(self, problem: Problem, limits: Floats, ratio: float) -> None:
        """`limits`: the largest ratio of each gradient."""
        runs = segments(problem, limits)
        self._start = np.array([start for start, _ in runs])
        self._stop = np.array([stop for _, stop in runs])
        self._ratio = np.minimum(limits[self._start], ratio)
        self._run = np.repeat(np.arange(len(runs)), self._stop - self._start)
        self._before, self._empty, self._lossy = prefix_sums(problem.numel, problem.numel == 0, limits > 1.0)
        self._sums = prefix_sums(*self._piece(np.arange(len(runs)), self._start, self._stop))
        names = problem.layers_by_name
        cut = [a == b and x != y for a, b, x, y in zip(names, names[1:], limits, limits[1:], strict=False)]
        [self._cut] = prefix_sums(np.array(cut, dtype=np.int64))

    def __call__(self, starts: Ints, stop: int) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Return (k, sum of densities, whether each layer has one k ≥ 1 and something may be left out) of buckets."""
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
