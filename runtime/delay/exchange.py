"""The buckets of a plan with delay: gradients are pushed to the owners of the global weights, and nobody waits.

    bucket complete   ─▶ its push of the step before has ended; its gradients are copied and leave
    end of backward   ─▶ `.grad`s are this worker's own; behind the last push travels what all have to know of the step,
                         then owners update their shards, and every k-th step the new weights follow
    optimizer.step()  ─▶ `runtime.delay.stages`: weights that were pulled in the step before are waited for

A worker is a rank, or a node (`runtime.delay.nodes`): then the end of backward waits for the node's averages.
Source: SSD-SGD (Xu et al., arXiv 2012.05396), Algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.comm.collectives.phases import gather
from runtime.comm.communicator import Communicator
from runtime.comm.parcel import Parcel, Sent
from runtime.comm.topology import Topology
from runtime.core.buckets import BucketBuffer, Slot
from runtime.core.exchange import Exchange
from runtime.core.layout import make_plain_buckets
from runtime.core.usage import UsageFlags
from runtime.delay.nodes import Average, NodeLinks, Spread, averages_of
from runtime.delay.pace import UNTOLD
from runtime.delay.server import Rates, Server, Shard
from runtime.delay.staleness import NOTHING
from runtime.monitor.recorder import Recorder
from runtime.plan import Plan
from runtime.sparse.guard import Watched
from runtime.sparse.lossy import all_finite
from runtime.sparse.residuals import Carried, State

HEAD = 1 + len(NOTHING) + len(UNTOLD)
"""Entries of what workers tell each other, before those of gradients."""
HEAD_BYTES = HEAD * torch.float64.itemsize
KEPT_PULLS = 2
"""With k = 1 the next pull begins before the last one is taken."""


@dataclass(eq=False)
class Pulled:
    """Global weights on their way to this rank, or there."""

    step: int
    """After whose pushes they are the weights."""
    sent: Sent
    whole: list[list[Tensor]]
    """By bucket and message, all parts one after the other."""
    parts: list[list[Tensor]]
    """Likewise, where nodes have several ranks, what comes to this one between nodes."""


@dataclass(eq=False)
class StepEnd:
    """What follows a step's last push, with which has come what all workers said."""

    server: Server
    rates: Rates
    words: Tensor
    """Every worker's, behind the last push. Shape (workers, bytes)."""
    pulled: Pulled | None
    spread: Callable[[Shard, Tensor, Tensor], None]
    """Hands weights that were pulled between nodes to the node's other ranks."""
    told: Tensor | None = None
    """Of every worker whether its gradients were finite, what `Staleness.measure` said, what `Pace.delayed_step` did.
    Shape (workers, HEAD)."""

    def phases(self, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """See `Collective.run`."""
        self.told, used = read_words(self.words)
        self.server.update(self.rates, self.told[:, 0].bool().all(), used)  # alike on all ranks
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
                self.spread(shard, whole, part)


def words_of(head: Tensor, used: Tensor) -> Tensor:
    """What a rank tells the others, as bytes: `head` (float64), and of each gradient whether it has one."""
    return torch.cat([head.view(torch.uint8), used.to(torch.uint8)])


def read_words(words: Tensor) -> tuple[Tensor, Tensor]:
    """(every rank's head, of each gradient whether any rank has one, as bytes behind which there may be more)."""
    heads = words[:, :HEAD_BYTES].contiguous().view(torch.float64)
    return heads, words[:, HEAD_BYTES:].bool().any(dim=0)


class HeldPushes(Carried):
    """What pushes hold back, for the exchange that follows one with a delay."""

    def __init__(self, server: Server) -> None:
        super().__init__(())
        self._server = server

    def state(self) -> State:
        """See `Carried.state`."""
        residuals = self._server.residuals()
        return {"residuals": residuals, "steps": self.steps, "loss_scale": 1.0} if residuals else {}


@dataclass(frozen=True)
class PushedBucket:
    """See `runtime.sparse.guard.Watched`; nobody but the owners has the sums."""

    bucket: BucketBuffer
    shard: Shard

    @property
    def k(self) -> int:
        return self.shard.k

    def sums(self, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """See `Watched`."""
        both = self.shard.held_and_sent()
        dist.all_reduce(both, group=group)
        return both[0], both[1]


class DelayedExchange(Exchange):
    """Gradients and weights of one plan with delay."""

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        topology: Topology,
        communicator: Communicator,
        recorder: Recorder,
        *,
        optimizer: torch.optim.Optimizer,
        rank: int,
        rates: Callable[[], Rates],
        pulls_at: Callable[[int, Tensor | None], bool],
        scale: Callable[[], float],
    ) -> None:
        """Lays out the buckets and takes over the weights, which are the same on all ranks.

        Args:
            topology: whose nodes are the workers.
            communicator: `runtime.delay.nodes.NodeLinks` where nodes have several ranks.
            optimizer: whose groups and momentum the owners take over.
            rates: the hyperparameters of its groups now.
            pulls_at: (step, what all workers said behind the pushes of the one before) → whether the weights that the
                step leaves are pulled; called once for each step, and alike on all ranks.
            scale: the factor of this rank's losses now.
        """
        per_node = topology.per_node
        super().__init__(plan, parameters, topology.count * per_node, communicator, recorder, exchanges=True)
        words_bytes = HEAD_BYTES + len(self.slots)
        self.server = Server(
            self.buckets, optimizer, rank, topology.count * per_node, owners=topology.owners, per_node=per_node,
            compressors=[bucket.compressor for bucket in plan.buckets], words_bytes=words_bytes,
        )  # fmt: skip
        self.carried = HeldPushes(self.server)
        self._links = communicator if isinstance(communicator, NodeLinks) else None
        self._pushes: Communicator = communicator if self._links is None else self._links.between
        self._averages: list[list[Average]] = []
        if per_node > 1:
            self._averages = [averages_of(shards, per_node, words_bytes) for shards in self.server.shards]
        self._rates, self._loss_scale, self._workers = rates, scale, topology.count
        self._scale = 1.0 / per_node  # `.grad`s stay this worker's own
        self._before: dict[int, Sent] = {}
        """Of each bucket, its last push."""
        self._finite: list[Tensor] = []
        self.finite = torch.tensor(True)
        """Whether this worker's gradients of the last step are (0-d)."""
        self._used = torch.zeros(0, dtype=torch.bool)
        """Of each gradient of the last step, whether this worker has one."""
        self.words = NOTHING
        """What this worker tells the others behind its next push, beside whether its gradients are finite."""
        self.pace = UNTOLD
        """Likewise, see `runtime.delay.pace`."""
        self._end: StepEnd | None = None
        """What follows the last step's pushes."""
        self.told: Tensor | None = None
        """What all workers said behind an earlier step's. Shape (workers, entries)."""
        self._pulls_at = pulls_at
        self.step = 0
        """Number of the next step to push."""
        self.pulls: deque[Pulled] = deque()
        """The last ones, until a local update takes them."""
        self._spare: list[Pulled] = []

    def _lay_out(
        self, parameters: Mapping[str, nn.Parameter], ranks: int
    ) -> tuple[list[Slot], list[BucketBuffer], UsageFlags | None]:
        """Nothing behind the gradients."""
        slots, buckets = make_plain_buckets(self.plan, parameters)
        return slots, buckets, None

    def _holds_back(self, bucket: BucketBuffer) -> bool:
        return any(shard.holds_back for shard in self.server.shards[bucket.index])

    def watched(self) -> list[Watched]:
        """See `Exchange.watched`: the pushes that are selected from by magnitude."""
        return [
            PushedBucket(bucket, self.server.shards[bucket.index][0])
            for bucket, planned in zip(self.buckets, self.plan.buckets, strict=True)
            if planned.compressor.name == "topk" and self.server.shards[bucket.index][0].k
        ]

    def push_whole(self, index: int) -> None:
        """From the next step on a bucket pushes everything, and first what it has held back."""
        if index in self._before:
            self._pushes.wait(self._before[index])
        for shard in self.server.shards[index]:
            shard.push_whole()

    def _launch(self, bucket: BucketBuffer) -> None:
        before = self._before.get(bucket.index)
        if before is not None:
            self._pushes.wait(before)  # a rank that computes faster than the network carries stops here
        self._finite += [all_finite(message.flat) for message in bucket.messages]
        sent = self._before[bucket.index] = self._recorder.sent(bucket.index)
        end, head = None, None
        if bucket.index == len(self.buckets) - 1:
            head = self._head()
            end = self._step_end(sent)
            self._used = torch.tensor([slot.touched for slot in self.slots]).to(head.device)
        step, self._next = self.step - (end is not None), self._next + 1
        if self._links is None:
            self._push(bucket, sent, end, words=None if head is None else words_of(head, self._used), step=step)
            return
        averages = self._averages[bucket.index]
        for average in averages:
            average.pack()
        rows = averages[-1].rows
        if head is not None:
            _tell(rows.words(rows.sent), words_of(head, self._used))
        averages[-1].then = partial(self._push_average, bucket, sent, end, step)
        self._links.inside.launch(Parcel(bucket.index, bucket.label, averages), Sent())

    def _push_average(self, bucket: BucketBuffer, sent: Sent, end: StepEnd | None, step: int) -> None:
        """This rank has its part of a bucket's average, and with the last one what the node's other ranks said."""
        words = None
        if end is not None:
            rows = self._averages[bucket.index][-1].rows
            heads, used = read_words(rows.words(rows.received))
            self.finite, self._used = heads[:, 0].bool().all(), used[: len(self.slots)]
            heads[0, 0] = self.finite
            words = words_of(heads[0], self._used)  # how far they are is the same on all of them
        self._push(bucket, sent, end, words, step)

    def _push(self, bucket: BucketBuffer, sent: Sent, end: StepEnd | None, words: Tensor | None, step: int) -> None:
        shards = self.server.shards[bucket.index]
        scale = 1.0 / (self._workers * self._loss_scale())
        for shard in shards:
            shard.pack(scale, all_finite(shard.vector) if shard.holds_back else self.finite, step)
        payloads: list[Any] = list(shards)
        if end is not None and words is not None:
            rows = shards[-1].push.rows
            _tell(rows.words(rows.sent), words)
            end.words = rows.words(rows.received)
            payloads.append(end)
        self._pushes.launch(Parcel(bucket.index, bucket.label, payloads), sent)

    def _head(self) -> Tensor:
        """What the others have to know of this rank's step, without gradients. Shape (HEAD,), float64."""
        self.finite = torch.stack(self._finite).all()
        self._finite.clear()
        head = torch.tensor([0.0, *self.words, *self.pace], dtype=torch.float64).to(self.finite.device)
        head[0], self.words, self.pace = self.finite, NOTHING, UNTOLD
        return head

    def _step_end(self, sent: Sent) -> StepEnd:
        if self._end is not None:
            self.told = self._end.told  # its bucket's push has ended
        pulls = self._pulls_at(self.step, None if self.told is None else self.told[:, 1:HEAD])
        pulled = self._room(self.step, sent) if pulls else None
        self._end = StepEnd(self.server, self._rates(), torch.empty(0), pulled, self._spread)
        if pulled is not None:
            self.pulls.append(pulled)
            if len(self.pulls) > KEPT_PULLS:  # nobody has taken it: optimizer's steps were left out
                self.give_back(self.pulls.popleft())
        self.step += 1
        return self._end

    def _spread(self, shard: Shard, whole: Tensor, part: Tensor) -> None:
        assert self._links is not None
        bucket = shard.message.slots[0].bucket
        self._links.spread.launch(Parcel(bucket.index, bucket.label, [Spread(whole, part)]), Sent())

    def _room(self, step: int, sent: Sent) -> Pulled:
        """Memory for all weights that nothing on its way is written to and nobody reads."""
        if self._spare:
            return replace(self._spare.pop(), step=step, sent=sent)
        whole = [[shard.whole() for shard in shards] for shards in self.server.shards]
        parts = [
            [torch.zeros_like(s.of_node) for s in shards if s.of_node is not None] for shards in self.server.shards
        ]
        return Pulled(step, sent, whole, parts)

    def take(self) -> Pulled | None:
        """The newest pull that a step before the last one began, when it has come; None where there is none.

        `give_back` it when its weights have been read.
        """
        taken = None
        while self.pulls and self.pulls[0].step < self.step - 1:
            if taken is not None:
                self.give_back(taken)
            taken = self.pulls.popleft()
        if taken is not None:
            self.communicator.wait(taken.sent)
        return taken

    def settle(self) -> None:
        """Waits for all that is on its way."""
        self.communicator.wait()
        if self._end is not None:
            self.told = self._end.told

    def put_back(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """A pull that had come before the run was interrupted."""
        pulled = self._room(step, Sent(end=0.0))
        for name, place in self.weights(pulled.whole).items():
            place.copy_(weights[name])
        self.pulls.append(pulled)

    def give_back(self, pulled: Pulled) -> None:
        """Nobody reads it any more."""
        self._spare.append(pulled)

    def weights(self, whole: list[list[Tensor]]) -> dict[str, Tensor]:
        """Pulled weights by name, in the parameters' shapes."""
        found: dict[str, Tensor] = {}
        for shards, parts in zip(self.server.shards, whole, strict=True):
            for shard, part in zip(shards, parts, strict=True):
                found |= shard.views(part)
        return found

    def finish(self) -> None:
        """The end of backward: the rest leaves, and nothing is waited for but the averages of the node."""
        self._launch_rest()
        self._recorder.end_backward()
        if self._links is not None:
            self._links.inside.wait()
        self._settle_used()
        self.untouch()
        self.open = False
        self._recorder.end_step()

    def _settle_used(self) -> None:
        """What came in no backward of this worker keeps its `.grad`."""
        used = self._used.tolist() if self._kept and self._links is not None else None
        for kept in self._kept:
            if used is None or not used[kept.slot.index]:
                kept.give_back()
        self._kept.clear()

    def forget(self) -> None:
        """See `Exchange.forget`; owners leave the step out."""
        if self.open:
            self.give_up()
        self.open = False
        self._kept.clear()
        self._finite.clear()
        self.communicator.wait()

    def give_up(self) -> None:
        """See `Exchange.give_up`: pushes what is not finite, which is no step of anybody's."""
        for bucket in self.buckets[self._next :]:
            for message in bucket.messages:
                message.flat.fill_(math.nan)
            self._launch(bucket)


def _tell(places: Tensor, words: Tensor) -> None:
    """Writes the same words for every peer. Shapes (peers, bytes), (bytes or fewer,)."""
    places[:, : words.numel()] = words
