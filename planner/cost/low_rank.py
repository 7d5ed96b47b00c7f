"""What a bucket costs of which matrices travel as products of two thin ones.

Every rank's left factors are all-reduced, then its right ones, which need the sums of the left, with all that is no
matrix. Between the two messages the network waits for a product; compute is kept busy by others before and after them.
Source: PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019), as `runtime.sparse.low_rank` executes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.curve import CostCurve
from planner.cost.sparse import FREE
from planner.cost.wire import LAUNCH_US, WIDE_BYTES
from planner.documents.profile import Cluster, Line, LowRankLines

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOVED = (4.0, 1.0, 2.0, 2.0)
"""Passes over a bucket's elements in memory, as float32: to add gradient to residual and read the sum, to read it, to
read and write it, and to write averages and hand them on."""
LAUNCHES = (24, 16, 1, 2)
"""Kernels of the same; most make factors orthonormal."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Thin:
    """What each gradient sends. Shapes (gradients,)."""

    left: Ints
    """Elements of its left factor; 0: it is sent as it is, with the second message."""
    right: Ints
    """Of its right factor, or its own."""

    @property
    def factored(self) -> NDArray[np.bool_]:
        """Whether it is sent as a product."""
        return np.asarray(self.left > 0)

    def densities(self, numel: Ints) -> Floats:
        """Return the elements that are sent over those that there are, `numel`; 1 where there are none."""
        return np.where(numel > 0, self.left + self.right, 1) / np.maximum(1, numel)


def thin_of(numel: Ints, matrices: Ints, rank: int) -> Thin:
    """Return what gradients of so many elements send; `matrices`: their (rows, columns), 0 where there are none. Where
    factors would be no fewer elements than the matrix, it travels as it is.
    """
    rows, columns = matrices.T
    factored = rank * (rows + columns) < rows * columns
    return Thin(left=np.where(factored, rank * rows, 0), right=np.where(factored, rank * columns, numel))


@dataclass(frozen=True, kw_only=True)
class LowRankCost:
    """What buckets spend on products of one rank; elementwise for arrays."""

    lines: LowRankLines
    all_reduce: CostCurve

    def network_us(self, left: ArrayLike, right: ArrayLike, elements: ArrayLike) -> Floats:
        """Return the time on the network of so many elements of left factors, of all else that is sent, and of the
        bucket.
        """
        first, second = (WIDE_BYTES * np.asarray(count, dtype=np.float64) for count in (left, right))
        projected_us, subtracted_us = (_line_us(line, elements) for line in (self.lines.project, self.lines.subtract))
        before_us = np.where(first > 0.0, self.all_reduce(first) + projected_us, 0.0)
        return np.asarray(before_us + np.maximum(self.all_reduce(second), np.where(first > 0.0, subtracted_us, 0.0)))

    def pack_us(self, elements: ArrayLike) -> Floats:
        """Return compute time before a bucket is sent."""
        return _line_us(self.lines.pack, elements)

    def unpack_us(self, elements: ArrayLike) -> Floats:
        """Return compute time after it has arrived."""
        return _line_us(self.lines.unpack, elements)


def low_rank_lines(cluster: Cluster, rank: int) -> tuple[LowRankLines, str]:
    """Return what products of a rank cost to compute, and its source in a word, as `planner.cost.wire.encoding`.

    Between ranks that were measured costs are interpolated, beyond them as many times higher as the rank.
    """
    if cluster.low_rank:
        return _at_rank({int(name): lines for name, lines in cluster.low_rank.items()}, rank), "measured"
    rate = 0.0 if cluster.nccl is None else cluster.nccl.kind.memory_bytes_per_s
    if rate <= 0.0:
        return LowRankLines(pack=FREE, project=FREE, subtract=FREE, unpack=FREE), "free"
    lines = [
        Line(alpha_us=count * LAUNCH_US, beta_us_per_byte=passes / rate * 1e6)
        for passes, count in zip(MOVED, LAUNCHES, strict=True)
    ]
    return LowRankLines(pack=lines[0], project=lines[1], subtract=lines[2], unpack=lines[3]), "computed"


def _at_rank(known: dict[int, LowRankLines], rank: int) -> LowRankLines:
    ranks = sorted(known)
    beyond = max(1.0, rank / ranks[-1])

    def line(of: Callable[[LowRankLines], Line]) -> Line:
        alphas, betas = zip(
            *((of(known[each]).alpha_us, of(known[each]).beta_us_per_byte) for each in ranks), strict=True
        )
        alpha_us, beta = (float(np.interp(rank, ranks, values)) * beyond for values in (alphas, betas))
        return Line(alpha_us=alpha_us, beta_us_per_byte=beta)

    return LowRankLines(
        pack=line(lambda lines: lines.pack),
        project=line(lambda lines: lines.project),
        subtract=line(lambda lines: lines.subtract),
        unpack=line(lambda lines: lines.unpack),
    )


def low_rank_cost(cluster: Cluster, rank: int, all_reduce: CostCurve) -> LowRankCost:
    """Return what products of a rank cost on a cluster; `all_reduce`: of the library's, over bytes."""
    return LowRankCost(lines=low_rank_lines(cluster, rank)[0], all_reduce=all_reduce)


def _line_us(line: Line, elements: Any) -> Floats:
    return np.asarray(line.alpha_us + line.beta_us_per_byte * WIDE_BYTES * np.asarray(elements, dtype=np.float64))
