"""k elements at random, the same on all ranks, so that their values can be summed place by place.

What is not drawn stays in the residual, so nothing is scaled up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.sparse.compressors.magnitudes import accumulate_in_chunks, true_positions


def select_random(residual: Tensor, gradient: Tensor, total: Tensor, k: int, seed: int) -> Tensor:
    """Writes residual + gradient into `total`; returns k ascending positions that depend on nothing but the seed."""
    for _ in accumulate_in_chunks(residual, gradient, total):
        pass
    generator = torch.Generator().manual_seed(seed)
    return draw(total.numel(), k, generator).to(total.device)


def draw(elements: int, k: int, generator: torch.Generator) -> Tensor:
    """k different numbers below `elements`, ascending; every set of k is equally likely."""
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
