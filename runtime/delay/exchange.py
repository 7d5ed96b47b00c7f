"""The buckets of a plan with delay: gradients are pushed to the owners of the global weights, and no rank waits.

    bucket complete   ─▶ its push of the step before has ended; its gradients are copied and leave
    end of backward   ─▶ `.grad`s are this worker's own; behind the last push is sent what all have to know of the step,
                         then owners update their shards, and every k-th step the new weights follow
    optimizer.step()  ─▶ `runtime.delay.delayed`: weights that were pulled in the step before are waited for

A worker is a rank, or a node (`runtime.delay.nodes`): then the end of backward waits for the node's averages.
Source: SSD-SGD (Xu et al., arXiv 2012.05396), Algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.collectives.phases import gather
from runtime.comm.communicator import CommTiming, Communicator, Payload
from runtime.comm.topology import Topology
from runtime.core.buckets import BucketBuffer, SavedGrad
from runtime.core.exchange import ErrorFeedback, Launcher
from runtime.core.usage import used_on_any
from runtime.delay.nodes import IntraNodeAllReduce, IntraNodeBroadcast, NodeLinks
from runtime.delay.pushes import NarrowedPush
from runtime.delay.server import Rates, Server, rates_of
from runtime.modes.distance_guard import NO_DISTANCE
from runtime.monitor.pace import NO_TIMING
from runtime.monitor.recorder import Recorder
from runtime.plan import CompressorSpec, Plan
from runtime.sparse.compressed import all_finite
from runtime.sparse.samples import Selecting, Watched
from runtime.torch_compat import queued_to

HEAD = 1 + len(NO_DISTANCE) + len(NO_TIMING)
"""Entries of the metadata that workers send each other, before those of gradients."""
HEAD_BYTES = HEAD * torch.float64.itemsize
KEPT_PULLS = 2
"""Number of pulls in flight: with k = 1 the next one begins before the last one is taken."""


@dataclass(eq=False)
class PendingPull:
    """Global weights in flight to this rank, or there."""

    step: int
    """Step after whose pushes they are the weights."""
    sent: CommTiming
    whole: list[list[Tensor]]
    """All parts of the weights, one after the other, by bucket and message."""
    parts: list[list[Tensor]]
    """Parts that come to this rank between nodes, by bucket and message, if nodes have several ranks."""


@dataclass(eq=False)
class StepEpilogue:
    """The end of a step, after its last push, which brought all workers' metadata."""

    server: Server
    rates: Rates
    metadata: Tensor
    """Every worker's, behind the last push. Shape (workers, bytes)."""
    pulled: PendingPull | None
    links: NodeLinks | None
    """Hands weights that were pulled between nodes to the node's other ranks."""
    reported: Tensor | None = None
    """Every worker's head: whether its gradients were finite, then the results of `DistanceGuard.measure` and of
    `Pace.delayed_step`. Shape (workers, HEAD)."""

    def phases(self, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        self.reported, used = unpack_metadata(self.metadata)
        self.server.update(self.rates, self.reported[:, 0].bool().all(), used)  # alike on all ranks
        if self.pulled is None:
            return
        for index, shards in enumerate(self.server.shards):
            for number, shard in enumerate(shards):
                whole = self.pulled.whole[index][number]
                if shard.of_node is None:
                    yield from gather(whole, shard.weights, group)
                    continue
                part = self.pulled.parts[index][number]
                yield from gather(part, shard.weights, group)
                assert self.links is not None
                bucket = shard.message.slots[0].bucket
                self.links.spread.launch(
                    Payload(bucket.index, bucket.label, [IntraNodeBroadcast(whole, part)]), CommTiming()
                )


def pack_metadata(head: Tensor, used: Tensor) -> Tensor:
    """Return what a rank reports to the others, as bytes: `head` (float64), and of each gradient whether it has one."""
    return torch.cat([head.view(torch.uint8), used.to(torch.uint8)])


def unpack_metadata(metadata: Tensor) -> tuple[Tensor, Tensor]:
    """Return (every rank's head, of each gradient whether any rank has one); bytes behind these do not count."""
    heads = metadata[:, :HEAD_BYTES].contiguous().view(torch.float64)
    return heads, used_on_any(metadata[:, HEAD_BYTES:])


class PushResiduals(ErrorFeedback):
    """The residuals of pushes, for the exchange that follows one with a delay."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def compresses(self, bucket: BucketBuffer) -> bool:
        return any(shard.compresses for shard in self._server.shards[bucket.index])

    def watched(self) -> list[Watched]:
        """See `ErrorFeedback.watched`: the pushes that are selected from by magnitude, or narrow."""
        pushed = [shards[0] for shards in self._server.shards]
        found: list[Watched] = [
            Selecting(shard.message.slots[0].bucket, shard.k, shard.sums)
            for shard in pushed
            if shard.by_magnitude and shard.k
        ]
        narrow = (shard.push for shard in pushed if shard.numel)
        return found + [push.watched for push in narrow if isinstance(push, NarrowedPush) and push.watched is not None]

    def state(self) -> dict[str, Any]:
        residuals = self._server.residuals()
        return {"residuals": residuals, "steps": self.steps, "loss_scale": 1.0} if residuals else {}


class Pushes(Launcher):
    """The `Launcher` of delayed ranks: sends buckets as pushes, and receives pulls."""

    def __init__(
        self,
        plan: Plan,
        buckets: Sequence[BucketBuffer],
        topology: Topology,
        communicator: Communicator,
        recorder: Recorder,
        *,
        optimizer: torch.optim.Optimizer,
        rank: int,
        pulls_at: Callable[[int, Tensor | None], bool],
        loss_scale: Callable[[], float],
    ) -> None:
        """Take over the weights, which are the same on all ranks.

        Args:
            buckets: with nothing behind the gradients.
            topology: whose nodes are the workers.
            communicator: `runtime.delay.nodes.NodeLinks` where nodes have several ranks.
            optimizer: whose groups and momentum the owners take over.
            pulls_at: (step, what all workers said behind the pushes of the one before) → whether the weights that the
                step leaves are pulled; called once for each step, and alike on all ranks.
            loss_scale: the factor of this rank's losses now.
        """
        ranks_per_node = topology.ranks_per_node
        self.buckets, self.communicator, self._recorder = buckets, communicator, recorder
        self.scale = 1.0 / ranks_per_node
        """Factor of gradients: `.grad`s stay this worker's own."""
        self._slots = [slot for bucket in buckets for slot in bucket.slots]
        metadata_bytes = HEAD_BYTES + len(self._slots)
        self.server = Server(
            buckets, optimizer, rank, topology, [bucket.compressor for bucket in plan.buckets], metadata_bytes
        )  # fmt: skip
        self._links = communicator if isinstance(communicator, NodeLinks) else None
        self._between: Communicator = communicator if self._links is None else self._links.between
        self._averages: list[list[IntraNodeAllReduce]] = []
        if ranks_per_node > 1:
            self._averages = [
                [IntraNodeAllReduce(one, ranks_per_node, metadata_bytes if one is shards[-1] else 0) for one in shards]
                for shards in self.server.shards
            ]
            """All-reduces inside the node, by bucket and message."""
        self._optimizer, self._loss_scale, self._workers = optimizer, loss_scale, topology.num_nodes
        self._before: dict[int, CommTiming] = {}
        self._finite: list[Tensor] = []
        self.finite = torch.tensor(True)
        """Whether this worker's gradients of the last step are finite. Scalar."""
        self._used = torch.zeros(0, dtype=torch.bool)
        """Flag of each gradient of the last step: whether this worker has one."""
        self.distance = NO_DISTANCE
        """Result of `DistanceGuard.measure` since the last push, for the metadata behind the next one."""
        self.pace = NO_TIMING
        """Result of `Pace.delayed_step`, for the metadata behind the next push."""
        self._end: StepEpilogue | None = None
        self.reported: Tensor | None = None
        """Heads that all workers sent behind an earlier step's pushes. Shape (workers, entries)."""
        self._pulls_at = pulls_at
        self.step = 0
        self.pulls: deque[PendingPull] = deque()
        """The last pulls, until a local update takes them."""
        self._spare: list[PendingPull] = []

    def push_as(self, index: int, compressor: CompressorSpec) -> None:
        """Let a bucket push so from the next step on, and its residual with it; nothing is selected from it then."""
        if index in self._before:
            self._between.wait(self._before[index])
        for shard in self.server.shards[index]:
            shard.push_as(compressor)

    def launch(self, bucket: BucketBuffer) -> None:
        before = self._before.get(bucket.index)
        if before is not None:
            self._between.wait(before)  # a rank that computes faster than the network carries stops here
        self._finite += [all_finite(message.flat) for message in bucket.messages]
        sent = self._before[bucket.index] = self._recorder.sent(bucket.index)
        end, metadata = None, None
        if bucket.index == len(self.buckets) - 1:
            self.finite = torch.stack(self._finite).all()
            self._finite.clear()
            said = torch.tensor([0.0, *self.distance, *self.pace], dtype=torch.float64)
            head = queued_to(said, self.finite.device)
            head[0], self.distance, self.pace = self.finite, NO_DISTANCE, NO_TIMING
            end = self._end_step(sent)
            self._used = queued_to(torch.tensor([slot.touched for slot in self._slots]), head.device)
            metadata = pack_metadata(head, self._used)
        step = self.step - (end is not None)
        if self._links is None:
            self._push(bucket, sent, end, metadata, step)
            return
        averages = self._averages[bucket.index]
        for average in averages:
            average.pack()
        if metadata is not None:
            averages[-1].rows.put_metadata(metadata)
        averages[-1].then = partial(self._push_average, bucket, sent, end, step)
        self._links.inside.launch(Payload(bucket.index, bucket.label, averages), CommTiming())

    def _push_average(self, bucket: BucketBuffer, sent: CommTiming, end: StepEpilogue | None, step: int) -> None:
        # With the last bucket's average comes what the node's other ranks said.
        metadata = None
        if end is not None:
            rows = self._averages[bucket.index][-1].rows
            heads, used = unpack_metadata(rows.metadata(rows.received))
            self.finite, self._used = heads[:, 0].bool().all(), used[: len(self._slots)]
            heads[0, 0] = self.finite
            metadata = pack_metadata(heads[0], self._used)  # how far they are is the same on all of them
        self._push(bucket, sent, end, metadata, step)

    def _push(
        self, bucket: BucketBuffer, sent: CommTiming, end: StepEpilogue | None, metadata: Tensor | None, step: int
    ) -> None:
        shards = self.server.shards[bucket.index]
        scale = 1.0 / (self._workers * self._loss_scale())
        for shard in shards:
            shard.pack(scale, all_finite(shard.vector) if shard.compresses else self.finite, step)
        messages: list[Any] = list(shards)
        if end is not None and metadata is not None:
            rows = shards[-1].push.rows
            rows.put_metadata(metadata)
            end.metadata = rows.metadata(rows.received)
            messages.append(end)
        self._between.launch(Payload(bucket.index, bucket.label, messages), sent)

    def _end_step(self, sent: CommTiming) -> StepEpilogue:
        """Decide whether the step's weights are pulled, and count it."""
        if self._end is not None:
            self.reported = self._end.reported  # its bucket's push has ended
        pulls = self._pulls_at(self.step, None if self.reported is None else self.reported[:, 1:HEAD])
        pulled = self._room(self.step, sent) if pulls else None
        self._end = StepEpilogue(self.server, rates_of(self._optimizer), torch.empty(0), pulled, self._links)
        if pulled is not None:
            self.pulls.append(pulled)
            if len(self.pulls) > KEPT_PULLS:  # nobody has taken it: optimizer's steps were left out
                self.give_back(self.pulls.popleft())
        self.step += 1
        return self._end

    def _room(self, step: int, sent: CommTiming) -> PendingPull:
        """Return memory for all weights that no message in flight is written to and that is not read."""
        if self._spare:
            return replace(self._spare.pop(), step=step, sent=sent)
        whole = [[shard.whole() for shard in shards] for shards in self.server.shards]
        parts = [
            [torch.zeros_like(s.of_node) for s in shards if s.of_node is not None] for shards in self.server.shards
        ]
        return PendingPull(step, sent, whole, parts)

    def take(self) -> PendingPull | None:
        """Return the newest pull begun before the last step, when it has come, to be given back once read; None where
        there is none.
        """
        taken = None
        while self.pulls and self.pulls[0].step < self.step - 1:
            if taken is not None:
                self.give_back(taken)
            taken = self.pulls.popleft()
        if taken is not None:
            self.communicator.wait(taken.sent)
        return taken

    def come(self) -> None:
        self.communicator.wait()
        if self._end is not None:
            self.reported = self._end.reported

    def put_back(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Restore a pull that had come before the run was interrupted."""
        pulled = self._room(step, CommTiming(end=0.0))
        for name, place in self.weights(pulled.whole).items():
            place.copy_(weights[name])
        self.pulls.append(pulled)

    def give_back(self, pulled: PendingPull) -> None:
        """Reuse the memory of a pull that is no longer read."""
        self._spare.append(pulled)

    def weights(self, whole: list[list[Tensor]]) -> dict[str, Tensor]:
        """Return pulled weights by name, in the parameters' shapes."""
        found: dict[str, Tensor] = {}
        for shards, parts in zip(self.server.shards, whole, strict=True):
            for shard, part in zip(shards, parts, strict=True):
                found |= shard.views(part)
        return found

    def settle(self, missing: Sequence[SavedGrad], *, separate: bool) -> None:
        """Wait for the node's averages alone. What came in no backward of this worker keeps its `.grad`."""
        if self._links is not None:
            self._links.inside.wait()
        used = self._used.tolist() if missing and self._links is not None else None
        for kept in missing:
            if used is None or not used[kept.slot.index]:
                kept.give_back()

    def give_up(self, bucket: BucketBuffer) -> None:
        """Push what is not finite (see `Launcher.give_up`): owners leave such a step out."""
        for message in bucket.messages:
            message.flat.fill_(math.nan)

    def abort_backward(self) -> None:
        self._finite.clear()
