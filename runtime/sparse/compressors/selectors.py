"""Selectors find the elements that are sent: exactly, by a search for a threshold, by a sample, or at random.

Selectors take (residual, gradient, total, k, seed), write residual + gradient into `total` and return the ascending
positions of what they choose. The host reads counts in `mstopk` and `sampled`, so on a device `exact` is the better
choice.
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
    magnitudes,
    positions_where,
    reaches,
    true_positions,
)
from runtime.torch_compat import queued_to

SMALL = 1 << 14
"""Number of elements up to which the plain way is faster than `exact`'s."""

BLOCK = 64
"""Elements per block, at most; CHUNK is a multiple."""

BLOCKS_PER_PICK = 1.5
"""Minimum number of blocks for each element that is picked: fewer would give a bound that leaves too much."""

FEW_BLOCKS = 0.25
"""Up to this share, blocks are gathered rather than all elements compared."""

SEARCHES = 30

SMALL_SAMPLE = 1 << 14
"""Number of elements up to which sampling gains nothing."""

SAMPLE = 0.01

SAFETY = 4.0
"""Number of standard deviations of the number of survivors by which the sample's threshold is lowered."""


def select_exact(residual: Tensor, gradient: Tensor, total: Tensor, k: int, seed: int) -> Tensor:
    """Find the k largest magnitudes, exactly, in little more than one pass over a large buffer on a CPU.

    While each cache-sized piece of residual + gradient is written, the maxima of its blocks are taken. The k-th largest
    of these maxima is a bound: k blocks, hence k elements, reach it. Only elements above it are looked at again,
    usually little more than k whatever their distribution, since the bound is a rank and no estimate. Blocks that do
    not reach it are not read again where few blocks do.
    """
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
    values = _Reduced(total, rows)
    above = values.positions_where(exceeds, bound)
    missing = k - above.numel()
    if missing <= 0:
        return above[largest(total[above], k)]
    return torch.cat((above, values.positions_where(equals, bound, missing))).sort().values


def _accumulate_with_maxima(residual: Tensor, gradient: Tensor, total: Tensor, width: int, by_rows: bool) -> Tensor:
    """Return the largest magnitudes of blocks of `width` elements, without those that fill none at the end of a chunk.

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
        if self.rows is None:
            return positions_where(self.values, test, threshold, limit)
        end = self.values.numel() // BLOCK * BLOCK
        gathered = self.values[:end].view(-1, BLOCK).index_select(0, self.rows).view(-1)
        here = positions_where(gathered, test, threshold, limit)
        inside = self.rows[here // BLOCK] * BLOCK + here % BLOCK
        behind = positions_where(self.values[end:], test, threshold) + end
        return torch.cat((inside, behind))[:limit]


def select_mstopk(residual: Tensor, gradient: Tensor, total: Tensor, k: int, seed: int) -> Tensor:
    """MSTopK, Algorithm 1 of CommLib (Shi et al., MLSys 2021): a search for a threshold, without sorting.

    The threshold is searched between the mean and the maximum of the magnitudes. Everything above the best threshold
    that leaves at most k is sent, and what is missing to k is a run, from a random place on, of what lies between that
    and the best threshold that leaves more than k. As printed the algorithm returns everything where no threshold
    leaves at most k, as with ties at the maximum; here the upper threshold starts at +∞ instead.
    """
    magnitude = torch.empty_like(total)
    for start, piece in accumulate_in_chunks(residual, gradient, total):
        magnitude[start : start + piece.numel()] = magnitudes(piece)
    forced = positions_where(magnitude, torch.eq, math.inf, k)  # no mean and no search would bear them
    if forced.numel() == k:
        return forced
    magnitude[forced] = 0.0
    mean = float(magnitude.sum(dtype=torch.float64)) / magnitude.numel()
    magnitude[forced] = -1.0
    pool = _Pool(magnitude)
    if forced.numel():
        pool.raise_to(0.0)
    upper = _search(pool, k - forced.numel(), mean)
    return torch.cat((forced, pool.pick(upper, k - forced.numel(), seed))).sort().values


class _Pool:
    """The elements that reach the lower threshold, which only rises."""

    def __init__(self, magnitude: Tensor) -> None:
        self.magnitude = magnitude
        self._positions: Tensor | None = None
        """Positions of the elements; None: they are all."""

    def count(self, threshold: float) -> int:
        return sum(int(torch.count_nonzero(piece >= threshold)) for piece in self.magnitude.split(CHUNK))

    def raise_to(self, threshold: float) -> None:
        kept = positions_where(self.magnitude, torch.ge, threshold)
        self._positions = kept if self._positions is None else self._positions[kept]
        self.magnitude = self.magnitude[kept]

    def pick(self, upper: float, k: int, seed: int) -> Tensor:
        """Return positions of all that reach `upper`, and of a run of the others from a random place on: k in all."""
        above = positions_where(self.magnitude, torch.ge, upper)
        between = positions_where(self.magnitude, torch.lt, upper)
        missing = k - above.numel()
        start = seed % (between.numel() - missing + 1)
        picked = torch.cat((above, between[start : start + missing]))
        return picked if self._positions is None else self._positions[picked]


def _search(pool: _Pool, k: int, mean: float) -> float:
    """Raise the pool to the highest threshold found that more than k reach; returns the best that at most k reach."""
    upper, most, left, right = math.inf, 0, 0.0, 1.0
    span = float(pool.magnitude.max()) - mean
    for _ in range(SEARCHES):
        ratio = left + (right - left) / 2
        threshold = mean + ratio * span
        count = pool.count(threshold)
        if count > k:
            left = ratio
            pool.raise_to(threshold)
            continue
        right = ratio
        if count > most:
            most, upper = count, threshold
        if count == k:
            break
    return upper


def select_sampled(residual: Tensor, gradient: Tensor, total: Tensor, k: int, seed: int) -> Tensor:
    """Find the k largest magnitudes by a threshold from a random sample, as in DGC (Lin et al., ICLR 2018).

    The threshold is estimated so low that more than k elements reach it except in rare cases; among these the exact k
    largest are sent, which are the exact k largest of all. Where fewer reach it, all elements are looked at. DGC sends
    fewer or more than k in such cases; here k is fixed, so that messages have one size.
    """
    elements = total.numel()
    if elements <= SMALL_SAMPLE:
        return largest(accumulate(residual, gradient, total), k)
    for _ in accumulate_in_chunks(residual, gradient, total):
        pass
    threshold = _estimate(total, k, seed)
    survivors = positions_where(total, reaches, threshold)
    if survivors.numel() < k:
        return largest(total, k)
    return survivors[largest(total[survivors], k)]


def _estimate(values: Tensor, k: int, seed: int) -> float:
    """Return a threshold that a little more than k elements reach, if the sample is fair; 0 where that may be all."""
    size = max(SMALL_SAMPLE // 4, int(SAMPLE * values.numel()))
    expected = k * size / values.numel()
    rank = math.ceil(expected + SAFETY * math.sqrt(expected) + 1)
    if rank > size:
        return 0.0
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(values.numel(), (size,), generator=generator)
    return kth_largest(values[places.to(values.device)].abs(), rank)


def select_random(residual: Tensor, gradient: Tensor, total: Tensor, k: int, seed: int) -> Tensor:
    """Draw k elements, the same on all ranks, so that values can be summed place by place; nothing is scaled up."""
    for _ in accumulate_in_chunks(residual, gradient, total):
        pass
    generator = torch.Generator().manual_seed(seed)
    return queued_to(draw(total.numel(), k, generator), total.device)


def draw(elements: int, k: int, generator: torch.Generator) -> Tensor:
    """Draw k different numbers below `elements`, ascending; every set of k is equally likely."""
    if 2 * k > elements:
        kept = torch.ones(elements, dtype=torch.bool)
        if k < elements:
            kept[draw(elements, elements - k, generator)] = False
        return true_positions(kept)
    found = torch.empty(0, dtype=torch.int64)
    while found.numel() < k:
        more = torch.randint(elements, (k - found.numel() + 16,), generator=generator)
        found = torch.cat((found, more)).unique()
    # A random part of what is too much: the first k would leave out high numbers.
    keep = torch.randperm(found.numel(), generator=generator)[:k]
    return found[keep].sort().values
