"""What a lossy bucket holds back, and what it will after the step on its way: two buffers that change places.

On a device the host does not know whether a step counts. So there the device keeps which buffer is which, kernels look
it up, and nothing is copied until somebody else asks for the residual.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Held:
    """A residual and the one that is to follow it. Both have the shape (elements of the bucket,)."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, *, on_device: bool) -> None:
        """`on_device`: kernels are there that look up which of the buffers is which."""
        self._first = torch.zeros(elements, dtype=dtype, device=device)
        self._second = torch.zeros_like(self._first)
        self._swapped = torch.zeros(1, dtype=torch.int32, device=device) if on_device else None
        self._under_way = False
        """Whether a kernel has written the following residual, which has yet to count."""

    @property
    def residual(self) -> Tensor:
        """What has not travelled yet; of a step under way on the device, a copy of what it was before."""
        if self._swapped is None:
            return self._first
        swapped = self._swapped.bool()
        if self._under_way:
            return torch.where(swapped, self._second, self._first)
        torch.where(swapped, self._second, self._first, out=self._first)
        self._swapped.zero_()
        return self._first

    @property
    def following(self) -> Tensor:
        """Where the next residual is written, once `residual` has been asked for."""
        return self._second

    def for_kernels(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """(one buffer, the other, whether they have changed places: one int32), for a kernel that writes the next
        residual; None where the device does not keep that.
        """
        if self._swapped is None:
            return None
        self._under_way = True
        return self._first, self._second, self._swapped

    def drop(self) -> None:
        """A step that a kernel has begun will not count any more: its backward was given up."""
        self._under_way = False

    def commit(self, finite: Tensor) -> None:
        """The following residual is the residual from now on, if `finite` (0-d) is true. Waits for no device."""
        self._under_way = False
        if self._swapped is not None:
            self._swapped.bitwise_xor_(finite.to(torch.int32))
        elif finite.device.type != "cpu":
            torch.where(finite, self._second, self._first, out=self._first)
        elif finite:
            self._first, self._second = self._second, self._first
