"""Buckets of low rank: matrices are sent as products of two thin ones, all else as it is (PowerSGD)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from planner.cost.low_rank import low_rank_lines
from planner.cost.wire import WIDE_BYTES
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
from runtime.pages import page
from runtime.plan import CompressorSpec, PlanBucket
from runtime.plan.predicted import FrontierPoint
from runtime.plan.transports import LIBRARY

FACTORED = "float32"
"""The dtype of gradients whose matrices may be sent as products."""


@dataclass(frozen=True, slots=True)
class LowRank(CodecModel):
    """Products of this rank in place of matrices.

    >>> str(Bucket((0, 1), LIBRARY, LowRank(4)))
    '[0-1] all_reduce/library powersgd rank=4'
    """

    name: ClassVar[str] = "powersgd"
    option: ClassVar[str] = "lowrank"
    counted_as: ClassVar[str] = "low_rank_buckets"

    rank: int

    def __str__(self) -> str:
        return f"{self.name} rank={self.rank}"

    @classmethod
    def parse(cls, text: str) -> Codec | None:
        match = re.fullmatch(r"powersgd rank=([1-9][0-9]{0,8})", text)
        return None if match is None else cls(int(match[1]))

    def spend(self, problem: Problem, bucket: Bucket) -> Spending:
        """Return left factors, and what needs their sums, as one message: nothing is sent between them."""
        cost, thin, members = problem.low_rank_cost(self.rank), problem.thin(self.rank), list(bucket.gradients)
        left, right, elements = int(thin.left[members].sum()), int(thin.right[members].sum()), problem.elements(bucket)
        sent_bytes, time_us = float(WIDE_BYTES * (left + right)), float(cost.network_us(left, right, elements))
        message = Message("network", bucket.transport.collective, sent_bytes, time_us)
        return Spending((message,), float(cost.pack_us(elements)), float(cost.unpack_us(elements)))

    def spec(self, problem: Problem, bucket: Bucket) -> CompressorSpec:
        return CompressorSpec(name=self.name, rank=self.rank)

    @classmethod
    def of_spec(cls, spec: CompressorSpec, problem: Problem, bucket: Bucket) -> Bucket:
        return replace(bucket, codec=cls(spec.rank or 1))

    def ratio(self, problem: Problem, bucket: Bucket) -> float:
        return max((1.0 / density for density in self._each(problem, bucket)), default=1.0)

    def densities(self, problem: Problem, bucket: Bucket) -> float:
        return math.fsum(self._each(problem, bucket))

    def _each(self, problem: Problem, bucket: Bucket) -> list[float]:
        """Return the elements sent of each gradient, over its own."""
        densities: list[float] = problem.thin(self.rank).densities[list(bucket.gradients)].tolist()
        return densities

    def sent_elements(self, problem: Problem, bucket: Bucket) -> int:
        thin, members = problem.thin(self.rank), list(bucket.gradients)
        return int(thin.left[members].sum() + thin.right[members].sum())

    def sent_text(self) -> str:
        return f"rank {self.rank}"

    def columns(self, problem: Problem, form: Form, limits: Limits) -> ColumnOf:
        cost, thin = problem.low_rank_cost(self.rank), problem.thin(self.rank)
        before, left, right, kept, densities = prefix_sums(
            problem.numel, thin.left, thin.right, _kept(problem, limits), thin.densities
        )

        def column(starts: Ints, stop: int) -> Column:
            elements, first, second = (of[stop] - of[starts] for of in (before, left, right))
            scatter_us, cost_us, gather_us = form.by_link([cost.network_us(first, second, elements)])
            cost_us = np.where((kept[stop] == kept[starts]) & (first > 0), cost_us, np.inf)
            sent = densities[stop] - densities[starts]
            return Column(scatter_us, cost_us, gather_us, cost.pack_us(elements), cost.unpack_us(elements), sent)

        return column

    def buckets(self, problem: Problem, form: Form, limits: Limits) -> BucketOf:
        kept, factored = _kept(problem, limits), problem.thin(self.rank).factored

        def bucket(start: int, stop: int) -> Bucket | None:
            possible = factored[start:stop].any() and not kept[start:stop].any()
            return Bucket(tuple(range(start, stop)), form.transport, self) if possible else None

        return bucket

    def point_fields(self) -> dict[str, Any]:
        return {"rank": self.rank}

    @classmethod
    def forms(cls, problem: Problem, limits: Limits, steps: Steps) -> list[Form]:
        """Return those of the ranks at which a matrix may be sent as a product; the ratio is the largest one's."""
        found = []
        for rank in ranks_up_to(steps.max_rank):
            thin = problem.thin(rank)
            possible = thin.factored & ~_kept(problem, limits)
            if possible.any():
                found.append(Form(LIBRARY, cls(rank), float(1.0 / thin.densities[possible].min())))
        return found

    @classmethod
    def forms_text(cls, forms: Sequence[Form]) -> str:
        ranks = ", ".join(form.codec.sent_text().removeprefix("rank ") for form in forms)
        return f"send products of rank {ranks} in place of matrices"

    @classmethod
    def point_text(cls, point: FrontierPoint) -> str | None:
        return f"rank {point.rank}" if point.rank else None

    @classmethod
    def notes(cls, problem: Problem, schedule: Schedule, buckets: Sequence[Bucket], limits: Floats) -> list[str]:
        members = [index for bucket in buckets for index in bucket.gradients]
        codecs = [bucket.codec for bucket in buckets if isinstance(bucket.codec, LowRank)]
        ranks = ", ".join(sorted({str(codec.rank) for codec in codecs}))
        sources = {low_rank_lines(problem.cost.cluster, codec.rank)[1] for codec in codecs}
        sent = sum(codec.sent_elements(problem, bucket) for codec, bucket in zip(codecs, buckets, strict=True))
        return [
            f"{pluralize(len(buckets), 'bucket')} of rank {ranks}: {mib(int(problem.size_bytes[members].sum()))} of "
            f"gradients travel as {mib(WIDE_BYTES * sent)} of factors",
            "low rank may cost much of the loss, and nothing watches that: small models lost 6 to 200 % at rank "
            f"4, more at rank 1, from the first step on ({page('results/narrow-accuracy')}); make first steps exact "
            "by --from-step, and compare; --compress wire leaves it out",
            *unmeasured("making factors", "low_rank", sources),
        ]

    @classmethod
    def summary(cls, buckets: Sequence[PlanBucket]) -> str:
        ranks = dict.fromkeys(str(bucket.compressor.rank) for bucket in buckets)
        return f"{len(buckets)} of them of rank {', '.join(ranks)}"


def _kept(problem: Problem, limits: Limits) -> NDArray[np.bool_]:
    """Return of each gradient whether no bucket with it has low rank: its factors are added up in its dtype."""
    wide = np.array([gradient.dtype == FACTORED for gradient in problem.profile.compute.gradients], dtype=np.bool_)
    return np.asarray(limits.whole | ~wide)


def ranks_up_to(largest: int) -> tuple[int, ...]:
    """Return powers of two below the largest rank, and that.

    >>> ranks_up_to(6)
    (1, 2, 4, 6)
    """
    return tuple(sorted({largest, *(2**power for power in range(largest.bit_length()) if 2**power <= largest)}))
