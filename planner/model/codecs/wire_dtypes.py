"""Buckets of which all elements are sent in a narrower dtype: by `torus_2d` between nodes alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from planner.cost.wire import DTYPES, WireCost, encoding, ratio_of
from planner.documents.text import mib, pluralize
from planner.ir import Bucket, Codec, Schedule
from planner.model.codecs.codec import (
    BucketOf,
    CodecModel,
    Column,
    ColumnOf,
    Floats,
    Form,
    Ints,
    Message,
    Spending,
    Steps,
    prefix_sums,
    unmeasured,
)
from planner.model.compression import Limits
from planner.model.problem import Problem
from runtime.plan import CompressorSpec, PlanBucket
from runtime.plan.predicted import FrontierPoint
from runtime.plan.transports import NATIVE, TORUS_2D, TWO_SHOT


@dataclass(frozen=True, slots=True)
class Wire(CodecModel):
    """All elements in the dtype of the wire.

    >>> str(Bucket((0, 1), TWO_SHOT, Wire("int8")))
    '[0-1] all_reduce/two_shot wire dtype=int8'
    """

    name: ClassVar[str] = "wire"
    option: ClassVar[str] = "wire"
    counted_as: ClassVar[str] = "narrow_buckets"

    dtype: str

    def __str__(self) -> str:
        return f"{self.name} dtype={self.dtype}"

    @classmethod
    def parse(cls, text: str) -> Codec | None:
        match = re.fullmatch(r"wire dtype=([a-z0-9_]+)", text)
        return None if match is None else cls(match[1])

    def spend(self, problem: Problem, bucket: Bucket) -> Spending:
        """Return phases of fewer bytes; the network waits for what owners do between the two shots."""
        return spend_on(problem.wire_cost(self.dtype, bucket.transport), problem.elements(bucket))

    def spec(self, problem: Problem, bucket: Bucket) -> CompressorSpec:
        links = "inter" if bucket.transport.hierarchical else None
        return CompressorSpec(name=self.name, dtype=self.dtype, links=links)

    @classmethod
    def of_spec(cls, spec: CompressorSpec, problem: Problem, bucket: Bucket) -> Bucket:
        dtype = str(spec.dtype)
        known = bucket.transport.hierarchical or bucket.transport in DTYPES[dtype].transports
        # The library's all-reduce means two shots.
        return replace(bucket, codec=cls(dtype), transport=bucket.transport if known else TWO_SHOT)

    def ratio(self, problem: Problem, bucket: Bucket) -> float:
        return ratio_of(self.dtype)

    def sent_text(self) -> str:
        return self.dtype

    def on_links(self, form: Form) -> list[Form]:
        return [form] if form.transport.native else [form, Form(TORUS_2D, self, form.ratio)]

    def has_cost(self, problem: Problem, form: Form) -> bool:
        return bool(problem.wire_cost(self.dtype, form.transport).phases)

    def _kept(self, problem: Problem, limits: Limits) -> NDArray[np.bool_]:
        """Return of each gradient whether it is not sent in this dtype: also where that is no narrower."""
        wide_bytes = problem.size_bytes / np.maximum(1, problem.numel)
        return np.asarray(limits.whole | ((wide_bytes <= DTYPES[self.dtype].element_bytes) & (problem.numel > 0)))

    def columns(self, problem: Problem, form: Form, limits: Limits) -> ColumnOf:
        cost = problem.wire_cost(self.dtype, form.transport)
        before, kept = prefix_sums(problem.numel, self._kept(problem, limits))

        def column(starts: Ints, stop: int) -> Column:
            elements = before[stop] - before[starts]
            scatter_us, cost_us, gather_us = form.by_link([phase.time_us(elements) for phase in cost.phases])
            cost_us = np.where(kept[stop] == kept[starts], cost_us, np.inf)
            densities = (stop - starts) / form.ratio
            return Column(scatter_us, cost_us, gather_us, cost.encode_us(elements), cost.decode_us(elements), densities)

        return column

    def buckets(self, problem: Problem, form: Form, limits: Limits) -> BucketOf:
        kept = self._kept(problem, limits)

        def bucket(start: int, stop: int) -> Bucket | None:
            return None if kept[start:stop].any() else Bucket(tuple(range(start, stop)), form.transport, self)

        return bucket

    def form_text(self, form: Form) -> str:
        return f"{self.dtype} (summed by the backend)" if form.transport.native else self.dtype

    def point_fields(self) -> dict[str, Any]:
        return {"dtype": self.dtype}

    @classmethod
    def forms(cls, problem: Problem, limits: Limits, steps: Steps) -> list[Form]:
        possible = {} if limits.whole.all() else DTYPES
        return [
            Form(transport, cls(name), ratio_of(name))
            for name, dtype in possible.items()
            for transport in dtype.transports
        ]

    @classmethod
    def forms_text(cls, forms: Sequence[Form]) -> str:
        return f"travel in {', '.join(dict.fromkeys(form.codec.sent_text() for form in forms))}"

    @classmethod
    def point_text(cls, point: FrontierPoint) -> str | None:
        if point.dtype is None:
            return None
        return f"{point.dtype}, {point.algorithm}" if point.algorithm == NATIVE.algorithm else point.dtype

    @classmethod
    def notes(cls, problem: Problem, schedule: Schedule, buckets: Sequence[Bucket], limits: Floats) -> list[str]:
        members = [index for bucket in buckets for index in bucket.gradients]
        elements = [(b.codec.dtype, problem.elements(b)) for b in buckets if isinstance(b.codec, Wire)]
        dtypes = dict.fromkeys(dtype for dtype, _ in elements)
        sent_bytes = sum(DTYPES[dtype].element_bytes * count for dtype, count in elements)
        dense_bytes = mib(int(problem.size_bytes[members].sum()))
        note = (
            f"{pluralize(len(buckets), 'bucket')} in {', '.join(dtypes)}: {dense_bytes} of gradients "
            f"travel as {mib(round(sent_bytes))}"
            + (" between nodes, whole inside them" if all(b.transport.hierarchical for b in buckets) else "")
            + "; what rounding loses is sent in later steps"
            + (", but for what the backend's own sums lose" if any(b.transport.native for b in buckets) else "")
        )
        sources = {encoding(problem.cost.cluster, dtype)[2] for dtype in dtypes}
        return [note, *unmeasured("encoding", "encode", sources)]

    @classmethod
    def summary(cls, buckets: Sequence[PlanBucket]) -> str:
        dtypes = dict.fromkeys(str(bucket.compressor.dtype) for bucket in buckets)
        return f"{len(buckets)} of them in {', '.join(dtypes)}"


def spend_on(cost: WireCost, elements: int) -> Spending:
    """Return what a bucket of this number of elements asks of networks and compute at these costs."""
    messages = tuple(
        Message(phase.link, phase.name, float(phase.sent_bytes(elements)), float(phase.time_us(elements)))
        for phase in cost.phases
    )
    return Spending(messages, float(cost.encode_us(elements)), float(cost.decode_us(elements)))
