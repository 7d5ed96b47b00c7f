"""Dense buckets: all elements as they are, one message per dtype and phase."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.ir import Bucket, Dense
from planner.model.codecs.codec import BucketOf, CodecModel, Column, ColumnOf, Floats, Form, Ints, Message, Spending
from planner.model.compression import Limits
from planner.model.problem import Problem
from runtime.plan import NO_COMPRESSION, CompressorSpec
from runtime.plan.transports import LIBRARY


class DenseModel(Dense, CodecModel):
    """`planner.ir.Dense` with what the planner asks of it."""

    def spend(self, problem: Problem, bucket: Bucket) -> Spending:
        sizes: dict[int, int] = {}
        for gradient in bucket.gradients:
            dtype = int(problem.dtype_ids[gradient])
            sizes[dtype] = sizes.get(dtype, 0) + int(problem.size_bytes[gradient])
        total_bytes, transport = float(sum(sizes.values())), bucket.transport
        if not transport.staged:
            time_us = problem.bucket_cost_us([bucket.gradients])[0]
            return Spending((Message("network", transport.collective, total_bytes, time_us),))
        return Spending(
            tuple(
                Message(phase.link, phase.name, phase.share * total_bytes, sum(map(phase.time_us, sizes.values())))
                for phase in problem.phases(transport)
            )
        )

    def spec(self, problem: Problem, bucket: Bucket) -> CompressorSpec:
        return NO_COMPRESSION

    def sent_text(self) -> str:
        return "dense"

    def on_links(self, form: Form) -> list[Form]:
        """Return none: searches on two kinds of link begin with all dense transports."""
        return []

    def columns(self, problem: Problem, form: Form, limits: Limits) -> ColumnOf:
        curves: list[Callable[[Floats], Floats]] = [problem.cost.all_reduce]
        if form.transport.staged:
            curves = [phase.times_us for phase in problem.phases(form.transport)]

        def column(starts: Ints, stop: int) -> Column:
            times = [problem.range_time_us(curve, starts, stop) for curve in curves]
            nothing = np.zeros(len(starts))
            scatter_us, cost_us, gather_us = form.by_link(times)
            return Column(scatter_us, cost_us, gather_us, nothing, nothing, (stop - starts).astype(np.float64))

        return column

    def buckets(self, problem: Problem, form: Form, limits: Limits) -> BucketOf:
        return lambda start, stop: Bucket(tuple(range(start, stop)), form.transport)


DENSE = DenseModel()
DENSE_FORM = Form(LIBRARY, DENSE)
