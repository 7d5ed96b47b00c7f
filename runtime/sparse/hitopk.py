"""Lossy buckets of HiTopKComm: dense inside a node, the largest elements of each rank's shard between nodes.

Nothing is left out inside a node, so the residual is the node's: each rank keeps a residual of its shard of the
node's sum, and the sum over ranks is again what training has yet to see. What a rank takes over that belongs to other
ranks' shards (from a plan with other buckets, or another number of ranks) is sent with its next gradients, inside the
node.

Source: CommLib (Shi et al., MLSys 2021), Algorithm 2, here with error feedback.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from runtime.comm.collectives.hitopk import Shard
from runtime.comm.collectives.phases import bounds, share_of
from runtime.core.buckets import BucketBuffer
from runtime.sparse.compressed import BucketResidual
from runtime.sparse.compressors.sparse import SparseCompressor
from runtime.sparse.samples import Selecting

WORD_BYTES = 4


class ShardResidual(BucketResidual):
    """A bucket's gradients, and what of this rank's shard of the node's sum has not been sent yet."""

    def __init__(self, bucket: BucketBuffer, parts: int, part: int) -> None:
        """Divide the bucket into as many parts as the node has ranks; this rank has number `part`."""
        self.parts, self.part = parts, part
        self.elements = sum(slot.parameter.numel() for slot in bucket.slots)
        self.share = share_of(self.elements, parts)
        """Elements of a shard; of the last ones some, or all, lie behind the bucket's and stay 0."""
        self.start, self.stop = bounds(self.elements, parts, part)
        super().__init__(bucket, self.share)
        self.pending: Tensor | None = None
        """What belongs to other ranks' shards, and is sent with the next gradients. Shape (elements of the bucket,)."""

    def memory(self) -> Iterator[Tensor]:
        yield self.residual
        if self.pending is not None:
            yield self.pending

    def unsent(self) -> Tensor:
        # Zeros outside of this rank's shard, but for what came from elsewhere.
        whole = self.residual.new_zeros(self.elements)
        whole[self.start : self.stop] = self.residual[: self.stop - self.start]
        return whole if self.pending is None else whole.add_(self.pending)

    def residuals(self) -> dict[str, Tensor]:
        return self._by_name(self.unsent())

    def put(self, residuals: Mapping[str, Tensor]) -> None:
        whole = self.residual.new_zeros(self.elements)
        for name, part in self._by_name(whole).items():
            if name in residuals:
                part.copy_(residuals[name])
        mine = whole[self.start : self.stop]
        self.residual.zero_()
        self.residual[: mine.numel()] = mine
        mine.zero_()
        self.pending = whole if bool(whole.any()) else None

    def commit(self, finite: Tensor) -> None:
        super().commit(finite)
        if self.pending is None:
            return
        # On a device the memory stays, for the host does not know yet whether it is needed.
        if finite.device.type != "cpu":
            self.pending.masked_fill_(finite, 0.0)
        elif finite:
            self.pending = None


class HitopkBucket:
    """See `runtime.sparse.compressed.CompressedBucket`; several nodes of several ranks each."""

    def __init__(
        self, feedback: ShardResidual, compressor: SparseCompressor, nodes: int, ranks_per_node: int,
        tail: Tensor | None,
    ) -> None:  # fmt: skip
        """`compressor` selects from a shard. `tail` (float32, small integers) becomes its sum over ranks."""
        self.feedback: ShardResidual = feedback
        self.nodes, self.ranks_per_node = nodes, ranks_per_node
        self.compressor, self._tail = compressor, tail
        self.tail_elements = 0 if tail is None else tail.numel()
        self._step = 0
        self.k = min(feedback.elements, ranks_per_node * compressor.k)
        self.watched = Selecting(feedback.bucket, self.k, feedback.summed)
        new, words = feedback.residual.new_zeros, torch.int32
        selected = compressor.k * feedback.dtype.itemsize // WORD_BYTES + compressor.k
        self._sparse = nodes * selected < feedback.share * feedback.dtype.itemsize // WORD_BYTES
        """Whether the shards' selected elements are fewer bytes than their sums."""
        own = new(nodes * selected, dtype=words) if self._sparse else new(feedback.share)
        tails = new(feedback.parts, self.tail_elements, dtype=torch.float32)
        self._summed = new(feedback.share)
        """This rank's shard of the node's sum; zeros behind the bucket's elements."""
        elements = feedback.stop - feedback.start
        self.packed = Shard(
            vector=feedback.gradient().to(feedback.dtype),
            received=new(feedback.parts, elements),
            summed=self._summed[:elements],
            tail=tails[feedback.part],
            tails=tails,
            selected=new(selected + self.tail_elements, dtype=words),
            selected_everywhere=new(nodes * (selected + self.tail_elements), dtype=words),
            own=own,
            whole=own.new_zeros(feedback.parts * own.numel()),
            select=lambda: self.select(),
            add_nodes=lambda: self.add_nodes(),
        )
        feedback.bucket.payload.messages = [self.packed]

    def pack(self, step: int) -> None:
        self._step = step
        vector, pending = self.feedback.gradient().to(self.feedback.dtype), self.feedback.pending
        if pending is not None:
            vector += pending  # sums come in its place
        self.packed.vector = vector
        if self._tail is not None:
            self.packed.tail.copy_(self._tail)

    def select(self) -> None:
        """Do step 2 of the algorithm, on this rank's shard of the node's sum."""
        message, feedback = self.packed, self.feedback
        values, indices = self.compressor.compress(self._summed, feedback.residual, feedback.following, self._step)
        words = values.view(torch.int32)
        message.selected[: words.numel()] = words
        message.selected[words.numel() : words.numel() + indices.numel()] = indices
        if self._tail is not None:
            message.selected[-self.tail_elements :] = message.tails.sum(dim=0).view(torch.int32)

    def add_nodes(self) -> None:
        """Add up after step 3, when every node's part of this shard is here."""
        message = self.packed
        rows = message.selected_everywhere.view(self.nodes, -1)
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
        feedback, message = self.feedback, self.packed
        shards = message.whole.view(self.ranks_per_node, -1)
        if self._sparse:
            even = self.ranks_per_node * feedback.share == feedback.elements
            sums = (
                feedback.room().zero_() if even else feedback.residual.new_zeros(self.ranks_per_node * feedback.share)
            )
            for part in range(self.ranks_per_node):
                place = sums[part * feedback.share : (part + 1) * feedback.share]
                self._add(shards[part].view(self.nodes, -1), place)
            feedback.give(sums if even else sums[: feedback.elements])
        else:
            feedback.give(message.whole[: feedback.elements])
        return feedback.finite()
