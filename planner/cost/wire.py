"""What a bucket costs of which all elements travel in fewer bytes, in two shots: every rank sends each owner its part,
the owner adds up, and sends the sum, encoded again, to all.

On the network that takes a reduce-scatter and an all-gather of the narrow bytes, and between them the owner's work;
compute is kept busy by encoding before and by decoding after them. Source of the two shots: EQuARX (arXiv 2506.17615).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.curve import CostCurve
from planner.cost.sparse import FREE
from planner.documents.profile import Cluster, Line

TWO_SHOT = "two_shot"
"""Of `samples`: over narrow bytes, without what owners compute."""

WIDE_BYTES = 4
"""Of an element as it is added up (float32); lines of encoding and decoding are over these."""
BLOCK = 256
"""Elements with one scale, which is a float32."""

ELEMENT_BYTES: Mapping[str, float] = {
    "bfloat16": 2.0,
    "float16": 2.0 + WIDE_BYTES / BLOCK,
    "float8_e4m3fn": 1.0 + WIDE_BYTES / BLOCK,
    "int8": 1.0 + WIDE_BYTES / BLOCK,
}
"""Registry: dtype on the wire → bytes of an element, scales included."""


@dataclass(frozen=True, kw_only=True)
class WireCost:
    """Times of buckets in one dtype, over their numbers of elements; elementwise for arrays."""

    ranks: int
    element_bytes: float
    messages: tuple[CostCurve, ...]
    """Over narrow bytes: both shots as they were measured, or a reduce-scatter and an all-gather."""
    encode: Line
    decode: Line
    """Of all elements; the owners' adding up is as long."""

    @classmethod
    def of(cls, cluster: Cluster, dtype: str, messages: tuple[CostCurve, ...]) -> WireCost:
        """As the cluster was measured; encoding is free where it does not say."""
        encode, decode = ((lines or {}).get(dtype, FREE) for lines in (cluster.encode, cluster.decode))
        return cls(
            ranks=cluster.ranks, element_bytes=ELEMENT_BYTES[dtype], messages=messages, encode=encode, decode=decode
        )

    def sent_us(self, elements: ArrayLike) -> NDArray[np.float64]:
        """Return how long the network is taken, the owners' work in between included."""
        count = np.asarray(elements, dtype=np.float64)
        narrow = self.narrow_bytes(count)
        start_up_us = self.decode.alpha_us + self.encode.alpha_us
        per_byte_us = self.decode.beta_us_per_byte + self.encode.beta_us_per_byte / self.ranks
        sent_us = sum(curve(narrow) for curve in self.messages)
        return np.asarray(sent_us + start_up_us + per_byte_us * WIDE_BYTES * count)

    @property
    def non_decreasing(self) -> bool:
        """Whether more elements never take less time."""
        return all(curve.non_decreasing for curve in self.messages)

    def encode_us(self, elements: int) -> float:
        """Return compute time before a bucket is sent."""
        return self.encode.at(WIDE_BYTES * elements)

    def decode_us(self, elements: int) -> float:
        """Return compute time after it has arrived."""
        return self.decode.at(WIDE_BYTES * elements)

    def narrow_bytes(self, elements: Any) -> Any:
        """Return the bytes of each of the two messages."""
        return self.element_bytes * elements
