"""Reference of the kernels in torch operations: the definition to the bit. On any device, slowly, with new memory.

The order is total: larger magnitude first, then lower index. NaN and ±Inf are the largest magnitudes, equal to one
another, so that a step with any of them is seen by all ranks. Every NaN comes out as the one quiet NaN without payload.
"""

from __future__ import annotations

import torch
from torch import Tensor

INFINITE = 0x7F800000
RANDOM_TIES_BITS = {torch.float32: 12, torch.bfloat16: 16}
"""Number of low bits of a magnitude (as float32) that `ms_topk_torch` ignores; bfloat16 has no others."""

_MASK = 2**64 - 1


def accumulate_torch(gradient: Tensor, residual: Tensor) -> Tensor:
    """Return residual + gradient, added in float32, rounded to the residual's dtype (to nearest, ties to even)."""
    total = (residual.float() + gradient.float()).to(residual.dtype)
    return torch.where(total.isnan(), torch.full_like(total, torch.nan), total)


def keys_torch(values: Tensor) -> Tensor:
    """Magnitudes as whole numbers in the same order. Int32."""
    return (values.float().view(torch.int32) & 0x7FFFFFFF).clamp_(max=INFINITE)


def ef_topk_torch(gradient: Tensor, residual: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (values, indices, new residual): the k largest magnitudes of residual + gradient, by ascending index, and
    the sum with 0 where it was selected.

    Gradient and residual are 1-D, float32 or bfloat16, of as many elements; values have the residual's dtype, indices
    are int32.
    """
    total = accumulate_torch(gradient, residual)
    order = torch.sort(keys_torch(total), descending=True, stable=True).indices
    return _take(total, order[:k].sort().values)


def ms_topk_torch(
    gradient: Tensor, residual: Tensor, k: int, *, seed: int, segment: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """MSTopK's selection (CommLib, Algorithm 1): as `ef_topk_torch`, but for elements about as large as the k-th.

    CommLib halves an interval of thresholds 30 times; all above the upper end are sent, and what is missing is a run,
    from a random place on, of those in between. Here the interval is the 2¹² neighbouring float32 numbers (2⁻¹¹ apart,
    relatively) that the k-th magnitude lies among.
    """
    total = accumulate_torch(gradient, residual)
    keys = keys_torch(total) >> RANDOM_TIES_BITS[residual.dtype]
    kth = keys.sort(descending=True).values[k - 1]
    above, ties = (keys > kth).nonzero().view(-1), (keys == kth).nonzero().view(-1)
    missing = k - above.numel()
    start = mixed(seed, segment) % (ties.numel() - missing + 1)
    return _take(total, torch.cat((above, ties[start : start + missing])).sort().values)


def _take(total: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values = total[indices]
    total[indices] = 0.0
    return values, indices.to(torch.int32), total


def mixed(seed: int, segment: int) -> int:
    """Return a number of 64 bits that looks random (splitmix64)."""
    x = (seed + 0x9E3779B97F4A7C15 * (segment + 1)) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31


def unpack_torch(values: Tensor, indices: Tensor, elements: int, *, factor: float, dtype: torch.dtype) -> Tensor:
    """Return the sum of all ranks' messages, in order of ranks, times `factor`. Shape (elements,). `values` (ranks, k)
    are float32 or bfloat16, added up in float32; `indices` (ranks, k) int32, ascending in each row.
    """
    sums = torch.zeros(elements, dtype=torch.float32, device=values.device)
    for rank in range(values.shape[0]):
        sums.index_add_(0, indices[rank], values[rank].float())
    sums = (sums * torch.tensor(factor, dtype=torch.float32)).to(dtype)
    return torch.where(sums.isnan(), torch.full_like(sums, torch.nan), sums)
