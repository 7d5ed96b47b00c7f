"""Selection and unpacking by the kernels of `runtime.kernels`, where a device has them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.kernels import TopkState, ef_topk_, make_state, ms_topk_, unpack_
from runtime.kernels.backend import usable
from runtime.kernels.checks import FLOATS, MOST_RANKS
from runtime.sparse.compressors.options import Segment

Message = tuple[Tensor, Tensor]
"""(values, indices) that are sent."""


@functools.cache
def _warn_once(device: torch.device, why: str) -> None:
    warnings.warn(
        f"selection on {device} takes torch's own operations, several times as long as the kernels: {why}; "
        f"`planner doctor` says what works",
        RuntimeWarning,
        stacklevel=2,
    )


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether buckets of a dtype on a device are selected from by kernels; warns where these should work and do not."""
    if dtype not in FLOATS or (device.type == "cpu" and usable(device) is not None):
        return False
    why = usable(device)
    if why is not None:
        _warn_once(device, why)
    return why is None


class DeviceSelection:
    """What one compressor keeps on one device."""

    def __init__(self, segments: Sequence[Segment], *, random_ties: bool) -> None:
        """`random_ties`: MSTopK's selection, not the exact one."""
        self._segments, self._random_ties = tuple(segments), random_ties
        self._states: dict[torch.device, TopkState] = {}

    def select(
        self, gradient: Tensor, one: Tensor, other: Tensor, out: Message, *, swapped: Tensor | None, seed: int
    ) -> None:
        """Fills `out`, and the buffer of the next residual."""
        values, indices = out
        if gradient.device not in self._states:
            elements, k = [s.elements for s in self._segments], [s.k for s in self._segments]
            self._states[gradient.device] = make_state(elements, k, gradient.device)
        state = self._states[gradient.device]
        if self._random_ties:
            ms_topk_(gradient, one, other, values, indices, state, seed=seed, swapped=swapped)
        else:
            ef_topk_(gradient, one, other, values, indices, state, swapped=swapped)


def unpacks(values: Tensor, sums: Tensor) -> bool:
    """Whether messages of all ranks (ranks, k) are added up by a kernel."""
    return values.dtype in FLOATS and values.shape[0] <= MOST_RANKS and has_kernels(sums.device, sums.dtype)


def unpack(sums: Tensor, values: Tensor, indices: Tensor) -> None:
    """See `runtime.kernels.unpack_`."""
    unpack_(sums, values, indices)
