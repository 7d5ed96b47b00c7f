"""Lossy buckets that send all elements in a narrower dtype, and add them up in a wider one.

Each rank sends every other one its part of the bucket; every rank adds up the part that it owns, and sends the sum,
narrowed again, to all. What either narrowing loses stays in a residual: what the second one does, in the owner's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.comm.collectives.narrowed import Narrowed
from runtime.sparse.compressors.wire import WireCompressor
from runtime.sparse.lossy import Carrier


class NarrowedBucket:
    """See `runtime.sparse.lossy.Lossy`; for the compressor `wire`."""

    by_magnitude = False

    def __init__(self, carrier: Carrier, compressor: WireCompressor, ranks: int, tail: Tensor | None) -> None:
        """`tail` (float32, small integers) travels behind the elements and becomes its sum over ranks."""
        self.carrier, self._compressor, self._tail = carrier, compressor, tail
        self.k = carrier.residual.numel()
        flags = 0 if tail is None else tail.numel()
        self.packed = Narrowed(self.k + flags, ranks, compressor.dtype, carrier.dtype, carrier.device)
        carrier.bucket.parcel.payloads = [self.packed]

    def pack(self, step: int) -> None:
        """See `Lossy.pack`."""
        carrier, flat = self.carrier, self.packed.flat
        flat[: self.k] = self._compressor.compress(carrier.gradient(), carrier.residual, carrier.following, step)
        if self._tail is not None:
            flat[self.k : self.k + self._tail.numel()] = self._tail

    def unpack(self) -> Tensor:
        """See `Lossy.unpack`."""
        sums = self.carrier.zeros()
        torch.add(sums, self.packed.gathered[: self.k], out=sums)
        self.carrier.give(sums)
        if self._tail is not None:
            self._tail.copy_(self.packed.gathered[self.k : self.k + self._tail.numel()])
        first = self.packed.rank * self.packed.share
        mine = self.carrier.following[first : first + self.packed.share]
        mine.add_(self.packed.total[: mine.numel()])
        return self.carrier.finite()
