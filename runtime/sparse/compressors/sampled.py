"""The k largest magnitudes by a threshold from a random sample, as in DGC (Lin et al., ICLR 2018).

The threshold is estimated so low that more than k elements reach it except in rare cases; among these the exact k
largest are sent, which are the exact k largest of all. Where fewer reach it, all elements are looked at. DGC sends
fewer or more than k in such cases; here k is fixed, so that messages have one size. Survivors are counted by the host,
so on a device `exact` is the better choice.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runtime.sparse.compressors.magnitudes import (
    accumulate,
    accumulate_in_chunks,
    kth_largest,
    largest,
    positions_where,
    reaches,
)

SMALL = 1 << 14
"""Up to so many elements there is nothing to be gained."""

SAMPLE = 0.01
"""Share of the elements in the sample."""

SAFETY = 4.0
"""By how many standard deviations of the number of survivors the threshold is lowered."""


def select_sampled(residual: Tensor, gradient: Tensor, total: Tensor, k: int, seed: int) -> Tensor:
    """Writes residual + gradient into `total`; returns the ascending positions of its k largest magnitudes."""
    elements = total.numel()
    if elements <= SMALL:
        return largest(accumulate(residual, gradient, total), k)
    for _ in accumulate_in_chunks(residual, gradient, total):
        pass
    threshold = _estimate(total, k, seed)
    survivors = positions_where(total, reaches, threshold)
    if survivors.numel() < k:
        return largest(total, k)
    return survivors[largest(total[survivors], k)]


def _estimate(values: Tensor, k: int, seed: int) -> float:
    """A threshold that a little more than k elements reach, if the sample is fair; 0 where that may be all."""
    size = max(SMALL // 4, int(SAMPLE * values.numel()))
    expected = k * size / values.numel()
    rank = math.ceil(expected + SAFETY * math.sqrt(expected) + 1)
    if rank > size:
        return 0.0
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(values.numel(), (size,), generator=generator)
    return kth_largest(values[places.to(values.device)].abs(), rank)
