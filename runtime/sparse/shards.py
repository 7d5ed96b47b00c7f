"""Buckets that are dense inside a node and send less than all between nodes, by any codec.

HiTopKComm sends the largest elements of each rank's shard between nodes (CommLib: Shi et al., MLSys 2021, Algorithm 2;
here with error feedback), a 2D torus with `wire` (links "inter") all elements in fewer bytes.

Nothing is left out inside a node, so the residual is the node's: each rank keeps a residual of its shard of the
node's sum, and the sum over ranks is again what training has yet to see. Residuals that belong to other ranks' shards
(of a plan with other buckets, or another number of ranks) are sent with the next gradients, inside the node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from runtime.comm.collectives.phases import bounds, share_of
from runtime.comm.collectives.shards import Shard
from runtime.comm.topology import Topology
from runtime.core.buckets import BucketBuffer
from runtime.sparse.compressed import BucketResidual, CompressedBucket, Encoding
from runtime.sparse.selection import Selection


class ShardResidual(BucketResidual):
    """A bucket's gradients, and what of this rank's shard of the node's sum has not been sent yet."""

    def __init__(self, bucket: BucketBuffer, parts: int, part: int) -> None:
        """Divide the bucket into as many parts as the node has ranks; this rank has number `part`."""
        self.elements = sum(slot.parameter.numel() for slot in bucket.slots)
        self.start, self.stop = bounds(self.elements, parts, part)
        super().__init__(bucket, share_of(self.elements, parts))

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


class ShardBucket(CompressedBucket):
    """A bucket of several nodes of several ranks each, of which each rank encodes its shard of the node's sum."""

    def __init__(
        self, feedback: BucketResidual, encoding: Encoding, topology: Topology, rank: int, tail: Tensor | None
    ) -> None:
        """Put the message in place of the bucket's own; see `CompressedBucket`.

        Args:
            feedback: of the bucket; a `ShardResidual`, if there is a residual.
            encoding: of this rank's shard, to the ranks of its cross-node group.
            topology: the nodes.
            rank: this rank.
            tail: float32, small integers; becomes its sum over ranks.
        """
        self._parts, place = topology.ranks_per_node, topology.local_rank(rank)
        self._elements, self._step = sum(feedback.sizes), 0
        self._share = share_of(self._elements, self._parts)
        """Elements of a shard; of the last ones some, or all, lie behind the bucket's and stay 0."""
        super().__init__(feedback, encoding, tail, min(self._elements, self._parts * encoding.k))
        start, stop = bounds(self._elements, self._parts, place)
        self._summed = torch.zeros(self._share, dtype=feedback.dtype, device=feedback.device)
        """This rank's shard of the node's sum; zeros behind the bucket's elements."""
        own = self.make_own()
        tails = own.new_zeros(self._parts, 0 if tail is None else tail.numel(), dtype=torch.float32)
        self.send(Shard(
            vector=feedback.gradient().to(feedback.dtype),
            received=self._summed.new_zeros(self._parts, stop - start),
            summed=self._summed[: stop - start],
            tail=tails[place],
            tails=tails,
            between=encoding.message,
            own=own,
            whole=own.new_zeros(self._parts * own.numel()),
            fill=lambda: self.fill(),
            add_nodes=lambda: self.add_nodes(),
        ))  # fmt: skip

    def make_own(self) -> Tensor:
        """Return memory for what other ranks of the node need of this shard; see `Shard.own`. 1-D."""
        return torch.zeros_like(self._summed)

    def pack(self, step: int) -> None:
        """Hand over the gradients and pending residuals; see `CompressedBucket.pack`."""
        self._step, gradient = step, self.feedback.gradient()
        if self.watched is not None:
            self.watched.keep(gradient, self.feedback.unsent, step)
        vector = gradient.to(self.feedback.dtype)
        if self.feedback.pending is not None:
            vector += self.feedback.pending  # sums come in its place
        self.packed.vector = vector
        if self.tail is not None:
            self.packed.tail.copy_(self.tail)

    def fill(self) -> None:
        """Encode this rank's shard of the node's sum, and the node's tail."""
        tail = None if self.tail is None else self.packed.tails.sum(dim=0)
        self.encoding.encode(self._summed, tail, self._step)

    def add_nodes(self) -> None:
        """Add up every node's part of this shard."""
        self.encoding.decode(self.packed.own, self.tail)

    def unpack(self) -> Tensor:
        """Take the gathered shards; see `CompressedBucket.unpack`."""
        return self.take(self.packed.whole[: self._elements])


class SelectedShardBucket(ShardBucket):
    """A `ShardBucket` whose nodes gather all nodes' selected elements: they are fewer bytes than the shards' sums."""

    encoding: Selection

    @classmethod
    def pays(cls, encoding: Encoding, feedback: BucketResidual, nodes: int) -> bool:
        """Return whether the shard's selected elements, if any are, are fewer bytes than its sum."""
        return isinstance(encoding, Selection) and 4 * nodes * encoding.words < feedback.residual.nbytes

    def make_own(self) -> Tensor:
        return torch.zeros_like(self.encoding.rows()).view(-1)

    def add_nodes(self) -> None:
        """Pass every node's selected elements on."""
        rows = self.encoding.rows()
        self.packed.own.view_as(rows).copy_(rows)
        self.encoding.decode_tail(self.tail)

    def unpack(self) -> Tensor:
        """Take the gathered shards; see `CompressedBucket.unpack`."""
        feedback, even = self.feedback, self._parts * self._share == self._elements
        sums = feedback.room() if even else feedback.residual.new_empty(self._parts * self._share)
        rows = self.packed.whole.view(self._parts, *self.encoding.rows().shape)
        for part, place in zip(rows, sums.split(self._share), strict=True):
            self.encoding.add_up(part, place)
        return self.take(sums if even else sums[: self._elements])
