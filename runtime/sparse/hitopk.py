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
import torch.distributed as dist
from torch import Tensor

from runtime.comm.collectives.phases import Scatter, add_up, bounds, exchange, share_of
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
        """See `Lossy.commit`."""
        super().commit(finite)
        if self.late is None:
            return
        if finite.device.type != "cpu":
            self.late.masked_fill_(finite, 0.0)  # without waiting for the device
        elif finite:
            self.late = None


class Shard:
    """What a bucket gives to HiTopKComm, and the memory for what comes back."""

    def __init__(self, bucket: HitopkBucket) -> None:
        carrier, tail = bucket.carrier, bucket.tail_elements
        self._bucket = bucket
        self.scatter: Scatter | None = None
        """This rank's gradients, and its shard of those of the node's other ranks."""
        new = carrier.residual.new_zeros
        self.tails = torch.zeros(carrier.parts, tail, dtype=torch.float32, device=carrier.device)
        """What travels behind the gradients, of every rank of the node."""
        self.summed = new(carrier.share)
        """This rank's shard of the node's sum."""
        words = bucket.compressor.k * carrier.dtype.itemsize // WORD_BYTES + bucket.compressor.k + tail
        self.selected = torch.zeros(words, dtype=torch.int32, device=carrier.device)
        """Values, indices within the shard, and the tail, as words of four bytes."""
        self.selected_everywhere = self.selected.new_zeros(bucket.nodes * words)
        """Every node's."""
        selected_words = bucket.nodes * (words - tail)
        self.sparse = selected_words < carrier.share * carrier.dtype.itemsize // WORD_BYTES
        """Whether the shards' selected elements are fewer bytes than their sums."""
        self.own = self.selected.new_zeros(selected_words) if self.sparse else new(carrier.share)
        """What the ranks of the node need of this shard: the elements selected on all nodes, or their sum."""
        self.whole = self.own.new_zeros(carrier.parts * self.own.numel())
        """Every shard's."""

    def give(self, vector: Tensor) -> None:
        """What this rank's gradients are, 1-D; they may be changed."""
        if self.scatter is None or self.scatter.vector is not vector:
            self.scatter = Scatter(vector, self._bucket.carrier.parts, self._bucket.carrier.part)

    def operations(self, group: dist.ProcessGroup) -> list[dist.P2POp]:
        """What ranks of the node send each other."""
        if self.scatter is None:  # before the first step
            self.give(self._bucket.carrier.gradient())
        assert self.scatter is not None
        operations, mine = self.scatter.operations(group), self._bucket.carrier.part
        for peer, tail in enumerate(self.tails):
            if peer != mine:
                operations += exchange(self.tails[mine], tail, peer, group)
        return operations

    def select(self) -> None:
        """The node's gradients have come: adds them up, and selects what travels between nodes."""
        self._bucket.select()

    def add_nodes(self) -> None:
        """The elements selected on all nodes have come: prepares what the ranks of the node need of them."""
        self._bucket.add_nodes()


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
        self.packed = Shard(self)
        self.carrier.bucket.parcel.payloads = [self.packed]

    def pack(self, step: int) -> None:
        """See `Lossy.pack`."""
        self._step = step
        vector, late = self.carrier.gradient().to(self.carrier.dtype), self.carrier.late
        if late is not None:
            vector += late  # sums come in its place
        self.packed.give(vector)
        if self._tail is not None:
            self.packed.tails[self.carrier.part] = self._tail

    def select(self) -> None:
        """Step 2 of the algorithm, on this rank's shard of the node's sum."""
        message, carrier = self.packed, self.carrier
        assert message.scatter is not None
        add_up(message.scatter.rows, message.summed[: carrier.stop - carrier.start])
        values, indices = self.compressor.compress(message.summed, carrier.residual, carrier.following, self._step)
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
        if message.sparse:
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
        if message.sparse:
            even = self.per_node * carrier.share == carrier.elements
            sums = carrier.zeros() if even else carrier.residual.new_zeros(self.per_node * carrier.share)
            for part in range(self.per_node):
                place = sums[part * carrier.share : (part + 1) * carrier.share]
                self._add(shards[part].view(self.nodes, -1), place)
            carrier.give(sums if even else sums[: carrier.elements])
        else:
            carrier.give(message.whole[: carrier.elements])
        return carrier.finite()

    def commit(self, finite: Tensor) -> None:
        """See `Lossy.commit`."""
        self.carrier.commit(finite)
