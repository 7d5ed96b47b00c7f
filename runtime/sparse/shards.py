"""What buckets have in common that are dense inside a node and send less than all between nodes.

Nothing is left out inside a node, so the residual is the node's: each rank keeps a residual of its shard of the
node's sum, and the sum over ranks is again what training has yet to see. What a rank takes over that belongs to other
ranks' shards (from a plan with other buckets, or another number of ranks) is sent with its next gradients, inside the
node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from runtime.comm.collectives.direct import Narrowed, Packed
from runtime.comm.collectives.phases import bounds, share_of
from runtime.comm.collectives.shards import Shard
from runtime.core.buckets import BucketBuffer
from runtime.sparse.compressed import BucketResidual


class ShardResidual(BucketResidual):
    """A bucket's gradients, and what of this rank's shard of the node's sum has not been sent yet."""

    def __init__(self, bucket: BucketBuffer, parts: int, part: int) -> None:
        """Divide the bucket into as many parts as the node has ranks; this rank has number `part`."""
        self.elements = sum(slot.parameter.numel() for slot in bucket.slots)
        self.start, self.stop = bounds(self.elements, parts, part)
        super().__init__(bucket, share_of(self.elements, parts))
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


class ShardBucket:
    """What is the same in every such bucket; several nodes of several ranks each."""

    def __init__(self, feedback: BucketResidual, parts: int, part: int, tail: Tensor | None) -> None:
        """`feedback`: a `ShardResidual` where there is a residual. `tail` (float32, small integers) becomes its sum
        over ranks. The node has as many parts as ranks; this one's is number `part`.
        """
        self.feedback, self.parts, self._part, self._tail = feedback, parts, part, tail
        self.elements = sum(feedback.sizes)
        self.share = share_of(self.elements, parts)
        """Elements of a shard; of the last ones some, or all, lie behind the bucket's and stay 0."""
        self.tail_elements = 0 if tail is None else tail.numel()
        self._summed = torch.zeros(self.share, dtype=feedback.dtype, device=feedback.device)
        """This rank's shard of the node's sum; zeros behind the bucket's elements."""
        self._step = 0

    def send(self, between: Packed | Narrowed, own: Tensor) -> Shard:
        """Put the message in place of the bucket's own; of `own`, see `Shard`."""
        start, stop = bounds(self.elements, self.parts, self._part)
        tails = own.new_zeros(self.parts, self.tail_elements, dtype=torch.float32)
        message = Shard(
            vector=self.feedback.gradient().to(self.feedback.dtype),
            received=self._summed.new_zeros(self.parts, stop - start),
            summed=self._summed[: stop - start],
            tail=tails[self._part],
            tails=tails,
            between=between,
            own=own,
            whole=own.new_zeros(self.parts * own.numel()),
            fill=lambda: self.fill(),
            add_nodes=lambda: self.add_nodes(),
        )
        self.feedback.bucket.payload.messages = [message]
        return message

    packed: Shard

    def pack(self, step: int) -> None:
        self._step = step
        vector = self.feedback.gradient().to(self.feedback.dtype)
        pending = self.feedback.pending if isinstance(self.feedback, ShardResidual) else None
        if pending is not None:
            vector += pending  # sums come in its place
        self.packed.vector = vector
        if self._tail is not None:
            self.packed.tail.copy_(self._tail)

    def fill(self) -> None:
        """Choose what is sent of this rank's shard of the node's sum, and of the node's tail."""
        raise NotImplementedError

    def add_nodes(self) -> None:
        """Add up, when every node's part of this shard is here."""
        raise NotImplementedError
