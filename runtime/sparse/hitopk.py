"""Lossy buckets of HiTopKComm: dense inside a node, the largest elements of each rank's shard between nodes.

Nothing is left out inside a node, so what is held back is the node's: each rank keeps a residual of its shard of the
node's sum, and the sum over ranks is again what training has yet to see. What a rank takes over that belongs to other
ranks' shards (from a plan with other buckets, or another number of ranks) travels with its next gradients, inside the
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
from runtime.sparse.compressors.sparse import SparseCompressor
from runtime.sparse.lossy import Carrier

WORD_BYTES = 4


class ShardCarrier(Carrier):
    """A bucket's gradients, and what of this rank's shard of the node's sum has not travelled yet."""

    def __init__(self, bucket: BucketBuffer, parts: int, part: int) -> None:
        """The bucket is divided into as many parts as the node has ranks; this rank has number `part`."""
        self.parts, self.part = parts, part
        self.elements = sum(slot.parameter.numel() for slot in bucket.slots)
        self.share = share_of(self.elements, parts)
        """Elements of a shard; of the last ones some, or all, lie behind the bucket's and stay 0."""
        self.start, self.stop = bounds(self.elements, parts, part)
        super().__init__(bucket, self.share)
        self.late: Tensor | None = None
        """What belongs to other ranks' shards, and travels with the next gradients. Shape (elements of the bucket,)."""

    def memory(self) -> Iterator[Tensor]:
        """See `Carrier.memory`."""
        yield self.residual
        if self.late is not None:
            yield self.late

    def held_back(self) -> Tensor:
        """See `Carrier.held_back`: zeros outside of this rank's shard, but for what came from elsewhere."""
        whole = self.residual.new_zeros(self.elements)
        whole[self.start : self.stop] = self.residual[: self.stop - self.start]
        return whole if self.late is None else whole.add_(self.late)

    def residuals(self) -> dict[str, Tensor]:
        """See `Carrier.residuals`."""
        return self._by_name(self.held_back())

    def put(self, residuals: Mapping[str, Tensor]) -> None:
        """See `Carrier.put`."""
        whole = self.residual.new_zeros(self.elements)
        for name, part in self._by_name(whole).items():
            if name in residuals:
                part.copy_(residuals[name])
        mine = whole[self.start : self.stop]
        self.residual.zero_()
        self.residual[: mine.numel()] = mine
        mine.zero_()
        self.late = whole if bool(whole.any()) else None

    def commit(self, finite: Tensor) -> None:
        """See `Carrier.commit`."""
        super().commit(finite)
        if self.late is None:
            return
        if finite.device.type != "cpu":
            self.late.masked_fill_(finite, 0.0)  # without waiting for the device
        elif finite:
            self.late = None


class HitopkBucket:
    """See `runtime.sparse.lossy.Lossy`; several nodes of several ranks each."""

    by_magnitude = True

    def __init__(
        self, carrier: ShardCarrier, compressor: SparseCompressor, nodes: int, per_node: int, tail: Tensor | None
    ) -> None:
        """`compressor` selects from a shard. `tail` (float32, small integers) becomes its sum over ranks."""
        self.carrier: ShardCarrier = carrier
        self.nodes, self.per_node = nodes, per_node
        self.compressor, self._tail = compressor, tail
        self.tail_elements = 0 if tail is None else tail.numel()
        self._step = 0
        self.k = min(carrier.elements, per_node * compressor.k)
        self.packed = self._make_shard()
        self.carrier.bucket.parcel.payloads = [self.packed]

    def _make_shard(self) -> Shard:
        carrier, new, words = self.carrier, self.carrier.residual.new_zeros, torch.int32
        selected = self.compressor.k * carrier.dtype.itemsize // WORD_BYTES + self.compressor.k
        self._sparse = self.nodes * selected < carrier.share * carrier.dtype.itemsize // WORD_BYTES
        """Whether the shards' selected elements are fewer bytes than their sums."""
        own = new(self.nodes * selected, dtype=words) if self._sparse else new(carrier.share)
        tails = new(carrier.parts, self.tail_elements, dtype=torch.float32)
        self._summed = new(carrier.share)
        """This rank's shard of the node's sum; zeros behind the bucket's elements."""
        elements = carrier.stop - carrier.start
        return Shard(
            vector=carrier.gradient().to(carrier.dtype),
            received=new(carrier.parts, elements),
            summed=self._summed[:elements],
            tail=tails[carrier.part],
            tails=tails,
            selected=new(selected + self.tail_elements, dtype=words),
            selected_everywhere=new(self.nodes * (selected + self.tail_elements), dtype=words),
            own=own,
            whole=own.new_zeros(carrier.parts * own.numel()),
            select=lambda: self.select(),
            add_nodes=lambda: self.add_nodes(),
        )

    def pack(self, step: int) -> None:
        """See `Lossy.pack`."""
        self._step = step
        vector, late = self.carrier.gradient().to(self.carrier.dtype), self.carrier.late
        if late is not None:
            vector += late  # sums come in its place
        self.packed.vector = vector
        if self._tail is not None:
            self.packed.tail.copy_(self._tail)

    def select(self) -> None:
        """Step 2 of the algorithm, on this rank's shard of the node's sum."""
        message, carrier = self.packed, self.carrier
        values, indices = self.compressor.compress(self._summed, carrier.residual, carrier.following, self._step)
        words = values.view(torch.int32)
        message.selected[: words.numel()] = words
        message.selected[words.numel() : words.numel() + indices.numel()] = indices
        if self._tail is not None:
            message.selected[-self.tail_elements :] = message.tails.sum(dim=0).view(torch.int32)

    def add_nodes(self) -> None:
        """After step 3: every node's part of this shard is here."""
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
        """Adds selected elements to a shard, node after node: the order of summation is the same everywhere."""
        words = self.compressor.k * self.carrier.dtype.itemsize // WORD_BYTES
        values = rows[:, :words].contiguous().view(self.carrier.dtype)
        for node in range(self.nodes):
            sums.index_add_(0, rows[node, words:], values[node])

    def unpack(self) -> Tensor:
        """See `Lossy.unpack`."""
        carrier, message = self.carrier, self.packed
        shards = message.whole.view(self.per_node, -1)
        if self._sparse:
            even = self.per_node * carrier.share == carrier.elements
            sums = carrier.zeros() if even else carrier.residual.new_zeros(self.per_node * carrier.share)
            for part in range(self.per_node):
                place = sums[part * carrier.share : (part + 1) * carrier.share]
                self._add(shards[part].view(self.nodes, -1), place)
            carrier.give(sums if even else sums[: carrier.elements])
        else:
            carrier.give(message.whole[: carrier.elements])
        return carrier.finite()
