"""Cost of a bucket whose matrices are sent as products of two thin ones.

Every rank's left factors are all-reduced, then its right ones, which need the sums of the left, with all that is no
matrix. Between the two messages the network waits for a product; compute is kept busy by others before and after them.
Source: PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019), as `runtime.sparse.low_rank` executes it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.curve import CostCurve
from planner.cost.sparse import FREE
from planner.cost.wire import LAUNCH_US, WIDE_BYTES, line_us
from planner.documents.accelerators import ACCELERATORS
from planner.documents.profile import Cluster, Line, LowRankLines

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PARTS = tuple(field.name for field in fields(LowRankLines))
MOVED = (4.0, 1.0, 2.0, 2.0)
"""Passes over a bucket's elements in memory, as float32: to add gradient to residual and read the sum, to read it, to
read and write it, and to write averages and hand them on."""
LAUNCHES = (24, 16, 1, 2)
"""Kernels of the same; most make factors orthonormal."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Thin:
    """Elements that each gradient sends. Shapes (gradients,)."""

    numel: Ints
    """Number of its elements."""
    left: Ints
    """Elements of its left factor; 0: it is sent as it is, with the second message."""
    right: Ints
    """Elements of its right factor, or its own number."""

    @property
    def factored(self) -> NDArray[np.bool_]:
        """Return whether each is sent as a product."""
        return np.asarray(self.left > 0)

    @cached_property
    def densities(self) -> Floats:
        """Return the elements that are sent over those that there are; 1 if there are none."""
        return np.where(self.numel > 0, self.left + self.right, 1) / np.maximum(1, self.numel)


def thin_of(numel: Ints, matrices: Ints, rank: int) -> Thin:
    """Return what gradients of so many elements send; `matrices`: their (rows, columns), 0 where there are none. Where
    factors would be no fewer elements than the matrix, it is sent as it is.
    """
    rows, columns = matrices.T
    factored = rank * (rows + columns) < rows * columns
    return Thin(numel=numel, left=np.where(factored, rank * rows, 0), right=np.where(factored, rank * columns, numel))


@dataclass(frozen=True, kw_only=True)
class LowRankCost:
    """Cost of buckets with products of one rank; elementwise for arrays."""

    lines: LowRankLines
    all_reduce: CostCurve

    def network_us(self, left: ArrayLike, right: ArrayLike, elements: ArrayLike) -> Floats:
        """Return the time on the network of so many elements of left factors, of all else that is sent, and of the
        bucket.
        """
        first, second = (WIDE_BYTES * np.asarray(count, dtype=np.float64) for count in (left, right))
        projected_us, subtracted_us = (line_us(line, elements) for line in (self.lines.project, self.lines.subtract))
        before_us = np.where(first > 0.0, self.all_reduce(first) + projected_us, 0.0)
        return np.asarray(before_us + np.maximum(self.all_reduce(second), np.where(first > 0.0, subtracted_us, 0.0)))

    def pack_us(self, elements: ArrayLike) -> Floats:
        """Return compute time before a bucket is sent."""
        return line_us(self.lines.pack, elements)

    def unpack_us(self, elements: ArrayLike) -> Floats:
        """Return compute time after it has arrived."""
        return line_us(self.lines.unpack, elements)


def low_rank_lines(cluster: Cluster, rank: int) -> tuple[LowRankLines, str]:
    """Return what products of a rank cost to compute, and its source in a word, as `planner.cost.wire.encoding`.

    Between ranks that were measured costs are interpolated, beyond them as many times higher as the rank.
    """
    if cluster.low_rank:
        return _at_rank({int(name): lines for name, lines in cluster.low_rank.items()}, rank), "measured"
    if (name := cluster.computes_on) is None:
        return LowRankLines(**dict.fromkeys(PARTS, FREE)), "free"
    rate = ACCELERATORS[name].memory_bytes_per_s
    lines = {
        part: Line(alpha_us=count * LAUNCH_US, beta_us_per_byte=passes / rate * 1e6)
        for part, passes, count in zip(PARTS, MOVED, LAUNCHES, strict=True)
    }
    return LowRankLines(**lines), "computed"


def _at_rank(known: dict[int, LowRankLines], rank: int) -> LowRankLines:
    ranks = sorted(known)
    beyond = max(1.0, rank / ranks[-1])

    def line(part: str) -> Line:
        measured: list[Line] = [getattr(known[each], part) for each in ranks]
        alpha_us, beta = (
            float(np.interp(rank, ranks, values)) * beyond
            for values in ([of.alpha_us for of in measured], [of.beta_us_per_byte for of in measured])
        )
        return Line(alpha_us=alpha_us, beta_us_per_byte=beta)

    return LowRankLines(**{part: line(part) for part in PARTS})
