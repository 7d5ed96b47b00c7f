"""Elements in fewer bytes (`wire`): added up by ranks in a wider dtype, or by the backend in the wire's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.comm.collectives.direct import Narrowed
from runtime.comm.collectives.phases import share_of
from runtime.core.buckets import Message
from runtime.sparse.compressed import BucketResidual
from runtime.sparse.compressors.magnitudes import seed_of
from runtime.sparse.compressors.wire import Cut, WireCompressor
from runtime.sparse.samples import Rounding


class NarrowEncoder:
    """Encodes this rank's gradients of one bucket, and keeps what encoding loses in their residual."""

    def __init__(self, feedback: BucketResidual, compressor: WireCompressor, cut: Cut, seed: int) -> None:
        """Encode vectors in rows of `cut`; `seed`: of stochastic rounding, another one on each rank."""
        self._feedback, self._compressor, self._cut = feedback, compressor, cut
        self._place = f"{seed}\n{feedback.bucket.slots[0].name}"

    def watched(self, k: int) -> Rounding:
        """Return what samples rounding errors; see `Encoding.watched`."""
        return Rounding(self._feedback.bucket, feedback=self._compressor.error_feedback)

    def encode_rows(self, vector: Tensor, rows: Tensor, step: int) -> None:
        """Fill `rows` (uint8, shape (parts, bytes)) with residual + `vector` (1-D)."""
        by_kernels = self._compressor.runs_on(rows.device, self._cut, vector.dtype)
        kept = self._feedback.of_step(by_kernels=by_kernels)
        self._compressor.compress(vector, kept, rows, self._cut, seed_of(f"sent\n{self._place}", step))


class Peers(NamedTuple):
    """The ranks that add up a vector, and this one among them."""

    ranks: int
    place: int
    """Number of this rank among them, and of the part that it owns."""
    seed: int
    """Another one on each rank of all nodes, for stochastic rounding."""


class TwoShots(NarrowEncoder):
    """`Encoding` in two messages: each rank sends every other one its part; every rank adds up the part that it owns,
    in a wider dtype, and sends the sum, encoded again, to all.

    What either encoding loses stays in the residual, if there is one: what the second one loses, in the owner's.
    """

    def __init__(
        self, feedback: BucketResidual, compressor: WireCompressor, elements: int, peers: Peers, tail_elements: int
    ) -> None:
        """Lay out the message of a vector of `elements`, of each of which `feedback` may have a residual; the tail
        (float32) has `tail_elements` and is sent as it is.
        """
        cut = compressor.cut(elements, peers.ranks, feedback.dtype, share_of(tail_elements, peers.ranks))
        super().__init__(feedback, compressor, cut, peers.seed)
        self.k, self._step, self.share = elements, 0, cut.share
        self.movement: Callable[[Tensor], Tensor] | None = None
        """Function from the sum of an owner's part (1-D) to what is sent in its place; None: the sum. An optimizer in
        it sees each gradient once: the residual of the part is of what was sent, and is added behind it.
        """
        self._mine = slice(*(min(elements, place * cut.share) for place in (peers.place, peers.place + 1)))
        """Part of the vector that this rank owns."""
        self.message = Narrowed(peers.ranks, cut.row_bytes, feedback.device, self._narrow)

    def encode(self, vector: Tensor, tail: Tensor | None, step: int) -> None:
        """Encode all parts; see `Encoding.encode`."""
        rows, self._step = self.message.rows, step
        self.encode_rows(vector, rows, step)
        if tail is not None:
            tails = tail.new_zeros(len(rows) * self._cut.tail)
            tails[: tail.numel()] = tail
            self._cut.tails(rows).copy_(tails.view(len(rows), -1))

    def _narrow(self, received: Tensor, own: Tensor) -> None:
        part, by_kernels = self._mine, self._compressor.runs_on(own.device, self._cut)
        kept = self._feedback.of_step(by_kernels=by_kernels).part(part)
        elements, seed = part.stop - part.start, seed_of(f"summed\n{self._place}", self._step)
        if self.movement is None:
            self._compressor.combine(received, own, kept, self._cut, elements, seed)
        elif elements:
            total = torch.empty(elements, dtype=self._cut.wide, device=own.device)
            self._compressor.add_up(received, total, self._cut)
            self._compressor.compress(self.movement(kept.as_of_step(total)), kept, own, self._cut, seed)
        if self._cut.tail:
            self._cut.tails(own).copy_(self._cut.tails(received).sum(dim=0, keepdim=True))

    def decode(self, sums: Tensor, tail: Tensor | None) -> None:
        """Decode the gathered sums; see `Encoding.decode`."""
        self._compressor.decode(self.message.gathered, sums, self._cut)
        if tail is not None:
            tail.copy_(self._cut.tails(self.message.gathered).reshape(-1)[: tail.numel()])


class NativeSum(NarrowEncoder):
    """`Encoding` that the backend adds up in the wire's dtype, as the tail: what its sums lose, no rank keeps."""

    def __init__(self, feedback: BucketResidual, compressor: WireCompressor, rank: int, tail_elements: int) -> None:
        """Lay out the message; the tail, in the wire's dtype, has `tail_elements`."""
        self.k = sum(feedback.sizes)
        super().__init__(feedback, compressor, compressor.cut(self.k, 1, feedback.dtype), rank)
        self.message = Message(torch.zeros(self.k + tail_elements, dtype=compressor.dtype, device=feedback.device), [])

    def encode(self, vector: Tensor, tail: Tensor | None, step: int) -> None:
        """Encode in the wire's dtype; see `Encoding.encode`."""
        if self.k:
            self.encode_rows(vector, self.message.flat.view(torch.uint8)[None], step)
        if tail is not None:
            self.message.flat[self.k :] = tail

    def decode(self, sums: Tensor, tail: Tensor | None) -> None:
        """Widen the sums; −0 becomes 0, as if elements were selected. See `Encoding.decode`."""
        sums.copy_(self.message.flat[: self.k]).add_(0.0)
        if tail is not None:
            tail.copy_(self.message.flat[self.k :])
