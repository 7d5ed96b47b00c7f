"""The k largest magnitudes, exactly, in little more than one pass over a large buffer on a CPU.

While each cache-sized piece of residual + gradient is written, the maxima of its blocks are taken. The k-th largest of
these maxima is a bound: k blocks, hence k elements, reach it. Only elements above it are looked at again, usually
little more than k whatever their distribution, since the bound is a rank and no estimate. Blocks that do not reach it
are not read again where few blocks do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.sparse.compressors.magnitudes import (
    CHUNK,
    Comparison,
    accumulate,
    accumulate_in_chunks,
    equals,
    exceeds,
    kth_largest,
    largest,
    positions_where,
    reaches,
    true_positions,
)

SMALL = 1 << 14
"""Up to so many elements the plain way is faster."""

BLOCK = 64
"""Elements per block, at most; CHUNK is a multiple."""

BLOCKS_PER_PICK = 1.5
"""At least so many blocks for each element that is picked: fewer would give a bound that leaves too much."""

FEW_BLOCKS = 0.25
"""Up to this share, blocks are gathered rather than all elements compared."""


def select_exact(residual: Tensor, gradient: Tensor, total: Tensor, k: int, seed: int) -> Tensor:
    """Writes residual + gradient into `total`; returns the ascending positions of its k largest magnitudes."""
    elements = total.numel()
    most = elements / (BLOCKS_PER_PICK * k)
    width = min(BLOCK, 1 << int(math.log2(most))) if most >= 1 else 1  # a power of two that leaves blocks enough
    # Elsewhere the plain way, which keeps the host from waiting for the device.
    if elements <= SMALL or width < 2 or total.device.type != "cpu":
        return largest(accumulate(residual, gradient, total), k)
    by_rows = width == BLOCK and k <= FEW_BLOCKS * (elements // BLOCK)
    maxima = _accumulate_with_maxima(residual, gradient, total, width, by_rows)
    bound = kth_largest(maxima, k)
    rows = true_positions(reaches(maxima, bound)) if by_rows else None
    if rows is not None and rows.numel() > FEW_BLOCKS * maxima.numel():  # many equal maxima
        rows = None
    return _pick(_Reduced(total, rows), bound, k)


def _accumulate_with_maxima(residual: Tensor, gradient: Tensor, total: Tensor, width: int, by_rows: bool) -> Tensor:
    """Largest magnitudes of blocks of `width` elements, without those that fill no block at the end of a chunk.

    `by_rows`: of neighbouring elements; else of elements that lie a fixed distance apart, which is faster for small
    blocks.
    """
    maxima = total.new_empty(total.numel() // width)
    room, done = total.new_empty(min(CHUNK, total.numel())), 0
    for _, piece in accumulate_in_chunks(residual, gradient, total):
        blocks = piece.numel() // width
        whole = torch.abs(piece, out=room[: piece.numel()])[: blocks * width]
        here = maxima[done : done + blocks]
        if by_rows:
            torch.amax(whole.view(blocks, width), 1, out=here)
        else:
            torch.amax(whole.view(width, blocks), 0, out=here)
        done += blocks
    return maxima


@dataclass(frozen=True)
class _Reduced:
    """Values of which only those in the given rows of BLOCK (None: all), and behind the last row, matter."""

    values: Tensor
    rows: Tensor | None

    def positions_where(self, test: Comparison, threshold: float, limit: int | None = None) -> Tensor:
        """See `magnitudes.positions_where`."""
        if self.rows is None:
            return positions_where(self.values, test, threshold, limit)
        end = self.values.numel() // BLOCK * BLOCK
        gathered = self.values[:end].view(-1, BLOCK).index_select(0, self.rows).view(-1)
        here = positions_where(gathered, test, threshold, limit)
        inside = self.rows[here // BLOCK] * BLOCK + here % BLOCK
        behind = positions_where(self.values[end:], test, threshold) + end
        return torch.cat((inside, behind))[:limit]


def _pick(values: _Reduced, bound: float, k: int) -> Tensor:
    """The k largest, given that at least k reach the bound."""
    above = values.positions_where(exceeds, bound)
    missing = k - above.numel()
    if missing <= 0:
        return above[largest(values.values[above], k)]
    ties = values.positions_where(equals, bound, missing)
    return torch.cat((above, ties)).sort().values
