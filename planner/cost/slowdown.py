"""How much a message and the computation beside it slow each other down, by the message's size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.documents.profile import SizeFactors

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Slowdown:
    """Measured factors, joined by lines of speed (their reciprocals) over the logarithm of the size.

    Where every core computes, what a message waits for a core hardly depends on its size: small ones are slowed most,
    and speed over the logarithm of the size is then nearly straight between neighbours. Beyond the first and last size
    the factors stay.
    """

    log2_bytes: Floats
    compute_speed: Floats
    network_speed: Floats

    @classmethod
    def of(cls, by_size: Sequence[SizeFactors] | None) -> Slowdown | None:
        """None where the factors are the same for all sizes."""
        if by_size is None:
            return None
        size, compute, network = np.array(sorted(by_size), dtype=np.float64).T
        return cls(np.log2(size), 1.0 / compute, 1.0 / network)

    def __call__(self, message_bytes: ArrayLike) -> tuple[Floats, Floats]:
        """(factor of compute, factor of the network) while such a message is on its way, elementwise."""
        at = np.log2(np.maximum(np.asarray(message_bytes, dtype=np.float64), 1.0))
        compute = 1.0 / np.interp(at, self.log2_bytes, self.compute_speed)
        return compute, 1.0 / np.interp(at, self.log2_bytes, self.network_speed)

    @property
    def least(self) -> tuple[float, float]:
        """The factors that no message falls below."""
        return float(1.0 / self.compute_speed.max()), float(1.0 / self.network_speed.max())
