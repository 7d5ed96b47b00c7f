"""Integer shares of a global batch, of which the slowest rank takes least time: exact, with the bound of any shares.

A rank with s samples computes for `fixed + s · sample`, which grows with s. Let each rank have a slot for each of its
samples, that ends when it has computed that number: the least longest time is that of the last of the N slots that end
first. Those that end before a time can be counted, so that slots are taken one by one only near the end.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROUNDS = 200
"""Halvings of an interval of times; far more than a float has bits."""


@dataclass(frozen=True, kw_only=True)
class SharedBatch:
    """Shares of all ranks."""

    shares: tuple[int, ...]
    slowest_us: float
    """Time of the rank that computes for longest, in microseconds."""
    bound_us: float
    """Lower bound on that, of shares that need not be whole."""


def share_batch(
    total: int, fixed_us: NDArray[np.float64], sample_us: NDArray[np.float64], most: NDArray[np.int64]
) -> SharedBatch:
    """Return the shares of which the slowest rank takes least time.

    Args:
        total: samples of all ranks, at least one for each and at most `most` in all.
        fixed_us: time of each rank besides its samples, in microseconds. Shape (ranks,).
        sample_us: time of each rank for one sample, above 0. Shape (ranks,).
        most: largest share of each rank, at least 1. Shape (ranks,).

    Returns:
        The shares, equal for equal arguments: of ranks that would end at once the first one gets a sample.
    """

    def slots(end_us: float) -> NDArray[np.float64]:
        return np.clip((end_us - fixed_us) / sample_us, 1.0, most)

    low_us, high_us = 0.0, float((fixed_us + most * sample_us).max())
    whole_us = bound_us = high_us
    for whole in (True, False):
        below_us, above_us = low_us, high_us
        for _ in range(ROUNDS):
            middle_us = (below_us + above_us) / 2.0
            found = slots(middle_us)
            if (np.floor(found) if whole else found).sum() < total:
                below_us = middle_us
            else:
                above_us = middle_us
        whole_us, bound_us = (below_us, bound_us) if whole else (whole_us, below_us)
    shares = np.floor(slots(whole_us)).astype(np.int64)
    waiting = [
        (float(fixed_us[rank] + (shares[rank] + 1) * sample_us[rank]), rank)
        for rank in np.flatnonzero(shares < most).tolist()
    ]
    heapq.heapify(waiting)
    for _ in range(total - int(shares.sum())):
        _, rank = heapq.heappop(waiting)
        shares[rank] += 1
        if shares[rank] < most[rank]:
            heapq.heappush(waiting, (float(fixed_us[rank] + (shares[rank] + 1) * sample_us[rank]), rank))
    slowest_us = float((fixed_us + shares * sample_us).max())
    bound_us = max(bound_us, float((fixed_us + sample_us).max()))  # each rank has at least one
    return SharedBatch(shares=tuple(shares.tolist()), slowest_us=slowest_us, bound_us=min(bound_us, slowest_us))


def follow_shares(
    shares: NDArray[np.int64], compute_us: NDArray[np.float64], most: NDArray[np.int64] | int, least_gain: float
) -> NDArray[np.int64]:
    """Return shares by times that were measured with others; the same ones where others gain little.

    All of a rank's time counts as that of its samples. Where a part of it is fixed, shares come near the best ones in
    several calls: they stay where all ranks take equally long, as the best ones do.

    Args:
        shares: of each rank, at least 1. Shape (ranks,).
        compute_us: time of each rank with them. Shape (ranks,).
        most: largest share of each rank; present shares above it are kept. Shape (ranks,), or one for all.
        least_gain: share of the slowest rank's time by which other shares have to be faster.
    """
    if not (compute_us > 0.0).all():
        return shares
    found = share_batch(int(shares.sum()), np.zeros(len(shares)), compute_us / shares, np.maximum(shares, most))
    return np.array(found.shares) if found.slowest_us <= (1.0 - least_gain) * compute_us.max() else shares
