"""The buckets of one plan and their hooks: gradients come in as autograd makes them, averages go out.

A session has one exchange at a time. When it changes over to another plan it gets another one; the gradients that the
old one made stay as they are, in the old one's memory, until nobody refers to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runtime.comm.communicator import Communicator
from runtime.comm.topology import Position
from runtime.core.buckets import BucketBuffer, Kept, Slot
from runtime.core.hooks import GradientHook
from runtime.core.usage import UsageFlags
from runtime.core.views import ViewGuard
from runtime.core.watch import raise_failed_move, refuse_unplanned
from runtime.errors import CommunicationError
from runtime.monitor.recorder import Recorder
from runtime.plan import Plan
from runtime.sparse.guard import LossyBucket, Watched
from runtime.sparse.layout import make_buckets
from runtime.sparse.residuals import Carried
from runtime.torch_compat import held_by_torch


class Exchange:
    """Gradients and collectives of one plan. Buckets start in plan order on every rank, whatever order autograd
    finishes in.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        ranks: int,
        communicator: Communicator,
        recorder: Recorder,
        *,
        exchanges: bool,
        loss_scale: Callable[[], float] | None = None,
        position: Position | None = None,
    ) -> None:
        """Lays out the buckets; nothing happens before `install`. Without `exchanges` (one rank) there are none.
        `loss_scale` gives the factor of the losses, where they are scaled; `position` tells where this rank is, where
        ranks have agreed on that.
        """
        self.plan, self.communicator, self._position = plan, communicator, position
        self.slots: list[Slot] = []
        self.buckets: list[BucketBuffer] = []
        self._flags: UsageFlags | None = None
        if exchanges:
            self.slots, self.buckets, self._flags = self._lay_out(parameters, ranks)
        self.carried = Carried(self.buckets, loss_scale)
        """What lossy buckets have yet to send."""
        self._views = ViewGuard(self.buckets)
        self._parameters, self._recorder = parameters, recorder
        self._ranks, self._scale = ranks, 1.0 / ranks
        self._kept: list[Kept] = []
        self._next = 0
        self.open = False
        """Whether a backward gives its gradients now."""
        self._given_up = False
        """Whether an exception has ended the backward whose buckets leave now."""
        self._on_host = bool(self.slots) and self.slots[0].view.device.type == "cpu"
        """Whether the host waits for what comes anyway, and may look at it for nothing."""
        self._may_part = plan.accuracy == "exact"
        """Whether every `.grad` is the plain average of what ranks have."""
        self._apart = False
        """Whether `.grad`s are none of the buckets' memory in this step, for hooks may look at them, or somebody has
        kept those that backward adds to.
        """
        self._first: Slot | None = None
        """Whose gradient came first."""
        self._hooks: dict[str, GradientHook] = {}

    def _lay_out(
        self, parameters: Mapping[str, nn.Parameter], ranks: int
    ) -> tuple[list[Slot], list[BucketBuffer], UsageFlags | None]:
        return make_buckets(self.plan, parameters, ranks, self._position)

    def install(
        self,
        admit: Callable[[], bool],
        again: Callable[[Slot], None],
        may_look: Callable[[Iterable[GradientHook]], bool],
    ) -> None:
        """Hooks the parameters.

        Args:
            admit: called for the first gradient of a backward; whether it is exchanged, and if so calls `begin`.
            again: called for a gradient that has come in this step already.
            may_look: whether hooks may look at gradients of this backward, also at those that are on their way.
        """
        self._admit, self._again, self._may_look = admit, again, may_look
        for name in self._parameters.keys() - set(self.plan.gradients):
            self._hooks[name] = GradientHook(self._parameters[name], partial(refuse_unplanned, name))
        here = weakref.ref(self)
        for slot in self.slots:
            self._hooks[slot.name] = self._hook(slot, partial(_gradient_ready, here, slot))

    def _hook(self, slot: Slot, after: Callable[[Any, Any], None]) -> GradientHook:
        return GradientHook(slot.parameter, after)

    # One step, in the order in which it happens.

    def begin_backward(self) -> None:
        """A backward reaches the model's outputs, but no parameter yet."""
        if not self._hooks:
            return  # through a graph from before `close`
        first = next((slot for slot in self.slots if slot.parameter.requires_grad), None)
        if first is not None and self._hooks[first.name].renew():  # the model was converted, and maybe back again
            for slot in self.slots:
                self._hooks[slot.name].renew()

    def gradient_ready(self, slot: Slot) -> None:
        """Take a gradient that has been added to its parameter's `.grad`, and that the user's hooks have seen."""
        _gradient_ready(weakref.ref(self), slot, None, (slot.parameter.grad,))

    def begin(self) -> None:
        """The first gradient of a step is here."""
        self._views.restore()
        self.carried.begin()
        may_look = self._may_look(self._hooks.values())
        self._apart = self._may_part and not self.carried.active
        if self._apart and not may_look:
            # Of a sharded gradient no rank has all: there is nothing that whoever kept it could go on looking at.
            self._apart = not self.plan.sharded and self._views.others_kept(self._first)
        if self._apart:
            self._views.part()
        self.open, self._given_up = True, False
        self._next = 0
        for bucket in self.buckets:
            bucket.waiting = len(bucket.slots)
        for slot in self.slots:
            slot.waiting = True
        self._recorder.begin_backward()

    def _launch_complete(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].waiting == 0:
            self._launch(self.buckets[self._next])

    def _launch(self, bucket: BucketBuffer) -> None:
        if bucket.index == len(self.buckets) - 1:
            self._tell_usage()
        sent = self._recorder.sent(bucket.index)
        self.communicator.launch(bucket.parcel, sent, partial(self.carried.add_to, bucket))
        self._next += 1

    def _tell_usage(self) -> None:
        """Behind the last bucket: which gradients have come on this rank, or that it gave the step up."""
        assert self._flags is not None
        if self._given_up:
            self._flags.write_given_up()
        else:
            self._flags.write([slot.index for slot in self.slots if not slot.touched])

    def _ranks_given_up(self) -> int:
        """After everything has come: of how many ranks an exception ended the backward."""
        return 0 if self._flags is None else self._flags.given_up()

    def _anybody_finished(self) -> bool:
        """After everything has come: whether any rank did not give the step up."""
        return self._flags is not None and bool(self._flags.used_somewhere())

    def accumulated(self) -> None:
        """The end of a backward that is not exchanged."""
        self._recorder.end_micro_batch()

    def finish(self) -> None:
        """The end of backward: after this, every `.grad` is final."""
        self._launch_rest()
        self._recorder.end_backward()
        carries = self.carried.active
        if carries:
            self.carried.settle(self._wait_for, self._parameters)
        self._wait_for(None)
        self._settle(carries)
        self.untouch()
        self.open = False
        self._recorder.end_step()

    def _settle(self, carries: bool) -> None:
        """Everything has come; `carries`: whether something stays from step to step."""
        unused = self._settle_missing(carries) if self._kept else set()
        if self._apart:
            self._copy_averages([slot for slot in self.slots if slot.index not in unused])

    def _copy_averages(self, slots: Sequence[Slot]) -> None:
        """Into `.grad`s apart from the buckets: as with DDP, what a hook has kept of them becomes the average."""
        gradients = []
        for slot in slots:
            gradient = slot.parameter.grad
            if gradient is None or gradient is slot.view:
                gradient = slot.parameter.grad = torch.empty_like(slot.view)
            gradients.append(gradient)
        if slots:
            torch._foreach_copy_(gradients, [slot.view for slot in slots])

    def _wait_for(self, bucket: BucketBuffer | None) -> None:
        """Until a bucket has come, or all have: later ones travel while it is unpacked.

        Raises CommunicationError where another rank has given the step up: before anything counts as sent.
        """
        self.communicator.wait(None if bucket is None else self._recorder.sent(bucket.index))
        if bucket is None and self._on_host and (gave_up := self._ranks_given_up()):
            raise CommunicationError(
                f"the step did not complete: an exception ended the backward of {gave_up} of {self._ranks} ranks, and "
                f"not of this one, whose gradients are therefore no averages; look at the other ranks' first error, or "
                f"catch exceptions around the step on every rank and zero gradients before the next one"
            )

    def _launch_rest(self) -> None:
        for bucket in self.buckets[self._next :]:
            for slot in bucket.slots:
                # A part of the model was converted, and back again: this backward has been through its new nodes.
                if slot.waiting and self._hooks[slot.name].renew() and slot.parameter.grad is not None:
                    slot.touched = True
            try:
                self._fill_missing(bucket)
            except RuntimeError as error:
                raise_failed_move(error, bucket)
            self._launch(bucket)

    def _fill_missing(self, bucket: BucketBuffer) -> None:
        """Gradients that this backward did not produce: what `.grad` holds counts, else zeros, as with DDP.

        In a lossy bucket what `.grad` holds from a step before does not count: it would be held back, in part, though
        it has been used.
        """
        for slot in bucket.slots:
            if not slot.waiting:
                continue
            self._kept.append(Kept.of(slot))
            slot.waiting = False
            stale = self._holds_back(bucket) and not slot.touched
            if slot.parameter.grad is None or stale:
                slot.clear_view()
                slot.view.zero_()
                slot.parameter.grad = slot.view
            elif slot.large or self._apart:
                slot.take(self._scale, apart=self._apart)
        if bucket.waiting and not self._apart:
            bucket.take_small(self._scale)

    def _holds_back(self, bucket: BucketBuffer) -> bool:
        """Whether something of a bucket may travel in later steps."""
        return bucket.lossy is not None

    def watched(self) -> list[Watched]:
        """The buckets whose largest elements travel."""
        lossy = [(bucket, bucket.lossy) for bucket in self.buckets]
        return [LossyBucket(bucket, one) for bucket, one in lossy if one is not None and one.by_magnitude]

    def _settle_missing(self, carries: bool) -> set[int]:
        """A parameter that no rank used keeps its `.grad`; one that another rank used gets the average. Returns the
        places in the plan of the former.

        What was held back of a parameter, where any is carried, may come in a step that nobody uses it in: it is added.
        """
        assert self._flags is not None
        used = self._flags.used_somewhere()
        for kept in self._kept:
            if kept.slot.index in used:
                continue
            if carries and bool(kept.slot.view.any()):
                kept.add()
            else:
                kept.give_back()
        unused = {kept.slot.index for kept in self._kept} - used
        self._kept.clear()
        return unused

    # What ends a step in another way, and the exchange.

    def untouch(self) -> None:
        """Gradients that have come so far are of no step."""
        for slot in self.slots:
            slot.touched = False

    def forget(self) -> None:
        """An exception ended the backward: the step is given up, if it is not yet, and what is on its way waited for.

        Raises CommunicationError where others did not fail, and did not wait to know that this one did.
        """
        if self.open:
            self.give_up()
        given_up, self._given_up, self.open = self._given_up, False, False
        self._kept.clear()
        self.communicator.wait()
        if given_up and not self._on_host and self._anybody_finished():
            raise CommunicationError(
                "an exception ended the last backward of this rank, and not of all others, which have gone on with "
                "gradients that are no averages; expected a backward that ends alike on all ranks: mend what raised "
                "it, or begin again from a checkpoint"
            )

    def give_up(self) -> None:
        """What has not left yet leaves now, whatever it is, with the word that an exception ended this rank's backward:
        so ranks' collectives stay in step, wherever in the backward each of them failed, and the others are told.
        """
        self._given_up = self._given_up or self._next < len(self.buckets)
        for bucket in self.buckets[self._next :]:
            self._launch(bucket)

    def follow(self, before: Exchange) -> None:
        """Takes over which gradients have come since the last exchange (in `no_sync`), and what has yet to travel."""
        # An exact plan has no state, and yet its steps count: selectors that draw lots draw others in each.
        state = {"residuals": {}, **before.carried.state(), "steps": before.carried.steps}
        self.carried.take_over(state, self._parameters)
        touched = {slot.name for slot in before.slots if slot.touched}
        for slot in self.slots:
            slot.touched = slot.name in touched

    def close(self) -> None:
        """Takes the hooks off. `.grad`s stay what they are: views of buckets that nobody else writes to any more."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self.communicator.close()
        # Cycles, whose memory would wait for the garbage collector.
        for bucket in self.buckets:
            bucket.lossy, bucket.parcel.payloads = None, ()
        for slot in self.slots:
            slot.__dict__.pop("bucket", None)

    def give_gradients_away(self) -> None:
        """Gives `.grad`s memory of their own, so that the buckets' is free, unless others look at it, too."""
        looked_at = {id(message) for _, message in self._views.looked_at()}
        for message in (message for bucket in self.buckets for message in bucket.messages):
            for slot in message.slots if id(message) not in looked_at else ():
                if slot.parameter.grad is slot.view and not held_by_torch(slot.view, 1):
                    slot.view.data = slot.view.clone()


def _gradient_ready(
    exchange: weakref.ref[Exchange], slot: Slot, _nothing: Any, gradients: tuple[Tensor | None]
) -> None:
    """The hook of each parameter's node; one Python frame, for it is all that a step costs for each gradient."""
    here = exchange()
    if here is None or (gradients[0] is None and slot.parameter.grad is None):
        return  # a backward function gave None for it: as if this rank had not used it
    slot.touched = True
    if not here.open:
        here._first = slot
        if not here._admit():
            return
    if not slot.waiting:
        return here._again(slot)
    slot.waiting = False
    bucket = slot.bucket
    bucket.waiting -= 1
    try:
        if slot.large or here._apart:
            slot.take(here._scale, apart=here._apart)
        if bucket.waiting:
            here._recorder.ready(slot.index)
            return
        if not here._apart:
            bucket.take_small(here._scale)
    except RuntimeError as error:
        raise_failed_move(error, bucket)
    here._recorder.ready(slot.index)
    here._launch_complete()
