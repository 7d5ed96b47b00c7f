"""The buckets of a plan with delay: gradients are pushed to the owners of the global weights, and nobody waits.

    bucket complete   ─▶ its push of the step before has ended; its gradients are copied and leave
    end of backward   ─▶ `.grad`s are this rank's own; behind the last push travels what all ranks have to know of the
                         step, then owners update their shards, and every k-th step the new weights follow
    optimizer.step()  ─▶ `runtime.delay`: weights that were pulled in the step before are waited for

Source: SSD-SGD (Xu et al., arXiv 2012.05396), Algorithms 1 and 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.buckets import BucketBuffer, Slot, UsageFlags
from runtime.collectives.delayed import compare, pull
from runtime.communicator import Communicator, Sent
from runtime.exchange import Exchange
from runtime.layout import make_plain_buckets
from runtime.lossy import all_finite
from runtime.plan import Plan
from runtime.recorder import Recorder
from runtime.shards import Rates, Server
from runtime.staleness import NOTHING

HEAD = 1 + len(NOTHING)
"""Entries of what ranks tell each other, before those of gradients."""
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


@dataclass(eq=False)
class StepEnd:
    """What travels behind a step's last push."""

    server: Server
    rates: Rates
    own: Tensor
    """What the other ranks have to know, float64: whether this rank's gradients are finite, what `Staleness.measure`
    says, and whether each gradient has come."""
    pulled: Pulled | None
    told: Tensor = field(init=False)
    """Every rank's `own`. Shape (ranks, entries)."""

    def phases(self, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """See `Collective.run`."""
        ranks = dist.get_world_size(group)
        self.told = self.own.new_zeros(ranks, self.own.numel())
        yield from compare(self.told.view(-1), self.own, group)
        used = self.told[:, HEAD:].bool().any(dim=0)
        self.server.update(self.rates, self.told[:, 0].bool().all(), used)  # alike on all ranks
        if self.pulled is not None:
            for shards, whole in zip(self.server.shards, self.pulled.whole, strict=True):
                for shard, parts in zip(shards, whole, strict=True):
                    yield from pull(shard, parts, group)


class DelayedExchange(Exchange):
    """Gradients and weights of one plan with delay."""

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        ranks: int,
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
            optimizer: whose groups and momentum the owners take over.
            rates: the hyperparameters of its groups now.
            pulls_at: (step, what all ranks said behind the pushes of the one before) → whether the weights that the
                step leaves are pulled; called once for each step, and alike on all ranks.
            scale: the factor of this rank's losses now.
        """
        super().__init__(plan, parameters, ranks, communicator, recorder, exchanges=True)
        self.server = Server(self.buckets, optimizer, rank, ranks)
        self._rates, self._loss_scale, self._ranks = rates, scale, ranks
        self._scale = 1.0  # `.grad`s stay this rank's own
        self._before: dict[int, Sent] = {}
        """Of each bucket, its last push."""
        self._finite: list[Tensor] = []
        self.finite = torch.tensor(True)
        """Whether this rank's gradients of the last step are (0-d)."""
        self.words = NOTHING
        """What this rank tells the others behind its next push, beside whether its gradients are finite."""
        self._end: StepEnd | None = None
        """What travels behind the last step's pushes."""
        self.told: Tensor | None = None
        """What all ranks said behind an earlier step's. Shape (ranks, entries)."""
        self._pulls_at = pulls_at
        self.step = 0
        """Number of the next step to push."""
        self.pulls: deque[Pulled] = deque()
        """The last ones, until a local update takes them."""
        self._spare: list[list[list[Tensor]]] = []

    def _lay_out(
        self, parameters: Mapping[str, nn.Parameter], ranks: int
    ) -> tuple[list[Slot], list[BucketBuffer], UsageFlags | None]:
        """Nothing behind the gradients."""
        slots, buckets = make_plain_buckets(self.plan, parameters)
        return slots, buckets, None

    def _launch(self, bucket: BucketBuffer) -> None:
        before = self._before.get(bucket.index)
        if before is not None:
            self.communicator.wait(before)  # a rank that computes faster than the network carries stops here
        scale = 1.0 / (self._ranks * self._loss_scale())
        shards = self.server.shards[bucket.index]
        for shard in shards:
            shard.pack(scale)
            self._finite.append(all_finite(shard.pushed))
        last = bucket.index == len(self.buckets) - 1
        bucket.sends = [*shards, self._step_end()] if last else list(shards)
        sent = self._before[bucket.index] = self._recorder.sent(bucket.index)
        if last:
            self._note(bucket.sends[-1], sent)
        self.communicator.launch(bucket, sent)
        self._next += 1

    def _step_end(self) -> StepEnd:
        finite = torch.stack(self._finite).all()
        self._finite.clear()
        touched = [float(slot.touched) for slot in self.slots]
        own = torch.tensor([0.0, *self.words, *touched], dtype=torch.float64).to(finite.device)
        own[0], self.words, self.finite = finite, NOTHING, finite
        if self._end is not None:
            self.told = self._end.told  # its bucket's push has ended
        pulls = self._pulls_at(self.step, None if self.told is None else self.told[:, 1:HEAD])
        pulled = Pulled(self.step, Sent(), self._take_spare()) if pulls else None
        return StepEnd(self.server, self._rates(), own, pulled)

    def _note(self, end: StepEnd, sent: Sent) -> None:
        self._end = end
        if end.pulled is not None:
            end.pulled.sent = sent
            self.pulls.append(end.pulled)
            if len(self.pulls) > KEPT_PULLS:  # nobody has taken it: optimizer's steps were left out
                self.give_back(self.pulls.popleft())
        self.step += 1

    def _take_spare(self) -> list[list[Tensor]]:
        """Memory for all weights that nothing on its way is written to and nobody reads."""
        if self._spare:
            return self._spare.pop()
        return [[torch.zeros_like(shard.pushed) for shard in shards] for shards in self.server.shards]

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
        pulled = Pulled(step, Sent(end=0.0), self._take_spare())
        for name, place in self.weights(pulled.whole).items():
            place.copy_(weights[name])
        self.pulls.append(pulled)

    def give_back(self, pulled: Pulled) -> None:
        """Nobody reads it any more."""
        self._spare.append(pulled.whole)

    def weights(self, whole: list[list[Tensor]]) -> dict[str, Tensor]:
        """Pulled weights by name, in the parameters' shapes."""
        found: dict[str, Tensor] = {}
        for shards, parts in zip(self.server.shards, whole, strict=True):
            for shard, part in zip(shards, parts, strict=True):
                found |= shard.views(part)
        return found

    def finish(self) -> None:
        """The end of backward: the rest leaves, and nothing is waited for."""
        for bucket in self.buckets[self._next :]:
            self._fill_missing(bucket)
            self._launch(bucket)
        self._recorder.end_backward()
        for kept in self._kept:
            kept.give_back()
        self._kept.clear()
        self.untouch()
        self.open = False
        self._recorder.end_step()

    def forget(self) -> None:
        """An exception ended the backward. Where it did so on all ranks, what they have pushed is no step of anybody's;
        a rank that goes on alone waits for the others until the deadline.
        """
        self.open = False
        self._kept.clear()
        self._finite.clear()
        self.communicator.wait()
