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

from runtime.comm.collectives.direct import Narrowed, Packed
from runtime.comm.collectives.phases import share_of
from runtime.core.buckets import BucketBuffer, Message, view_of
from runtime.kernels import unpack_
from runtime.plan.names import layer_of, numbered
from runtime.sparse.compressors.magnitudes import seed_of
from runtime.sparse.compressors.sparse import SparseCompressor, has_kernels, unpacks
from runtime.sparse.compressors.wire import WireCompressor
from runtime.sparse.samples import Rounding, Selecting, Watched


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
    """A residual and the one after the step on its way: two buffers that change places. Shapes (elements,).

    On a device the host does not know whether a step counts. So there the device keeps which buffer is which, kernels
    look it up, and nothing is copied until somebody else asks for the residual.
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
        """What has not been sent yet; of a step under way on the device, a copy of what it was before."""
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

    def __init__(self, bucket: BucketBuffer, elements: int | None = None) -> None:
        """`elements`: of the residual, where it is not one for each of the bucket's."""
        self.bucket = bucket
        wide = any(message.flat.dtype == torch.float64 for message in bucket.messages)
        self.dtype = torch.float64 if wide else torch.float32
        self.device = bucket.messages[0].flat.device
        self.sizes = [slot.parameter.numel() for slot in bucket.slots]
        kept = sum(self.sizes) if elements is None else elements
        self.buffers = ResidualBuffers(kept, self.dtype, self.device, on_device=has_kernels(self.device, self.dtype))

    @property
    def residual(self) -> Tensor:
        """What of this rank's gradients has not been sent yet."""
        return self.buffers.residual

    @property
    def following(self) -> Tensor:
        """The residual after the step that is on its way, where no kernel writes it."""
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

    def of_step(self, by_kernels: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the residual, the following one and, where kernels write it, whether they have changed places; None of
        a bucket without.
        """
        return (self.buffers.for_kernels() if by_kernels else None) or (self.residual, self.following, None)

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


class CompressedBucket(Protocol):
    """A bucket of which less is sent: one class for each way."""

    packed: Any
    k: int
    """How many elements are sent."""

    @property
    def feedback(self) -> BucketResidual: ...

    @property
    def watched(self) -> Watched | None:
        """What answers when the bucket is sampled; None: it does no harm that is known."""
        ...

    def pack(self, step: int) -> None:
        """Fill the message: all gradients of the bucket are there."""
        ...

    def unpack(self) -> Tensor:
        """Turn the gradients into the sum of all ranks' messages. Returns whether all of it is finite (0-d)."""
        ...


class SelectedBucket:
    """A `CompressedBucket` of `topk` or `randomk`: values and indices, gathered and added up by every rank."""

    def __init__(self, feedback: BucketResidual, compressor: SparseCompressor, ranks: int, tail: Tensor | None) -> None:
        """`tail` (float32) becomes its sum over ranks."""
        self.feedback, self._compressor, self._ranks, self._tail = feedback, compressor, ranks, tail
        self.k = compressor.k
        self.watched = Selecting(feedback.bucket, self.k, feedback.summed) if compressor.by_magnitude else None
        self._words = self.k * (feedback.dtype.itemsize // 4)
        words = self._words + self.k + (0 if tail is None else tail.numel())
        flat = torch.zeros(words, dtype=torch.int32, device=feedback.device)
        self.packed = Packed(flat, flat.new_zeros(ranks * words), self._words)
        feedback.bucket.payload.messages = [self.packed]

    def pack(self, step: int) -> None:
        feedback, flat, gradient = self.feedback, self.packed.flat, self.feedback.gradient()
        end = self._words + self.k
        values, indices = flat[: self._words].view(feedback.dtype), flat[self._words : end]
        by_kernel = self._compressor.selects_on(feedback.device, feedback.dtype, gradient.dtype)
        buffers = feedback.buffers.for_kernels() if by_kernel else None
        if buffers is not None:
            self._compressor.select_on_device(gradient, buffers, (values, indices), step)
        else:
            found = self._compressor.compress(gradient, feedback.residual, feedback.following, step)
            values.copy_(found[0]), indices.copy_(found[1])
        if not self._compressor.by_magnitude and self.k:
            # Not finite where any element is not: all ranks must see it.
            values[0] += 0.0 * feedback.following.sum(dtype=torch.float64)
        if self._tail is not None:
            flat[end:] = self._tail.view(torch.int32)

    def unpack(self) -> Tensor:
        words, end = self._words, self._words + self.k
        ranks = self.packed.gathered.view(self._ranks, -1)
        self.feedback.give(self._add_up(ranks[:, :words], ranks[:, words:end]))
        if self._tail is not None:
            self._tail.copy_(ranks[:, end:].contiguous().view(torch.float32).sum(dim=0))
        return self.feedback.finite(ranks[:, words:end].reshape(-1))

    def _add_up(self, words: Tensor, indices: Tensor) -> Tensor:
        # In order of ranks: it is the same everywhere.
        dtype, sums = self.feedback.dtype, self.feedback.room()
        if dtype == torch.float32 and unpacks(words.view(dtype), self.feedback.following):
            unpack_(sums, words.view(dtype), indices)
            return sums
        sums.zero_()
        values = words.contiguous().view(dtype) if self.k else words  # of no elements torch makes no float64
        for rank in range(self._ranks if self.k else 0):
            sums.index_add_(0, indices[rank], values[rank])
        return sums


class NoResidual(BucketResidual):
    """Of a bucket without error feedback: what rounding loses is lost."""

    def __init__(self, bucket: BucketBuffer) -> None:
        super().__init__(bucket, 0)

    def of_step(self, by_kernels: bool) -> tuple[None, None, None]:
        return None, None, None

    def residuals(self) -> dict[str, Tensor]:
        return {}

    def put(self, residuals: Mapping[str, Tensor]) -> None: ...

    def unsent(self) -> Tensor:
        return self.residual.new_zeros(()).expand(sum(self.sizes))


class TwoShots:
    """A vector that some ranks add up in fewer bytes: each sends every other one its part; every rank adds up the part
    that it owns, in a wider dtype, and sends the sum, encoded again, to all.

    What either encoding loses stays in the residual, where there is one: what the second one does, in the owner's.
    """

    def __init__(
        self, feedback: BucketResidual, compressor: WireCompressor, elements: int, ranks: int, owner: int,
        tail_elements: int, *, seed: int,
    ) -> None:  # fmt: skip
        """`elements`: of the vector, for each of which `feedback` has a residual; this rank owns part number `owner`.
        `tail_elements` (float32) are sent as they are. `seed`: another one on each rank, for stochastic rounding.
        """
        self._feedback, self._compressor = feedback, compressor
        self._cut = compressor.cut(elements, ranks, feedback.dtype, share_of(tail_elements, ranks))
        self._mine = slice(*(min(elements, place * self._cut.share) for place in (owner, owner + 1)))
        """Of the vector."""
        self.message = Narrowed(ranks, self._cut.row_bytes, feedback.device, self._narrow)
        self._place, self._step = f"{seed}\n{feedback.bucket.slots[0].name}", 0

    def encode(self, vector: Tensor, tail: Tensor | None, step: int) -> None:
        """Fill the message with residual + vector, and the tail behind it; both 1-D."""
        feedback, rows, self._step = self._feedback, self.message.rows, step
        old, new, swapped = feedback.of_step(self._compressor.runs_on(feedback.device, self._cut, vector.dtype))
        seed = seed_of(f"sent\n{self._place}", step)
        self._compressor.compress(vector, old, new, rows, self._cut, seed, swapped=swapped)
        if tail is not None:
            tails = tail.new_zeros(len(rows) * self._cut.tail)
            tails[: tail.numel()] = tail
            self._cut.tails(rows).copy_(tails.view(len(rows), -1))

    def _narrow(self, received: Tensor, own: Tensor) -> None:
        feedback, part = self._feedback, self._mine
        old, new, swapped = feedback.of_step(self._compressor.runs_on(feedback.device, self._cut))
        if old is not None and new is not None:
            old, new = old[part], new[part]
        seed = seed_of(f"summed\n{self._place}", self._step)
        self._compressor.combine(received, own, old, new, self._cut, part.stop - part.start, seed, swapped=swapped)
        if self._cut.tail:
            self._cut.tails(own).copy_(self._cut.tails(received).sum(dim=0, keepdim=True))

    def decode(self, sums: Tensor, tail: Tensor | None) -> None:
        """Fill `sums` and `tail` (1-D) with the sums over ranks: the message has come."""
        self._compressor.decode(self.message.gathered, sums, self._cut)
        if tail is not None:
            tail.copy_(self._cut.tails(self.message.gathered).reshape(-1)[: tail.numel()])


class NarrowedBucket:
    """A `CompressedBucket` of `wire`: all elements in fewer bytes, added up in a wider dtype (`TwoShots`)."""

    def __init__(
        self, feedback: BucketResidual, compressor: WireCompressor, ranks: int, rank: int, tail: Tensor | None
    ) -> None:
        """`tail` (float32) is sent as it is behind the elements and becomes its sum over ranks."""
        self.feedback, self._tail, self.k = feedback, tail, sum(feedback.sizes)
        self.watched = Rounding(feedback.bucket, feedback=compressor.error_feedback)
        tail_elements = 0 if tail is None else tail.numel()
        self._shots = TwoShots(feedback, compressor, self.k, ranks, rank, tail_elements, seed=rank)
        self.packed = self._shots.message
        feedback.bucket.payload.messages = [self.packed]

    def pack(self, step: int) -> None:
        gradient = self.feedback.gradient()
        self.watched.keep(gradient, self.feedback.unsent, step)
        self._shots.encode(gradient, self._tail, step)

    def unpack(self) -> Tensor:
        sums = self.feedback.room()
        self._shots.decode(sums, self._tail)
        self.watched.arrived(sums)
        self.feedback.give(sums)
        return self.feedback.finite()


class NativeBucket:
    """A `CompressedBucket` of `wire` that the backend adds up in the wire's dtype: what its sums lose, nobody keeps."""

    def __init__(self, feedback: BucketResidual, compressor: WireCompressor, rank: int, tail: Tensor | None) -> None:
        """`tail` (in the wire's dtype, small integers) is sent behind the elements and becomes its sum over ranks."""
        self.feedback, self._compressor, self._tail = feedback, compressor, tail
        self.k, self._rank = sum(feedback.sizes), rank
        self.watched = Rounding(feedback.bucket, feedback=compressor.error_feedback)
        flags = 0 if tail is None else tail.numel()
        self._cut = compressor.cut(self.k, 1, feedback.dtype)
        flat = torch.zeros(self.k + flags, dtype=compressor.dtype, device=feedback.device)
        self.packed = Message(flat, [])
        feedback.bucket.payload.messages = [self.packed]

    def pack(self, step: int) -> None:
        feedback, flat = self.feedback, self.packed.flat
        gradient = feedback.gradient()
        self.watched.keep(gradient, feedback.unsent, step)
        old, new, swapped = feedback.of_step(self._compressor.runs_on(feedback.device, self._cut, gradient.dtype))
        seed = seed_of(f"sent\n{self._rank}\n{feedback.bucket.slots[0].name}", step)
        if self.k:
            rows = flat.view(torch.uint8)[None]
            self._compressor.compress(gradient, old, new, rows, self._cut, seed, swapped=swapped)
        if self._tail is not None:
            flat[self.k :] = self._tail

    def unpack(self) -> Tensor:
        sums = self.feedback.room().copy_(self.packed.flat[: self.k])
        self.watched.arrived(sums)
        self.feedback.give(sums.add_(0.0))  # −0 becomes 0, as where elements are selected
        if self._tail is not None:
            self._tail.copy_(self.packed.flat[self.k :])
        return self.feedback.finite()
