"""The buckets of a plan whose ranks share the optimizer's step: each gets the average of its part of every gradient.

    bucket complete   ─▶ part r of it goes to rank r, which adds up what comes, always in order of rank
    end of backward   ─▶ behind the last bucket ranks tell each other which gradients came on any of them; every `.grad`
                         is a `ShardedGradient`, whose numbers are this rank's part of the bucket
    optimizer.step()  ─▶ `runtime.sharded.step`: updates the part, then weights are gathered

A gradient is scaled and summed as in an all-reduce, so equal orders of summation give equal bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.comm.collectives.phases import add_up, all_to_all, gather
from runtime.comm.collectives.push_pull import PushPull
from runtime.comm.communicator import make_communicator
from runtime.comm.world import World
from runtime.core.buckets import BucketBuffer, Kept, Message, Slot, view_of
from runtime.core.exchange import Exchange
from runtime.core.hooks import GradientHook
from runtime.core.layout import Part, make_plain_buckets
from runtime.core.usage import UsageFlags
from runtime.errors import InputError
from runtime.monitor.recorder import Recorder
from runtime.plan import Plan
from runtime.sharded.gradient import ShardedGradient, whole_norms
from runtime.torch_compat import OUTSIDE, current_backward_id


class Scratch:
    """Memory that every message is received in: they travel one at a time."""

    def __init__(self, messages: Sequence[Message]) -> None:
        device = messages[0].flat.device
        self._bytes = torch.empty(max(m.size_bytes for m in messages), dtype=torch.uint8, device=device)

    def like(self, flat: Tensor) -> Tensor:
        """As much of it as a vector takes, in its dtype."""
        return self._bytes[: flat.numel() * flat.element_size()].view(flat.dtype)


class OwnPart(Part):
    """One message: its gradients, of which this rank's part becomes the average, and its weights."""

    def __init__(self, message: Message, rank: int, ranks: int, scratch: Scratch) -> None:
        """The weights stay where they are until somebody moves them to `whole`."""
        super().__init__(message, rank, ranks)
        self._scratch = scratch
        self.own = slice(rank * self.share, (rank + 1) * self.share)
        self.whole = torch.zeros_like(message.flat)
        """All weights, where parameters lie while ranks share the step. Shape (ranks · share,)."""
        nothing = {slot.index: (0, slice(0, 0)) for slot in message.slots if not slot.parameter.numel()}
        self.places = {slot.index: (start, place) for slot, start, place in self.cuts()} | nothing
        """By place in the plan, gradients of which this rank has a part: the first of its elements in memory order, and
        where they are in `total`. Every rank has those without elements."""

    @property
    def weights(self) -> Tensor:
        """This rank's. Shape (share,)."""
        return self.whole[self.own]

    @property
    def total(self) -> Tensor:
        """This rank's part of the averaged gradients. Shape (share,)."""
        return self.message.flat[self.own]

    def phases(self, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """See `Collective.run`."""
        received = self._scratch.like(self.message.flat)
        yield from all_to_all(received, self.message.flat, group)
        add_up(list(received.view(self.ranks, self.share)), self.total)


class Usage:
    """What travels behind the last bucket: which gradients came on this rank, and whether it gave the step up."""

    def __init__(self, gradients: int, ranks: int, device: torch.device) -> None:
        self.own = torch.ones(gradients + 1, dtype=torch.uint8, device=device)
        self._told = self.own.new_zeros(ranks, gradients + 1)

    def phases(self, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """See `Collective.run`."""
        return gather(self._told.view(-1), self.own, group)

    def somewhere(self) -> list[bool]:
        """Of each gradient, whether it came on any rank. Waits for the device."""
        found: list[bool] = self._told[:, :-1].bool().any(dim=0).tolist()
        return found

    def given_up(self) -> int:
        """How many ranks gave the step up. Waits for the device."""
        return int(self._told[:, -1].sum())


class ShardedExchange(Exchange):
    """Gradients of one plan whose ranks share the optimizer's step."""

    def __init__(
        self, plan: Plan, parameters: Mapping[str, nn.Parameter], world: World, recorder: Recorder, device: torch.device
    ) -> None:
        """Lays out the buckets, and memory for weights; see `Exchange`."""
        self.world = world
        self.parts_of: list[list[OwnPart]] = []
        """By bucket, of its messages."""
        communicator = make_communicator(world, [PushPull()] * len(plan.buckets), device)
        super().__init__(plan, parameters, world.ranks, communicator, recorder, exchanges=True)
        self._part_of = {slot.index: part for part in self.parts for slot in part.message.slots}
        self._gradients = [ShardedGradient.of(slot.parameter, slot.name, slot.index, self) for slot in self.slots]
        self._before: dict[int, Tensor] = {}
        """Of gradients that this backward did not produce and that have an average: this rank's part of it."""
        self._norms: dict[float, tuple[Any, Tensor]] = {}

    def _lay_out(
        self, parameters: Mapping[str, nn.Parameter], ranks: int
    ) -> tuple[list[Slot], list[BucketBuffer], UsageFlags | None]:
        slots, buckets = make_plain_buckets(self.plan, parameters, parts=ranks)
        messages = [message for bucket in buckets for message in bucket.messages]
        scratch = Scratch(messages)
        self._usage = Usage(len(slots), ranks, messages[0].flat.device)
        for bucket in buckets:
            own = [OwnPart(message, self.world.rank, ranks, scratch) for message in bucket.messages]
            self.parts_of.append(own)
            bucket.parcel.payloads = [*own, self._usage] if bucket is buckets[-1] else own
        return slots, buckets, None

    def _hook(self, slot: Slot, after: Callable[[Any, Any], None]) -> GradientHook:
        return GradientHook(slot.parameter, after, partial(_make_room, weakref.ref(self), slot))

    @property
    def parts(self) -> list[OwnPart]:
        """Of all buckets' messages."""
        return [part for parts in self.parts_of for part in parts]

    # One step, in the order in which it happens.

    def _tell_usage(self) -> None:
        told = [not self._given_up and slot.touched for slot in self.slots]
        self._usage.own.copy_(torch.tensor([*told, self._given_up], dtype=torch.uint8))

    def _ranks_given_up(self) -> int:
        return self._usage.given_up()

    def _anybody_finished(self) -> bool:
        return any(self._usage.somewhere())

    def _fill_missing(self, bucket: BucketBuffer) -> None:
        """As with an all-reduce; of an average that is still there each rank gives its part."""
        for slot in bucket.slots:
            gradient = slot.parameter.grad
            if slot.waiting and isinstance(gradient, ShardedGradient):
                self._before[slot.index] = gradient.part.clone()
                slot.parameter.grad = self.local_share(slot.index)
        super()._fill_missing(bucket)

    def _settle(self, carries: bool) -> None:
        """Every `.grad` is the average, but those that no rank used, which stay what they were."""
        kept: dict[int, Kept] = {}
        if self._kept:
            used = self._usage.somewhere()
            kept = {one.slot.index: one for one in self._kept if not used[one.slot.index]}
        for slot, gradient in zip(self.slots, self._gradients, strict=True):
            if slot.index in kept and slot.index not in self._before:
                kept[slot.index].give_back()
                continue
            if slot.index in kept:
                gradient.part.copy_(self._before[slot.index])
            else:
                gradient.zeroed = False
            slot.parameter.grad = gradient
        self._kept.clear()
        self._before.clear()
        self._norms.clear()

    def forget(self) -> None:
        """See `Exchange.forget`."""
        self._before.clear()
        super().forget()

    def refuse_onlookers(self, slot: Slot) -> None:
        """Raises InputError where hooks would see a gradient added to an average of which this rank has a part; the
        other ranks are told that this one gives the step up.
        """
        if not slot.parameter._post_accumulate_grad_hooks and not self._hooks[slot.name].accompanied:
            return
        if self.open or self._admit():
            self.give_up()
        raise InputError(
            f"found a hook that runs after the gradient of {slot.name} has been added to the average of an earlier "
            f"step, but ranks share the optimizer's step, so that each has its own part of that average alone; "
            f"expected gradients that are zeroed before each backward, or no such hook: zero them, use "
            f"register_hook, or plan without sharing (`planner optimize` without --allow sharded-step)"
        )

    # What sharded gradients and the optimizer's step ask for.

    def part(self, index: int) -> Tensor:
        """See `Owned.part`."""
        part = self._part_of[index]
        found = part.places.get(index)
        return part.total[:0] if found is None else part.total[found[1]]

    def local_share(self, index: int) -> Tensor | None:
        """See `Owned.local_share`."""
        if self._gradients[index].zeroed:
            return None
        part, slot = self._part_of[index], self.slots[index]
        flat = part.whole.new_zeros(slot.parameter.numel())
        if index in part.places:
            start, place = part.places[index]
            torch.mul(part.total[place], self.world.ranks, out=flat[start : start + place.stop - place.start])
        return view_of(flat, 0, slot.view)

    def norms(self, order: float) -> Tensor:
        """See `Owned.norms`. Asked again before anything has changed, nothing is sent.

        Raises:
            InputError: asked while a backward runs, whose gradients ranks have not added up yet.
            CommunicationError: a rank did not come within the deadline.
        """
        if current_backward_id() != OUTSIDE:
            raise InputError(
                "norms of gradients were asked for while a backward runs, but ranks share the optimizer's step and "
                "have not added them up yet; expected them after backward: ask then, or plan without sharing (`planner "
                "optimize` without --allow sharded-step)"
            )
        versions = tuple((part.message.flat.data_ptr(), part.message.flat._version) for part in self.parts)
        known = self._norms.get(order)
        if known is None or known[0] != versions:
            device = self.parts[0].whole.device
            known = versions, whole_norms([self.part(slot.index) for slot in self.slots], order, self.world, device)
            self._norms[order] = known
        return known[1]

    def gradient_of(self, slot: Slot) -> Tensor | None:
        """What the optimizer gets of a parameter: this rank's part of its `.grad`, 1-D, or None where it has none.

        What a script has put there itself is the whole gradient, the same on all ranks.
        """
        gradient = slot.parameter.grad
        if gradient is None:
            return None
        if gradient is not self._gradients[slot.index] and gradient is not slot.view:
            slot.view.copy_(gradient.detach())
        return self.part(slot.index)

    def give_gradients_away(self) -> None:
        """`runtime.sharded.step` has done so, for all ranks have to be there."""

    def let_go(self) -> None:
        """Of cycles, whose memory would wait for the garbage collector; nobody asks for anything any more."""
        self._gradients.clear()


def _make_room(exchange: weakref.ref[ShardedExchange], slot: Slot, _gradients: Any) -> None:
    """A gradient is about to be added to `.grad`: to this rank's share of an average that is still there."""
    gradient = slot.parameter.grad
    if isinstance(gradient, ShardedGradient):
        share = gradient.owner.local_share(gradient.place)
        here = exchange()
        if share is not None and here is not None:
            here.refuse_onlookers(slot)
        slot.parameter.grad = share
