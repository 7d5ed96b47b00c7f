"""Cost of a bucket whose elements are all sent in fewer bytes.

`two_shot`: every rank sends each owner its part, the owner adds up, and sends the sum, encoded again, to all. On the
network that takes a reduce-scatter and an all-gather of the narrow bytes, and between them the owner's work; compute is
kept busy by encoding before and by decoding after them. Source of the two shots: EQuARX (arXiv 2506.17615). `native`:
the backend adds up in the narrow dtype itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.curve import CostCurve
from planner.cost.phases import Phase
from planner.cost.sparse import FREE
from planner.documents.accelerators import ACCELERATORS
from planner.documents.profile import Cluster, Line
from runtime.plan.transports import NATIVE, TWO_SHOT, Transport

WIDE_BYTES = 4
"""Bytes of an element as it is added up (float32); lines of encoding and decoding are over these."""
LAUNCH_US = 5.0
"""Time of launching a kernel in µs, if it was not measured."""
BLOCK = 256
"""Elements with one scale, which is a float32."""


class WireDtype(NamedTuple):
    """A dtype on the wire, as the planner knows it."""

    element_bytes: float
    """Bytes of an element, scales included."""
    transports: tuple[Transport, ...] = (TWO_SHOT,)
    """Transports that a plan may choose among with it: what native sums lose, no residual keeps."""
    advised: bool = True
    """Whether `planner advise` looks at it: not where another one of as many bytes needs no scales."""


DTYPES: Mapping[str, WireDtype] = {
    "float16": WireDtype(2.0 + WIDE_BYTES / BLOCK, advised=False),
    "bfloat16": WireDtype(2.0, (TWO_SHOT, NATIVE)),
    "int8": WireDtype(1.0 + WIDE_BYTES / BLOCK),
    "float8_e4m3fn": WireDtype(1.0 + WIDE_BYTES / BLOCK),
}
"""Registry of dtypes on the wire, from the least to the most that rounding loses: about 2^-12, 2^-9, 2^-8 (of the
block's largest element) and 2^-4 of an element.
"""


def ratio_of(dtype: str) -> float:
    """Return the bytes of an element as it is added up, over those on the wire."""
    return WIDE_BYTES / DTYPES[dtype].element_bytes


@dataclass(frozen=True, kw_only=True)
class WirePhase:
    """One message; times and bytes over a bucket's elements, elementwise for arrays."""

    name: str
    link: str
    """`network`, which passes through all ranks, or a kind of link."""
    time_us: Callable[[Any], NDArray[np.float64]]
    sent_bytes: Callable[[Any], Any]
    non_decreasing: bool
    """Whether more never takes less time."""


@dataclass(frozen=True, kw_only=True)
class WireCost:
    """Cost of buckets in one dtype."""

    phases: tuple[WirePhase, ...]
    encode: Line
    decode: Line
    shards: int = 1
    """Number of ranks over which a bucket is divided before each encodes its own part."""

    def encode_us(self, elements: ArrayLike) -> NDArray[np.float64]:
        """Return compute time before a bucket is sent; elementwise."""
        return line_us(self.encode, np.asarray(elements) / self.shards)

    def decode_us(self, elements: ArrayLike) -> NDArray[np.float64]:
        """Return compute time after it has arrived; elementwise."""
        return line_us(self.decode, np.asarray(elements) / self.shards)


def encoding(cluster: Cluster, dtype: str) -> tuple[Line, Line, str]:
    """Return what (encoding, decoding) costs, and its source in a word: measured, what moving the bytes takes in the
    accelerator's memory, or free where nothing is known.
    """
    encode, decode = ((lines or {}).get(dtype) for lines in (cluster.encode, cluster.decode))
    if encode is not None and decode is not None:
        return encode, decode, "measured"
    if (name := cluster.computes_on) is None:
        return FREE, FREE, "free"
    rate = ACCELERATORS[name].memory_bytes_per_s
    # Read gradient and residual, write codes and the new residual; then read codes, write sums.
    moved = 3.0 * WIDE_BYTES + DTYPES[dtype].element_bytes, WIDE_BYTES + DTYPES[dtype].element_bytes
    lines = [Line(alpha_us=LAUNCH_US, beta_us_per_byte=each / WIDE_BYTES / rate * 1e6) for each in moved]
    return lines[0], lines[1], "computed"


def wire_cost(
    cluster: Cluster, dtype: str, messages: tuple[CostCurve, ...], ranks: int, *, owners: bool = True,
    inside: tuple[Phase, ...] = (),
) -> WireCost:  # fmt: skip
    """Return what a dtype costs on a cluster.

    Args:
        cluster: says what encoding costs.
        dtype: on the wire.
        messages: over narrow bytes, one after the other; both shots as they were measured, or a reduce-scatter and an
            all-gather; or the backend's own all-reduce.
        ranks: who sends them; with `inside` each sends a shard.
        owners: whether each rank adds up, and encodes once more, what it owns: the network waits for that.
        inside: a reduce-scatter and an all-gather inside nodes, before and after, of elements as they are added up.
    """
    encode, decode, _ = encoding(cluster, dtype)
    element_bytes, shards = DTYPES[dtype].element_bytes, cluster.ranks_per_node if inside else 1

    def sent_us(elements: Any) -> NDArray[np.float64]:
        count = np.asarray(elements, dtype=np.float64) / shards
        time_us = sum(curve(element_bytes * count) for curve in messages)
        if owners:
            time_us = time_us + line_us(decode, count) + line_us(encode, count / ranks)
        return np.asarray(time_us)

    narrow = WirePhase(
        name="all_reduce",
        link="inter" if inside else "network",
        time_us=sent_us,
        sent_bytes=lambda elements: element_bytes * elements / shards,
        non_decreasing=all(curve.non_decreasing for curve in messages),
    )
    dense = [_dense(phase) for phase in inside]
    return WireCost(phases=(*dense[:1], narrow, *dense[1:]), encode=encode, decode=decode, shards=shards)


def _dense(phase: Phase) -> WirePhase:
    return WirePhase(
        name=phase.name,
        link=phase.link,
        time_us=lambda elements: phase.times_us(WIDE_BYTES * np.asarray(elements, dtype=np.float64)),
        sent_bytes=lambda elements: phase.share * WIDE_BYTES * elements,
        non_decreasing=phase.curve.non_decreasing,
    )


def line_us(line: Line, elements: ArrayLike) -> NDArray[np.float64]:
    """Return what a line over bytes of float32 says of so many elements; elementwise."""
    return np.asarray(line.alpha_us + line.beta_us_per_byte * WIDE_BYTES * np.asarray(elements, dtype=np.float64))
