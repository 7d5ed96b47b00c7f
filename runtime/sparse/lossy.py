"""Buckets of which only a part travels: what stays behind, and how both are kept apart without losing anything.

    launch         ─▶ residual + gradient is split into what travels (one message) and the next residual, which goes to
                      a second buffer
    all has come   ─▶ the gradients become the sum of what all ranks sent; the next residual counts from now on, on all
                      ranks alike, unless some gradient was not finite: then the step leaves residuals as they were

Residuals are in units of the averaged gradient (already times 1/ranks), so that their sum over ranks is what training
has yet to see, whatever the number of ranks. Sources: Deep Gradient Compression (Lin et al., ICLR 2018), LAGS-SGD (Shi
et al., ECAI 2020), which puts the learning rate inside the residual: the same for a constant rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.core.buckets import BucketBuffer, view_of
from runtime.plan.names import layer_of, numbered
from runtime.sparse.compressors.device import has_kernels
from runtime.sparse.residual_buffers import Held


def layer_runs(gradients: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """(layer, elements) of neighbouring gradients of one layer, from the names and elements of a bucket's.

    A layer that comes back is numbered: `conv`, `conv#2`.
    """
    runs = [
        (layer, sum(numel for _, numel in members))
        for layer, members in groupby(gradients, key=lambda gradient: layer_of(gradient[0]))
    ]
    return list(zip(numbered(layer for layer, _ in runs), (numel for _, numel in runs), strict=True))


def all_finite(flat: Tensor) -> Tensor:
    """Whether all elements are, as a 0-d tensor: one pass without memory of its own."""
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    if not real.numel():
        return torch.ones((), dtype=torch.bool, device=flat.device)
    return torch.stack(torch.aminmax(real)).isfinite().all()  # a NaN is the least and the largest of any


class Lossy(Protocol):
    """What makes a bucket lossy: one for each way to send less."""

    packed: Any
    """What its collective gets."""
    k: int
    """How many elements each rank sends."""
    by_magnitude: bool
    """Whether these are the largest of them: what `runtime.sparse.guard` looks at."""

    @property
    def carrier(self) -> Carrier:
        """The bucket's gradients and residual."""
        ...

    def pack(self, step: int) -> None:
        """All gradients of the bucket are there: fills the message."""
        ...

    def unpack(self) -> Tensor:
        """All ranks' messages have come: the gradients become their sum. Returns whether all of it is finite (0-d)."""
        ...


class Carrier:
    """A bucket's gradients as one vector, and what of them has not travelled yet."""

    def __init__(self, bucket: BucketBuffer, elements: int | None = None) -> None:
        """`elements`: of the residual, where it is not one for each of the bucket's."""
        self.bucket = bucket
        wide = any(message.flat.dtype == torch.float64 for message in bucket.messages)
        self.dtype = torch.float64 if wide else torch.float32
        self.device = bucket.messages[0].flat.device
        self.sizes = [slot.parameter.numel() for slot in bucket.slots]
        self.layers = layer_runs((slot.name, slot.parameter.numel()) for slot in bucket.slots)
        kept = sum(self.sizes) if elements is None else elements
        self.held = Held(kept, self.dtype, self.device, on_device=has_kernels(self.device, self.dtype))

    @property
    def residual(self) -> Tensor:
        """What of this rank's gradients has not travelled yet. Shape (elements of the bucket,)."""
        return self.held.residual

    @property
    def following(self) -> Tensor:
        """The residual after the step that is on its way, where no kernel writes it. Shape as the residual's."""
        return self.held.following

    def gradient(self) -> Tensor:
        """The bucket's gradients in order of its slots. Shape (elements of the bucket,)."""
        messages = self.bucket.messages
        return messages[0].flat if len(messages) == 1 else torch.cat([part.to(self.dtype) for part in self._parts()])

    def sums(self) -> Tensor:
        """What came of it in the last step, until the optimizer or a script changes it. Shape as the residual's."""
        return self.gradient().to(self.dtype)

    def _parts(self) -> list[Tensor]:
        """Each gradient's memory, in order of the slots. Shapes (elements,)."""
        parts: dict[int, Tensor] = {}
        for message in self.bucket.messages:
            sizes = [slot.parameter.numel() for slot in message.slots]
            parts.update(zip((slot.index for slot in message.slots), message.flat.split(sizes), strict=True))
        return [parts[slot.index] for slot in self.bucket.slots]

    def zeros(self) -> Tensor:
        """Zeros to add the sum up in: see `room`."""
        return self.room().zero_()

    def room(self) -> Tensor:
        """Memory for the sum: the gradients' own where it is one vector of the right dtype. Shape as the residual's."""
        messages = self.bucket.messages
        if len(messages) == 1 and messages[0].flat.dtype == self.dtype:
            return messages[0].flat
        return torch.empty(sum(self.sizes), dtype=self.dtype, device=self.device)

    def give(self, sums: Tensor) -> None:
        """Writes the sum into the gradients, where it is not their own memory."""
        if sums is not self.bucket.messages[0].flat:
            for part, summed in zip(self._parts(), sums.split(self.sizes), strict=True):
                part.copy_(summed)

    def finite(self, places: Tensor | None = None) -> Tensor:
        """Whether the gradients are (0-d); only `places` of them are looked at, where all others are known to be 0."""
        messages = self.bucket.messages
        if places is not None and len(messages) == 1:
            return torch.isfinite(messages[0].flat[places]).all()
        return torch.stack([all_finite(message.flat) for message in messages]).all()

    def commit(self, finite: Tensor) -> None:
        """What was sent counts as sent if `finite` (0-d) is true; else the residual stays what it was."""
        self.held.commit(finite)

    def memory(self) -> Iterator[Tensor]:
        """All memory that is carried from step to step."""
        yield self.residual

    def held_back(self) -> Tensor:
        """A copy of what this rank holds back of the bucket. Shape (elements of the bucket,)."""
        return self.residual.clone()

    def residuals(self) -> dict[str, Tensor]:
        """By gradient, in its shape."""
        return self._by_name(self.residual)

    def put(self, residuals: Mapping[str, Tensor]) -> None:
        """Takes over what gradients, by name, hold back; of others nothing is held back."""
        for name, part in self.residuals().items():
            part.copy_(residuals[name]) if name in residuals else part.zero_()

    def _by_name(self, flat: Tensor) -> dict[str, Tensor]:
        parts, offset = {}, 0
        for slot, size in zip(self.bucket.slots, self.sizes, strict=True):
            parts[slot.name] = view_of(flat, offset, slot.parameter)
            offset += size
        return parts
