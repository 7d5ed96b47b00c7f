"""The rounds of one fragment: its buckets' messages between workers, and the outer step that they bring.

    launch     ─▶ behind a local step: weights (dense) or pseudo-gradients (compressed) leave for the other workers
    complete   ─▶ all of it has come: the anchor has taken its outer step
    finish     ─▶ `delay_steps` later: the worker's weights are mixed with the new anchor

Source: Streaming DiLoCo (Douillard et al., arXiv 2501.18512), Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.comm.collectives.direct import Factored, Narrowed, Packed
from runtime.comm.collectives.phases import Works, add_up, by_owners
from runtime.comm.communicator import CommTiming, Communicator, Payload
from runtime.comm.world import World
from runtime.core.buckets import BucketBuffer, Message
from runtime.outer.anchors import Anchor
from runtime.plan import OuterOptimizer
from runtime.sparse.compressed import CompressedBucket
from runtime.sparse.narrowing import TwoShots
from runtime.sparse.residuals import ErrorFeedbackState

Parameters = Mapping[str, nn.Parameter]


class BucketRound(Protocol):
    """The rounds of one bucket."""

    anchors: list[Anchor]
    """Anchors of the bucket's messages, in order."""

    def launch(self) -> None:
        """Send this worker's weights, or pseudo-gradients."""

    def complete(self) -> None:
        """Block until the round that was launched last has come, and the anchor has taken its step."""

    def weights(self, *, keep: bool = False) -> dict[str, Tensor]:
        """Return the whole anchor after the last round, by parameter; all workers call this after `complete`.

        Args:
            keep: whether it is asked for once more before the next round.
        """
        ...

    def residuals(self) -> dict[str, Any]:
        """Return the state of error feedback; empty where there is none."""
        ...

    def load(self, residuals: dict[str, Any], *, summed: bool = False) -> None:
        """Continue from `residuals`, or where they are the sum of all workers' from a part of it; the anchors have been
        filled in, and no round is in flight.
        """
        ...


class MeanOfWeights:
    """One message of a dense bucket: weights go to their owners, and new anchors come back."""

    def __init__(self, anchor: Anchor, flat: Tensor, peers: Sequence[int]) -> None:
        """Send a worker's weights.

        Args:
            anchor: this owner's part.
            flat: the weights, shape (ranks · share,); becomes the whole anchor.
            peers: one rank of each worker, this one among them: an owner gets its part from its peers.
        """
        self._anchor, self.flat, self._peers = anchor, flat, peers

    def phases(self, group: dist.ProcessGroup) -> Works:
        anchor, rows = self._anchor, self.flat.view(self._anchor.ranks, -1)
        received = rows.new_empty(len(self._peers), rows.shape[1])

        def own() -> Tensor:
            mean = torch.empty_like(anchor.weights)
            add_up(list(received), mean)
            anchor.step(anchor.weights - mean.div_(len(self._peers)))
            return anchor.weights.to(self.flat.dtype)

        return by_owners(rows, received, own, self.flat, group, self._peers)


class DenseRound:
    """The rounds of a bucket whose weights are sent as they are; messages have memory while they are in flight."""

    def __init__(
        self, bucket: BucketBuffer, parameters: Parameters, optimizer: OuterOptimizer, world: World,
        communicator: Communicator, peers: Sequence[int],
    ) -> None:  # fmt: skip
        """Own a part of the bucket's anchor; `bucket` has the places of its parameters, and its memory is not used.
        `peers`: see `MeanOfWeights`.
        """
        self._bucket, self._parameters, self._world, self._communicator = bucket, parameters, world, communicator
        self._peers = peers
        self.anchors = [Anchor(message, world.rank, world.ranks, optimizer) for message in bucket.messages]
        self._sent = CommTiming()
        self._messages: list[MeanOfWeights] = []

    def launch(self) -> None:
        """Send the bucket; see `BucketRound.launch`."""
        self._sent = CommTiming()
        self._messages = [
            MeanOfWeights(anchor, anchor.flatten(self._parameters, anchor.message.flat.dtype), self._peers)
            for anchor in self.anchors
        ]
        self._communicator.launch(Payload(self._bucket.index, self._bucket.label, self._messages), self._sent)

    def complete(self) -> None:
        """Block until it has come; see `BucketRound.complete`."""
        self._communicator.wait(self._sent)

    def weights(self, *, keep: bool = False) -> dict[str, Tensor]:
        """See `BucketRound.weights`. Where no round has just brought them, parts are gathered: nothing is in flight."""
        wholes = [message.flat for message in self._messages] or [
            self._world.gather_parts(
                anchor.weights.to(anchor.message.flat.dtype), "gathering the weights of the last round"
            )
            for anchor in self.anchors
        ]
        made = [MeanOfWeights(*pair, self._peers) for pair in zip(self.anchors, wholes, strict=True)]
        self._messages = made if keep else []
        return {
            name: view
            for anchor, whole in zip(self.anchors, wholes, strict=True)
            for name, view in anchor.views(whole).items()
        }

    def residuals(self) -> dict[str, Any]:
        return {}

    def load(self, residuals: dict[str, Any], *, summed: bool = False) -> None:
        self._messages = []


class CompressedRound:
    """The rounds of a bucket whose pseudo-gradients are sent encoded, with error feedback."""

    def __init__(
        self, bucket: BucketBuffer, lossy: CompressedBucket, parameters: Parameters, optimizer: OuterOptimizer,
        world: World, communicator: Communicator,
    ) -> None:  # fmt: skip
        """Keep the whole anchor of a bucket of one dtype, whose gradients are pseudo-gradients.

        Where parts of the sum have owners, these take the outer step, and send what it moves the anchor by. Ranks of a
        node that is a worker have the same pseudo-gradients, of whose message each may send a part (`send_once`).
        """
        self._bucket, self._parameters, self._communicator = bucket, parameters, communicator
        self._workers, self._sent, self._lossy = world.ranks, CommTiming(), lossy
        (self._message,) = bucket.messages
        shots = lossy.encoding if isinstance(lossy.encoding, TwoShots) else None
        if shots is None:  # every worker adds up all of it
            anchor = Anchor(self._message, 0, 1, optimizer, whole=True)
        else:
            anchor = Anchor(self._message, world.rank, world.ranks, optimizer, shots.share, whole=True)
            shots.movement = anchor.movement
        self.anchors, self._moves, self._others = [anchor], shots is not None, list[slice]()
        if shots is not None and (peers := shots.message.peers) is not None:
            self._workers = len(peers)
            others = (rank for rank in range(world.ranks) if rank not in peers)
            self._others = [slice(rank * shots.share, (rank + 1) * shots.share) for rank in others]
        self._copies = lossy.packed.copies if isinstance(lossy.packed, Packed | Factored) else 1
        """Number of ranks that have the same message, of which its sums have one."""
        self._views = anchor.views(anchor.weights)
        """The anchor by parameter."""
        self._feedback = ErrorFeedbackState([bucket], {bucket.index: lossy})
        self._hold(held=False)

    def _leave_to_others(self, vector: Tensor) -> None:
        """Make zero what other ranks of this node send in place of this one. Shape (elements,)."""
        for part in self._others:
            vector[part] = 0.0

    def _hold(self, *, held: bool) -> None:
        """Allocate what only a round in flight needs, or free it: pseudo-gradients, the next residual, the message."""
        flat = self._message.flat
        self._message.storage.resize_(flat.numel() * flat.itemsize if held else 0)
        self._lossy.feedback.buffers.hold_following(held=held)
        if isinstance(self._lossy.packed, Narrowed):
            self._lossy.packed.hold(held=held)

    def launch(self) -> None:
        """Send the bucket; see `BucketRound.launch`."""
        self._sent = CommTiming()
        self._hold(held=True)
        for slot in self._bucket.slots:
            place, to = self._views[slot.name], slot.view
            # In place where nothing is rounded in between: memory as large as a fragment costs more than arithmetic.
            apart = torch.sub(place, self._parameters[slot.name], out=to if to.dtype == place.dtype else None)
            to.copy_(apart.div_(self._workers))
        self._leave_to_others(self._message.flat)
        self._feedback.begin()
        self._communicator.launch(self._bucket.payload, self._sent, partial(self._feedback.add_to, self._bucket))

    def complete(self) -> None:
        """Block until it has come; see `BucketRound.complete`."""
        if not self._message.storage.nbytes():
            return  # it has been completed
        self._feedback.settle(lambda _: self._communicator.wait(self._sent))
        (anchor,) = self.anchors
        received = self._message.flat[: anchor.numel].to(anchor.weights.dtype)
        if self._copies > 1:
            received.mul_(self._copies)
        if self._moves:
            anchor.weights.sub_(received)
        else:
            anchor.step(received)
        self._hold(held=False)

    def weights(self, *, keep: bool = False) -> dict[str, Tensor]:
        """Return the anchor; see `BucketRound.weights`."""
        return self._views

    def residuals(self) -> dict[str, Any]:
        return self._feedback.state()

    def load(self, residuals: dict[str, Any], *, summed: bool = False) -> None:
        self._feedback.load_state(residuals, self._parameters)
        if summed:
            self._lossy.feedback.residual.div_(self._workers)
            self._leave_to_others(self._lossy.feedback.residual)


class BufferRound:
    """The mean over workers of the model's floating-point buffers, such as the statistics of BatchNorm, and what each
    worker reports to the others.
    """

    def __init__(self, index: int, world: World, communicator: Communicator, device: torch.device) -> None:
        """`index`: of its message for the communicator; `device`: of the message."""
        self._index, self._world, self._communicator, self._device = index, world, communicator, device
        self._sent = CommTiming()
        self._message: Message | None = None
        self._buffers: list[Tensor] = []

    def launch(self, buffers: Sequence[Tensor], report: Sequence[float]) -> None:
        """Send these buffers, the same ones on all workers, and this worker's figures."""
        self._buffers = floating(buffers)
        rows = torch.zeros(self._world.ranks, len(report), dtype=torch.float64)
        rows[self._world.rank] = torch.tensor(report, dtype=torch.float64)
        means = [buffer.detach().reshape(-1).double() / self._world.ranks for buffer in self._buffers]
        flat = torch.cat([*means, rows.view(-1).to(self._device)])
        self._sent, self._message = CommTiming(), Message(flat, [])
        self._communicator.launch(Payload(self._index, "the mean of buffers", [self._message]), self._sent)

    def finish(self) -> Tensor | None:
        """Block until the mean has come, take it, and return all workers' figures.

        Returns:
            Shape (workers, figures); None where nothing was launched.
        """
        flat, self._message = self.pending(), None
        if flat is None:
            return None
        numels = [buffer.numel() for buffer in self._buffers]
        *parts, rows = flat.split([*numels, len(flat) - sum(numels)])
        for buffer, part in zip(self._buffers, parts, strict=True):
            buffer.data.copy_(part.view(buffer.shape))  # as no change that autograd counts
        figures: Tensor = rows.view(self._world.ranks, -1).cpu()
        return figures

    def pending(self) -> Tensor | None:
        """Block until the mean has come, and return it with the figures, for a checkpoint; None: none was launched."""
        if self._message is None:
            return None
        self._communicator.wait(self._sent)
        return self._message.flat

    def load(self, buffers: Sequence[Tensor], flat: Tensor | None) -> None:
        """Continue from `pending`."""
        self._buffers, self._sent = floating(buffers), CommTiming(end=0.0)
        self._message = None if flat is None else Message(flat, [])


def floating(buffers: Sequence[Tensor]) -> list[Tensor]:
    """Return those that have a mean."""
    return [buffer for buffer in buffers if buffer.is_floating_point()]


def mix_into(weights: Tensor, anchor: Tensor, mix: float) -> None:
    """Make `weights` mix · weights + (1 − mix) · anchor, in place and in the anchor's dtype."""
    own = weights.detach()
    own.copy_(anchor if mix == 0.0 else own.to(anchor.dtype).mul_(mix).add_(anchor, alpha=1.0 - mix))
