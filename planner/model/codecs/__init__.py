"""Codecs: how elements of buckets are encoded, one module each. `LOSSY` lists all but the default, dense.

A module holds the codec as a frozen value (`planner.ir` that of the default), which answers all that the planner asks
of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from planner.ir import Bucket
from planner.model.codecs.codec import CodecModel, Column, Elements, Floats, Form, Ints, Message, Spending, Steps
from planner.model.codecs.dense import DENSE, DENSE_FORM
from planner.model.codecs.factors import LowRank
from planner.model.codecs.topk import TopK
from planner.model.codecs.wire_dtypes import Wire
from planner.model.problem import Problem

__all__ = [
    "BY_NAME", "DENSE", "DENSE_FORM", "LOSSY", "CodecModel", "Column", "Elements", "Floats", "Form", "Ints", "LowRank",
    "Message", "Spending", "Steps", "TopK", "Wire", "by_codec", "codec_of", "compression",
]  # fmt: skip

LOSSY: tuple[type[CodecModel], ...] = (Wire, LowRank, TopK)
"""Registry of codecs that send less than all elements as they are. Add one here and the contract test covers it."""

BY_NAME: Mapping[str, type[CodecModel]] = {**{codec.name: codec for codec in LOSSY}, "randomk": TopK}
"""Compressor, as a plan names it → codec that describes its buckets; of random elements that of the largest ones."""


def codec_of(bucket: Bucket) -> CodecModel:
    """Return the codec of a bucket with what the planner asks of it."""
    return bucket.codec if isinstance(bucket.codec, CodecModel) else DENSE


def by_codec(buckets: Sequence[Bucket]) -> Iterator[tuple[type[CodecModel], list[Bucket]]]:
    """Yield each lossy codec that some of the buckets have, with these, in the order of `LOSSY`."""
    for codec in LOSSY:
        if found := [bucket for bucket in buckets if isinstance(bucket.codec, codec)]:
            yield codec, found


def compression(problem: Problem, buckets: Sequence[Bucket]) -> tuple[float, float]:
    """Return (largest ratio, less the sum of densities): of two the smaller one leaves less out."""
    largest = max((codec_of(bucket).ratio(problem, bucket) for bucket in buckets), default=1.0)
    return largest, -math.fsum(codec_of(bucket).densities(problem, bucket) for bucket in buckets)
