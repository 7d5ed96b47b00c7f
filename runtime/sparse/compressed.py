"""Compressed buckets: only a part of each gradient is sent, and error feedback keeps the rest for later steps.

    launch         ─▶ residual + gradient is split into what is sent (one message) and the next residual, which goes to
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
import torch.distributed as dist
from torch import Tensor

from runtime.core.buckets import BucketBuffer, view_of
from runtime.plan.names import layer_of, numbered
from runtime.sparse.compressors.sparse import has_kernels
from runtime.sparse.compressors.wire import NO_RESIDUAL, StepResidual
from runtime.sparse.samples import Rounding, Selecting


def layer_runs(gradients: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return (layer, elements) of neighbouring gradients of one layer, given (name, elements) of each. A layer that
    comes back is numbered: `conv`, `conv#2`.
    """
    runs = [
        (layer, sum(numel for _, numel in members))
        for layer, members in groupby(gradients, key=lambda gradient: layer_of(gradient[0]))
    ]
    return list(zip(numbered(layer for layer, _ in runs), (numel for _, numel in runs), strict=True))


def all_finite(flat: Tensor) -> Tensor:
    """Return whether all elements are finite, as a 0-d tensor: one pass without memory of its own."""
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    if not real.numel():
        return torch.ones((), dtype=torch.bool, device=flat.device)
    return torch.stack(torch.aminmax(real)).isfinite().all()  # a NaN is the least and the largest of any


class ResidualBuffers:
    """A residual and the next one: two buffers that change places. Shapes (elements,).

    On a device the host does not know whether a step counts. So there the device keeps which buffer is which, kernels
    look it up, and nothing is copied until the host asks for the residual.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, *, on_device: bool) -> None:
        """`on_device`: kernels are there that look up which of the buffers is which."""
        self._first = torch.zeros(elements, dtype=dtype, device=device)
        self._second = torch.zeros_like(self._first)
        self._swapped = torch.zeros(1, dtype=torch.int32, device=device) if on_device else None
        self._under_way = False
        """Whether a kernel has written the following residual, which has yet to count."""

    @property
    def residual(self) -> Tensor:
        """Part of the gradients that has not been sent yet; during a step on the device, a copy from before it."""
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
        """Memory of the next residual, once `residual` has been asked for."""
        return self._second

    def hold_following(self, *, held: bool) -> None:
        """Allocate the memory of the next residual, or free it until a step that is far off."""
        kept = self.residual  # asked for first: on a device it may be in the second buffer
        self._second.untyped_storage().resize_(kept.numel() * kept.itemsize if held else 0)

    def for_kernels(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return both buffers and whether they have changed places (one int32); None where no device keeps that."""
        if self._swapped is None:
            return None
        self._under_way = True
        return self._first, self._second, self._swapped

    def drop(self) -> None:
        """Forget a step that a kernel has begun: its backward was given up."""
        self._under_way = False

    def commit(self, finite: Tensor) -> None:
        """Make the following residual the residual if `finite` (0-d) is true. Waits for no device."""
        self._under_way = False
        if self._swapped is not None:
            self._swapped.bitwise_xor_(finite.to(torch.int32))
        elif finite.device.type != "cpu":
            # No branch: that would wait for the device.
            torch.where(finite, self._second, self._first, out=self._first)
        elif finite:
            self._first, self._second = self._second, self._first


class BucketResidual:
    """A bucket's gradients as one vector, and their residual. Vectors have the shape (elements of the bucket,)."""

    pending: Tensor | None = None
    """Residuals of other ranks' shards, sent with the next gradients. Shape (elements of the bucket,)."""

    def __init__(self, bucket: BucketBuffer, elements: int | None = None) -> None:
        """Make a residual of zeros; `elements`: its number of elements, by default one for each of the bucket's."""
        self.bucket = bucket
        wide = any(message.flat.dtype == torch.float64 for message in bucket.messages)
        self.dtype = torch.float64 if wide else torch.float32
        self.device = bucket.messages[0].flat.device
        self.sizes = [slot.parameter.numel() for slot in bucket.slots]
        kept = sum(self.sizes) if elements is None else elements
        self.buffers = ResidualBuffers(kept, self.dtype, self.device, on_device=has_kernels(self.device, self.dtype))

    @property
    def residual(self) -> Tensor:
        """Part of this rank's gradients that has not been sent yet."""
        return self.buffers.residual

    @property
    def following(self) -> Tensor:
        """Residual after the present step, if no kernel writes it."""
        return self.buffers.following

    def gradient(self) -> Tensor:
        messages = self.bucket.messages
        return messages[0].flat if len(messages) == 1 else torch.cat([part.to(self.dtype) for part in self._parts()])

    def summed(self, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """See `runtime.sparse.samples.Selecting`: the gradients have become the sums of what was sent."""
        residual = self.unsent()
        dist.all_reduce(residual, group=group)
        return residual, self.gradient().to(self.dtype)

    def _parts(self) -> list[Tensor]:
        """Return each gradient's memory, in order of the slots. Shapes (elements,)."""
        parts: dict[int, Tensor] = {}
        for message in self.bucket.messages:
            sizes = [slot.parameter.numel() for slot in message.slots]
            parts.update(zip((slot.index for slot in message.slots), message.flat.split(sizes), strict=True))
        return [parts[slot.index] for slot in self.bucket.slots]

    def room(self) -> Tensor:
        """Return memory for the sum: the gradients' own where it is one vector of the right dtype."""
        messages = self.bucket.messages
        if len(messages) == 1 and messages[0].flat.dtype == self.dtype:
            return messages[0].flat
        return torch.empty(sum(self.sizes), dtype=self.dtype, device=self.device)

    def give(self, sums: Tensor) -> None:
        """Write the sum into the gradients, where it is not their own memory."""
        if sums is not self.bucket.messages[0].flat:
            for part, summed in zip(self._parts(), sums.split(self.sizes), strict=True):
                part.copy_(summed)

    def finite(self, places: Tensor | None = None) -> Tensor:
        """Tell whether the gradients are (0-d); only `places` are looked at, where all others are known to be 0."""
        messages = self.bucket.messages
        if places is not None and len(messages) == 1:
            return torch.isfinite(messages[0].flat[places]).all()
        return torch.stack([all_finite(message.flat) for message in messages]).all()

    def of_step(self, *, by_kernels: bool) -> StepResidual:
        """Return what an encoder reads and writes in this step."""
        kernels = self.buffers.for_kernels() if by_kernels else None
        return StepResidual(*kernels) if kernels is not None else StepResidual(self.residual, self.following)

    def commit(self, finite: Tensor) -> None:
        """Count what was sent as sent if `finite` (0-d) is true; else the residual stays what it was."""
        self.buffers.commit(finite)

    def memory(self) -> Iterator[Tensor]:
        """Yield all memory that is kept from step to step."""
        yield self.residual

    def unsent(self) -> Tensor:
        return self.residual.clone()

    def residuals(self) -> dict[str, Tensor]:
        """Return the residual by gradient, in its shape."""
        return self._by_name(self.residual)

    def put(self, residuals: Mapping[str, Tensor]) -> None:
        """Continue with the residuals of gradients, by name; those of others are zero."""
        for name, part in self.residuals().items():
            part.copy_(residuals[name]) if name in residuals else part.zero_()

    def starts(self) -> dict[str, Tensor]:
        """Return what else the next step's message depends on, by gradient."""
        return {}

    def put_starts(self, starts: Mapping[str, Tensor]) -> None:
        """Continue with another exchange's `starts`, as far as they fit."""

    def _by_name(self, flat: Tensor) -> dict[str, Tensor]:
        parts, offset = {}, 0
        for slot, size in zip(self.bucket.slots, self.sizes, strict=True):
            parts[slot.name] = view_of(flat, offset, slot.parameter)
            offset += size
        return parts


class NoResidual(BucketResidual):
    """Gradients of a bucket without error feedback: rounding errors are lost."""

    def __init__(self, bucket: BucketBuffer) -> None:
        super().__init__(bucket, 0)

    def of_step(self, *, by_kernels: bool) -> StepResidual:
        return NO_RESIDUAL

    def residuals(self) -> dict[str, Tensor]:
        return {}

    def put(self, residuals: Mapping[str, Tensor]) -> None: ...

    def unsent(self) -> Tensor:
        return self.residual.new_zeros(()).expand(sum(self.sizes))


class Encoding(Protocol):
    """A codec's way to sum a vector over ranks, with a tail of small integers behind it; one class for each codec."""

    message: Any
    """Message of the collective that sums it."""
    k: int
    """Number of elements that are sent."""

    def watched(self, k: int) -> Selecting | Rounding | None:
        """Return what the guard samples of a bucket that sends `k` elements; None: it does no known harm."""
        ...

    def encode(self, vector: Tensor, tail: Tensor | None, step: int) -> None:
        """Fill the message with residual + `vector` and with the tail; both 1-D."""
        ...

    def decode(self, sums: Tensor, tail: Tensor | None) -> Tensor | None:
        """Fill `sums` and the tail (1-D) from the reduced message.

        Returns:
            The places (1-D) outside of which all sums are 0; None: there may be others everywhere.
        """
        ...


class CompressedBucket:
    """A bucket of which less is sent: its residual and the encoding of residual + gradients."""

    def __init__(self, feedback: BucketResidual, encoding: Encoding, tail: Tensor | None, k: int | None = None) -> None:
        """Put the encoding's message in place of the bucket's own.

        Args:
            feedback: the bucket's gradients and residual.
            encoding: how they are sent.
            tail: 1-D, small integers; becomes its sum over ranks. None: nothing is sent behind the gradients.
            k: number of elements that are sent of the bucket; default: those of the encoding.
        """
        self.feedback, self.encoding, self.tail = feedback, encoding, tail
        self.k = encoding.k if k is None else k
        self.watched = encoding.watched(self.k)
        self.send(encoding.message)

    def send(self, message: Any) -> None:
        """Send this message in place of the bucket's own."""
        self.packed = message
        self.feedback.bucket.payload.messages = [message]

    def pack(self, step: int) -> None:
        """Fill the message: all gradients of the bucket are there."""
        gradient = self.feedback.gradient()
        if self.watched is not None:
            self.watched.keep(gradient, self.feedback.unsent, step)
        self.encoding.encode(gradient, self.tail, step)

    def unpack(self) -> Tensor:
        """Turn the gradients into the sum of all ranks' messages; return whether all of it is finite (0-d)."""
        sums = self.feedback.room()
        return self.take(sums, self.encoding.decode(sums, self.tail))

    def take(self, sums: Tensor, places: Tensor | None = None) -> Tensor:
        """Make `sums` (1-D) the gradients; return whether they are finite (0-d), of which only `places` may not be."""
        if self.watched is not None:
            self.watched.arrived(sums)
        self.feedback.give(sums)
        return self.feedback.finite(places)
