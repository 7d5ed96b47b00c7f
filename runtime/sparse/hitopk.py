"""Lossy buckets of HiTopKComm: dense inside a node, the largest elements of each rank's shard between nodes.

Source: CommLib (Shi et al., MLSys 2021), Algorithm 2, here with error feedback.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.comm.collectives.direct import Packed
from runtime.comm.topology import Topology
from runtime.sparse.compressors.sparse import SparseCompressor
from runtime.sparse.samples import Selecting
from runtime.sparse.shards import ShardBucket, ShardResidual

WORD_BYTES = 4


class HitopkBucket(ShardBucket):
    """See `runtime.sparse.compressed.CompressedBucket`."""

    def __init__(
        self, feedback: ShardResidual, compressor: SparseCompressor, topology: Topology, rank: int, tail: Tensor | None
    ) -> None:
        """`compressor` selects from a shard; `tail`: see `ShardBucket`."""
        super().__init__(feedback, topology.ranks_per_node, topology.local_rank(rank), tail)
        self.nodes, self.compressor = topology.num_nodes, compressor
        self.k = min(self.elements, self.parts * compressor.k)
        self.watched = Selecting(feedback.bucket, self.k, feedback.summed)
        new, words = feedback.residual.new_zeros, torch.int32
        selected = compressor.k * feedback.dtype.itemsize // WORD_BYTES + compressor.k
        self._sparse = self.nodes * selected < self.share * feedback.dtype.itemsize // WORD_BYTES
        """Whether the shards' selected elements are fewer bytes than their sums."""
        self._selected = new(selected + self.tail_elements, dtype=words)
        """Values, indices within the shard, and the tail, as words of four bytes."""
        everywhere = self._selected.new_zeros(self.nodes * self._selected.numel())
        own = new(self.nodes * selected, dtype=words) if self._sparse else new(self.share)
        self.packed = self.send(Packed(self._selected, everywhere), own)

    def fill(self) -> None:
        self.select()

    def select(self) -> None:
        """Do step 2 of the algorithm, on this rank's shard of the node's sum."""
        feedback = self.feedback
        values, indices = self.compressor.compress(self._summed, feedback.residual, feedback.following, self._step)
        words = values.view(torch.int32)
        self._selected[: words.numel()] = words
        self._selected[words.numel() : words.numel() + indices.numel()] = indices
        if self._tail is not None:
            self._selected[-self.tail_elements :] = self.packed.tails.sum(dim=0).view(torch.int32)

    def add_nodes(self) -> None:
        """Add up after step 3, when every node's part of this shard is here."""
        message, between = self.packed, self.packed.between
        assert isinstance(between, Packed)
        rows = between.gathered.view(self.nodes, -1)
        elements = rows[:, : rows.shape[1] - self.tail_elements]
        if self._sparse:
            message.own.view(self.nodes, -1).copy_(elements)
        else:
            self._add(elements, message.own.zero_())
        if self._tail is not None:
            tails = rows[:, -self.tail_elements :].contiguous().view(torch.float32)
            self._tail.copy_(tails.sum(dim=0))

    def _add(self, rows: Tensor, sums: Tensor) -> None:
        """Add selected elements to a shard, node after node: the order of summation is the same everywhere."""
        words = self.compressor.k * self.feedback.dtype.itemsize // WORD_BYTES
        values = rows[:, :words].contiguous().view(self.feedback.dtype)
        for node in range(self.nodes):
            sums.index_add_(0, rows[node, words:], values[node])

    def unpack(self) -> Tensor:
        """See `CompressedBucket.unpack`."""
        feedback, message = self.feedback, self.packed
        shards = message.whole.view(self.parts, -1)
        if self._sparse:
            even = self.parts * self.share == self.elements
            sums = feedback.room().zero_() if even else feedback.residual.new_zeros(self.parts * self.share)
            for part in range(self.parts):
                place = sums[part * self.share : (part + 1) * self.share]
                self._add(shards[part].view(self.nodes, -1), place)
            feedback.give(sums if even else sums[: self.elements])
        else:
            feedback.give(message.whole[: self.elements])
        return feedback.finite()
