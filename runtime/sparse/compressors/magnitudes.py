"""Functions that selectors share: adding residual and gradient, and comparing magnitudes.

The order is total: larger magnitude first, then lower index. NaN and ±Inf are the largest magnitudes, equal to one
another, so that they are sent and every rank learns of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

CHUNK = 1 << 18
"""Elements that are worked on together: few enough for a core's cache, enough to outweigh the calls."""

Comparison = Callable[[Tensor, float], Tensor]
"""`reaches`, `exceeds` or `equals`."""


def accumulate(residual: Tensor, gradient: Tensor, total: Tensor) -> Tensor:
    """Write residual + gradient into `total`, in the residual's dtype, and return it."""
    if gradient.dtype == total.dtype:
        return torch.add(residual, gradient, out=total)
    return total.copy_(gradient).add_(residual)  # twice as fast as an addition that converts


def accumulate_in_chunks(residual: Tensor, gradient: Tensor, total: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Accumulate piece by piece; yields (start, piece of `total`) while it is in the cache."""
    for start in range(0, total.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        yield start, accumulate(residual[part], gradient[part], total[part])


def magnitudes(values: Tensor) -> Tensor:
    """Return |values|, with +Inf for NaN."""
    return values.abs().nan_to_num_(nan=math.inf, posinf=math.inf)


def largest(values: Tensor, k: int) -> Tensor:
    """Return the positions of the k first in the order above, ascending."""
    if k == values.numel():
        return torch.arange(k, device=values.device)
    if values.device.type != "cpu":
        return _largest_on_device(values, k)
    threshold = kth_largest(values.abs(), k)
    found = true_positions(reaches(values, threshold))
    too_many = found.numel() - k
    if not too_many:
        return found
    ties = true_positions(equals(values[found], threshold))
    kept = torch.ones_like(found, dtype=torch.bool)
    kept[ties[-too_many:]] = False
    return found[kept]


def _largest_on_device(values: Tensor, k: int) -> Tensor:
    # From operations whose sizes are known beforehand, so that the host does not wait for the device.
    magnitude = magnitudes(values)
    threshold = magnitude.topk(k, sorted=False).values.amin()
    above, ties = magnitude > threshold, magnitude == threshold
    missing = k - above.sum()
    picked = above | (ties & (ties.cumsum(0) <= missing))
    return torch.nonzero_static(picked, size=k).view(-1)


def kth_largest(magnitude: Tensor, k: int) -> float:
    """Return the k-th largest of numbers that are not negative; NaN counts as +Inf."""
    found = float(magnitude.topk(k, sorted=False).values.amin())  # topk puts NaN first; a minimum with one is NaN
    return float(magnitudes(magnitude).topk(k, sorted=False).values.amin()) if math.isnan(found) else found


def reaches(values: Tensor, threshold: float) -> Tensor:
    """Return where the magnitude is at least the threshold."""
    return (values.abs() < threshold).logical_not_()


def exceeds(values: Tensor, threshold: float) -> Tensor:
    """Return where the magnitude is above the threshold."""
    if threshold == math.inf:
        return torch.zeros_like(values, dtype=torch.bool)
    return (values.abs() <= threshold).logical_not_()


def equals(values: Tensor, threshold: float) -> Tensor:
    """Return where the magnitude is the threshold."""
    return values.isfinite().logical_not_() if threshold == math.inf else values.abs() == threshold


def true_positions(flags: Tensor) -> Tensor:
    """Return ascending positions of what is true. Waits for the device."""
    if flags.device.type != "cpu":
        return flags.nonzero().view(-1)
    return torch.from_numpy(flags.numpy().nonzero()[0])  # three times as fast as torch's


def positions_where(values: Tensor, test: Comparison, threshold: float, limit: int | None = None) -> Tensor:
    """Return ascending positions where `test(values, threshold)` holds; the first `limit` of them."""
    found: list[Tensor] = []
    left = values.numel() if limit is None else limit
    for start in range(0, values.numel(), CHUNK):
        if left <= 0:
            break
        here = true_positions(test(values[start : start + CHUNK], threshold))[:left]
        found.append(here.add_(start))
        left -= here.numel()
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=values.device)


def seed_of(name: str, step: int) -> int:
    """Return a seed that is the same on all ranks and differs from step to step and from place to place."""
    digest = hashlib.sha256(f"{name}\n{step}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
