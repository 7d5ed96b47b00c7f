"""Lossy buckets that send some elements as they are: values and indices, gathered and added up by every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.comm.collectives.sparse_flat import Packed
from runtime.sparse.compressors.device import unpack, unpacks
from runtime.sparse.compressors.sparse import SparseCompressor
from runtime.sparse.lossy import Carrier


class SelectedBucket:
    """See `runtime.sparse.lossy.Lossy`; for the compressors `topk` and `randomk`."""

    def __init__(
        self, carrier: Carrier, compressor: SparseCompressor, ranks: int, tail: Tensor | None, *, by_magnitude: bool
    ) -> None:
        """`tail` (float32) travels behind the message and becomes its sum over ranks. `by_magnitude`: what is not
        finite is chosen first, and so is seen by all ranks without more ado.
        """
        self.carrier, self._compressor, self._ranks, self._tail = carrier, compressor, ranks, tail
        self.by_magnitude, self.k = by_magnitude, compressor.k
        self._words = self.k * (carrier.dtype.itemsize // 4)
        words = self._words + self.k + (0 if tail is None else tail.numel())
        flat = torch.zeros(words, dtype=torch.int32, device=carrier.device)
        self.packed = Packed(flat, flat.new_zeros(ranks * words), self._words)
        carrier.bucket.parcel.payloads = [self.packed]

    def pack(self, step: int) -> None:
        """See `Lossy.pack`."""
        carrier, words, flat = self.carrier, self._words, self.packed.flat
        self._fill(flat[:words].view(carrier.dtype), flat[words : words + self.k], step)
        if self._tail is not None:
            flat[words + self.k :] = self._tail.view(torch.int32)

    def _fill(self, values: Tensor, indices: Tensor, step: int) -> None:
        """Selects what travels into the message."""
        carrier, gradient = self.carrier, self.carrier.gradient()
        by_kernel = self._compressor.selects_on(carrier.device, carrier.dtype, gradient.dtype)
        buffers = carrier.held.for_kernels() if by_kernel else None
        if buffers is not None:
            self._compressor.select_on_device(gradient, buffers, (values, indices), step)
        else:
            found = self._compressor.compress(gradient, carrier.residual, carrier.following, step)
            values.copy_(found[0]), indices.copy_(found[1])
        if not self.by_magnitude and self.k:
            # Not finite where any element is not: all ranks must see it.
            values[0] += 0.0 * carrier.following.sum(dtype=torch.float64)

    def unpack(self) -> Tensor:
        """See `Lossy.unpack`."""
        words, end = self._words, self._words + self.k
        ranks = self.packed.gathered.view(self._ranks, -1)
        sums = self._add_up(ranks[:, :words], ranks[:, words:end])
        self.carrier.give(sums)
        if self._tail is not None:
            self._tail.copy_(ranks[:, end:].contiguous().view(torch.float32).sum(dim=0))
        return self.carrier.finite(ranks[:, words:end].reshape(-1))

    def _add_up(self, words: Tensor, indices: Tensor) -> Tensor:
        """In order of ranks: it is the same everywhere."""
        dtype = self.carrier.dtype
        if dtype == torch.float32 and unpacks(words.view(dtype), self.carrier.held.following):
            sums = self.carrier.room()
            unpack(sums, words.view(dtype), indices)
            return sums
        if not self.k:  # of no elements torch makes no float64
            return self.carrier.zeros()
        values, sums = words.contiguous().view(dtype), self.carrier.zeros()
        for rank in range(self._ranks):
            sums.index_add_(0, indices[rank], values[rank])
        return sums
