"""Selected elements (`topk`, `randomk`): values and indices are gathered, and every rank adds up all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.comm.collectives.direct import Packed
from runtime.kernels import unpack_
from runtime.sparse.compressed import BucketResidual
from runtime.sparse.compressors.sparse import SparseCompressor, unpacks
from runtime.sparse.samples import Selecting

WORD_BYTES = 4


class Selection:
    """`Encoding` of values and indices, as words of four bytes."""

    def __init__(self, feedback: BucketResidual, compressor: SparseCompressor, ranks: int, tail_elements: int) -> None:
        """Lay out the message; the tail (float32) has `tail_elements`."""
        self._feedback, self._compressor, self._ranks = feedback, compressor, ranks
        self.k = compressor.k
        self._value_words = self.k * (feedback.dtype.itemsize // WORD_BYTES)
        self.words = self._value_words + self.k
        """Words of one rank's selected elements, values before indices."""
        flat = torch.zeros(self.words + tail_elements, dtype=torch.int32, device=feedback.device)
        self.message = Packed(flat, flat.new_zeros(ranks * flat.numel()), self._value_words)

    def watched(self, k: int) -> Selecting | None:
        """See `Encoding.watched`; elements drawn by chance are not compared with elements drawn by chance."""
        feedback = self._feedback
        return Selecting(feedback.bucket, k, feedback.summed) if self._compressor.by_magnitude else None

    def encode(self, vector: Tensor, tail: Tensor | None, step: int) -> None:
        """Select from residual + `vector`; see `Encoding.encode`."""
        feedback, compressor, flat = self._feedback, self._compressor, self.message.flat
        values, indices = flat[: self._value_words].view(feedback.dtype), flat[self._value_words : self.words]
        by_kernel = compressor.selects_on(feedback.device, feedback.dtype, vector.dtype)
        buffers = feedback.buffers.for_kernels() if by_kernel else None
        if buffers is not None:
            compressor.select_on_device(vector, buffers, (values, indices), step)
        else:
            found = compressor.compress(vector, feedback.residual, feedback.following, step)
            values.copy_(found[0]), indices.copy_(found[1])
        if not compressor.by_magnitude and self.k:
            # Not finite where any element is not: all ranks must see it.
            values[0] += 0.0 * feedback.following.sum(dtype=torch.float64)
        if tail is not None:
            flat[self.words :] = tail.view(torch.int32)

    def rows(self) -> Tensor:
        """Return the selected elements of every rank, or of every node where these send once. Shape (senders, words),
        int32.
        """
        return self._all_words()[:, : self.words]

    def _all_words(self) -> Tensor:
        nodes = self.message.nodes
        return self.message.gathered.view(self._ranks if nodes is None else nodes.num_nodes, -1)

    def decode(self, sums: Tensor, tail: Tensor | None) -> Tensor:
        """See `Encoding.decode`: sums are 0 where no rank has selected."""
        rows = self.rows()
        self.add_up(rows, sums)
        self.decode_tail(tail)
        return rows[:, self._value_words :].reshape(-1)

    def decode_tail(self, tail: Tensor | None) -> None:
        """Make the tail its sum over ranks."""
        if tail is not None:
            tails = self._all_words()[:, self.words :]
            tail.copy_(tails.contiguous().view(torch.float32).sum(dim=0))

    def add_up(self, rows: Tensor, sums: Tensor) -> None:
        """Make `sums` (1-D) the sum of `rows` (see `rows`), in order of ranks: it is the same everywhere."""
        dtype = self._feedback.dtype
        words, indices = rows[:, : self._value_words], rows[:, self._value_words :]
        if dtype == torch.float32 and unpacks(words.view(dtype), self._feedback.following):
            unpack_(sums, words.view(dtype), indices)
            return
        sums.zero_()
        values = words.contiguous().view(dtype) if self.k else words  # of no elements torch makes no float64
        for row in range(len(rows) if self.k else 0):
            sums.index_add_(0, indices[row], values[row])
