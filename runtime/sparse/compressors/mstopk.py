"""MSTopK, Algorithm 1 of CommLib (Shi et al., MLSys 2021): k elements from a search for a threshold, without sorting.

The threshold is searched between the mean and the maximum of the magnitudes. Everything above the best threshold that
leaves at most k is sent, and what is missing to k is a run, from a random place on, of what lies between that and the
best threshold that leaves more than k. As printed the algorithm returns everything where no threshold leaves at most
k, as with ties at the maximum; here the upper threshold starts at +∞ instead. Counts are read by the host, so on a
device `exact` is the better choice.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runtime.sparse.compressors.magnitudes import CHUNK, accumulate_in_chunks, magnitudes, positions_where

SEARCHES = 30


def select_mstopk(residual: Tensor, gradient: Tensor, total: Tensor, k: int, seed: int) -> Tensor:
    """Writes residual + gradient into `total`; returns the ascending positions of k of its large magnitudes."""
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
        """Where they lie; None: they are all."""

    def count(self, threshold: float) -> int:
        """How many reach a threshold."""
        return sum(int(torch.count_nonzero(piece >= threshold)) for piece in self.magnitude.split(CHUNK))

    def raise_to(self, threshold: float) -> None:
        """Drops what is below a new lower threshold."""
        kept = positions_where(self.magnitude, torch.ge, threshold)
        self._positions = kept if self._positions is None else self._positions[kept]
        self.magnitude = self.magnitude[kept]

    def pick(self, upper: float, k: int, seed: int) -> Tensor:
        """Positions of all that reach `upper`, and of a run of the others from a random place on: k in all."""
        above = positions_where(self.magnitude, torch.ge, upper)
        between = positions_where(self.magnitude, torch.lt, upper)
        missing = k - above.numel()
        start = seed % (between.numel() - missing + 1)
        picked = torch.cat((above, between[start : start + missing]))
        return picked if self._positions is None else self._positions[picked]


def _search(pool: _Pool, k: int, mean: float) -> float:
    """Raises the pool to the highest threshold found that more than k reach; returns the best that at most k reach."""
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
