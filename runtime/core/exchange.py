"""The buckets of one plan and their hooks: gradients come in as autograd makes them, averages go out.

A session has one exchange at a time. When it switches to another plan it gets another one; the gradients that the old
one made stay as they are, in the old one's memory, until no reference to them is left.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runtime.comm.communicator import Communicator
from runtime.core.buckets import BucketBuffer, SavedGrad, Slot
from runtime.core.hooks import GradientHook
from runtime.core.usage import Usage, UsageFlags
from runtime.core.views import ViewGuard
from runtime.core.watch import raise_failed_move, refuse_unplanned
from runtime.core.weights import Weights
from runtime.errors import CommunicationError, InputError
from runtime.monitor.recorder import Recorder
from runtime.plan import Plan
from runtime.torch_compat import held_by_torch


class ErrorFeedback:
    """State that an exchange carries from step to step: here none."""

    @property
    def active(self) -> bool:
        """True if anything is carried; equal on all ranks."""
        return False

    steps = 0
    """Number of steps since the run began, those of exchanges before this one included."""

    def read_scale(self) -> None:
        """Ask for the scale of the loss: before backward, for on a device the answer has to be waited for."""

    def begin(self) -> None:
        """Begin a step."""

    def add_to(self, bucket: BucketBuffer) -> None:
        """Add to a bucket whose gradients are all there, and which is about to be sent."""

    def settle(self, wait: Callable[[BucketBuffer | None], None]) -> None:
        """Finish a step whose buckets have all been launched; `wait` returns when one has come, or all have."""

    def compresses(self, bucket: BucketBuffer) -> bool:
        """Tell whether something of a bucket may be sent in later steps."""
        return False

    def watched(self) -> list[Any]:
        """Return the buckets that may do harm; see `runtime.sparse.samples.Watched`."""
        return []

    def state(self) -> dict[str, Any]:
        """Return copies, which `load_state` continues from. Empty where nothing is carried."""
        return {}

    def load_state(self, state: dict[str, Any], parameters: Mapping[str, nn.Parameter]) -> None:
        """Continue from another exchange's `state`, whatever its buckets were; from an empty one with nothing."""


class Launcher:
    """Sends buckets and makes `.grad`s final; one class for each mode."""

    communicator: Communicator
    scale: float
    """Factor of gradients when they are copied into a bucket."""
    usage: Usage | None = None
    """Usage flags that are sent behind the last bucket; None: none that count for `.grad`s."""

    rank_weights: Weights | None = None
    """Weights of ranks; None: each counts as much as any other."""

    @property
    def weighted(self) -> bool:
        """True if gradients are weighed; equal on all ranks."""
        return self.rank_weights is not None and self.rank_weights.active

    @property
    def weight_flags(self) -> UsageFlags | None:
        """Return the flags that ranks mark where their weights are not alike; None: weights are sent in each step."""
        usage = self.usage
        return usage if isinstance(usage, UsageFlags) and usage.can_mark else None

    def correction(self) -> float:
        """Return the factor of averages that are here, which makes them those of weighed ranks."""
        return 1.0 if self.rank_weights is None else self.rank_weights.correction(self.weight_flags)

    def wait(self) -> None:
        """Block until all buckets are complete. Raises CommunicationError, on a host, if a rank gave the step up."""
        self.communicator.wait()
        if self.usage is not None and self.usage.on_host and (gave_up := self.usage.given_up()):
            raise CommunicationError(
                f"the step did not complete: an exception ended the backward of {gave_up} of {self.usage.ranks} ranks, "
                f"and not of this one, whose gradients are therefore no averages; look at the other ranks' first "
                f"error, or catch exceptions around the step on every rank and zero gradients before the next one"
            )

    def before_added(self, slot: Slot, exchange: weakref.ref[Exchange]) -> Callable[[Any], None] | None:
        """Return what is called when a gradient is about to be added to `.grad`, if anything; see `GradientHook`."""
        return None

    def detaches_grads(self, hooks_may_read: bool, kept: Callable[[], bool]) -> bool:
        """Return whether `.grad`s of this step are outside of the buckets' memory.

        Args:
            hooks_may_read: whether hooks of the user's may look at them while backward runs.
            kept: returns whether a script has kept a `.grad` that backward adds to.
        """
        return False

    def missing(self, slot: Slot) -> None:
        """Prepare for taking what `.grad` holds for a gradient that this backward did not produce."""

    def set_aside(self, slot: Slot) -> SavedGrad:
        """Take an average of an earlier step away from its parameter: it is added to the weighed average behind it."""
        return SavedGrad.set_aside(slot)

    def launch(self, bucket: BucketBuffer) -> None:
        """Send a bucket whose gradients are all there. Buckets come in plan order."""
        raise NotImplementedError

    def settle(self, missing: Sequence[SavedGrad], *, separate: bool) -> None:
        """Make every `.grad` final at the end of backward, when every bucket has been launched."""
        raise NotImplementedError

    def give_up(self, bucket: BucketBuffer) -> None:
        """Prepare a bucket for a step that an exception has ended, of which `usage`, if any, tells."""

    def abort_backward(self) -> None:
        """Forget a backward that an exception ended."""


class Exchange:
    """Gradients and collectives of one plan. Buckets start in plan order, whatever order autograd finishes in."""

    def __init__(
        self, plan: Plan, parameters: Mapping[str, nn.Parameter], buckets: Sequence[BucketBuffer], launcher: Launcher,
        carried: ErrorFeedback, recorder: Recorder,
    ) -> None:  # fmt: skip
        # Nothing happens before `install`. Without buckets (one rank) nothing is sent.
        self.plan, self.buckets, self.launcher, self.carried = plan, buckets, launcher, carried
        self.slots = [slot for bucket in buckets for slot in bucket.slots]
        """Slots of all gradients, in readiness order."""
        self._views = ViewGuard(buckets)
        self._parameters, self._recorder, self._scale = parameters, recorder, launcher.scale
        self._saved: list[SavedGrad] = []
        self._aside: dict[int, SavedGrad] = {}
        """`.grad`s from before the micro-batches of a weighed step, by place in the plan."""
        self._seen: tuple[int, int] | None = None
        """`_first_grad` at the end of the last micro-batch."""
        self._idle = False
        """Whether the present backward has a weight of 0, as if it had used no parameter."""
        self._unweighed: bool | None = None
        """Whether no gradient is weighed, for weights are n₀: 3 µs less each. None: not so far; False: not again."""
        self._next = 0
        self.open = False
        self._given_up = False
        """Whether an exception has ended the backward whose buckets leave now."""
        self._grads_detached = False
        """Whether `.grad`s are outside of the buckets' memory in this step, for hooks or a script may read those that
        backward adds to.
        """
        self._first: Slot | None = None
        self._hooks: dict[str, GradientHook] = {}

    def install(
        self,
        on_first_grad: Callable[[], bool],
        on_duplicate_grad: Callable[[Slot], None],
        hooks_may_read: Callable[[Iterable[GradientHook]], bool],
    ) -> None:
        """Hook the parameters.

        Args:
            on_first_grad: whether a backward is exchanged; if so calls `begin`.
            on_duplicate_grad: called for a gradient that has come in this step already.
            hooks_may_read: whether hooks may look at gradients of this backward, also at those in flight.
        """
        self._on_first_grad, self._on_duplicate_grad = on_first_grad, on_duplicate_grad
        self._hooks_may_read = hooks_may_read
        weights = self.launcher.rank_weights
        self._updated = [slot for slot in self.slots if weights and id(slot.parameter) in weights.updated] or self.slots
        for name in self._parameters.keys() - set(self.plan.gradients):
            self._hooks[name] = GradientHook(self._parameters[name], partial(refuse_unplanned, name))
        here = weakref.ref(self)
        for slot in self.slots:
            self._hooks[slot.name] = GradientHook(slot.parameter, partial(_gradient_ready, here, slot))
        self._unweighed = None
        self._call_before(weights is not None and weights.wanted)

    def _call_before(self, weighs: bool) -> None:
        here = weakref.ref(self)
        for slot in self.slots:
            before = partial(_weigh, here, slot) if weighs else self.launcher.before_added(slot, here)
            self._hooks[slot.name].call_before(before)

    def weigh_gradients(self) -> None:
        """Weigh each gradient from now on."""
        self._unweighed = False if self._unweighed else None
        self._call_before(True)

    def weigh_again(self, *, n0: bool) -> None:
        """Weigh each gradient again, if none is now, where the next weight is not `n0`, or `.grad`s are kept."""
        kept = self._unweighed and [slot for slot in self.slots if slot.parameter.grad is not None]
        if self._unweighed and self._hooks and (kept or not n0):
            self.weigh_gradients()

    # One step, in the order in which it happens.

    def begin_backward(self) -> None:
        """Look for parameters' new nodes when a backward reaches the model's outputs, but no parameter yet."""
        if not self._hooks:
            return  # through a graph from before `close`
        self.weigh_again(n0=True)  # a script may have put something into `.grad`s since then
        first = next((slot for slot in self.slots if slot.parameter.requires_grad), None)
        if first is not None and self._hooks[first.name].renew():  # the model was converted, and maybe back again
            for slot in self.slots:
                self._hooks[slot.name].renew()

    def gradient_ready(self, slot: Slot) -> None:
        """Take a gradient that has been added to its parameter's `.grad`, and that the user's hooks have seen."""
        _gradient_ready(weakref.ref(self), slot, None, (slot.view,))  # it has come, whatever became of `.grad`

    def begin(self) -> None:
        """Begin a step, whose first gradient is here."""
        if self.launcher.rank_weights is not None:
            self.launcher.rank_weights.begin_step(self.launcher.weight_flags is not None)
        self._views.restore()
        self.carried.begin()
        kept = partial(self._views.others_kept, self._first)
        self._grads_detached = self.launcher.detaches_grads(self._hooks_may_read(self._hooks.values()), kept)
        if self._grads_detached:
            self._views.part()
        self.open, self._given_up = True, False
        self._next = 0
        for bucket in self.buckets:
            bucket.waiting = len(bucket.slots)
        for slot in self.slots:
            slot.waiting = True
        self._recorder.begin_backward()

    def _launch(self, bucket: BucketBuffer) -> None:
        usage = self.launcher.usage
        if usage is not None and bucket is self.buckets[-1]:
            if self._given_up:
                usage.write_given_up()
            else:
                usage.write([slot.index for slot in self.slots if not slot.touched])
                flags, weights = self.launcher.weight_flags, self.launcher.rank_weights
                if flags is not None and weights is not None and weights.unsent not in (None, [1.0, 1.0]):
                    flags.mark()
        self.launcher.launch(bucket)
        self._next += 1

    def weighed(self, slot: Slot, gradient: Tensor) -> tuple[Tensor] | None:
        """Return a gradient times the weight of its backward, before it is added to `.grad`; None: it stays."""
        weights = self.launcher.rank_weights
        assert weights is not None
        if (so_far := weights.accumulated) is not None and self._begun_again(so_far > 0.0):
            weights.abort()
            self._aside = {at: one for at, one in self._aside.items() if one.slot not in self._updated}
        factor = self.take_weight()
        self._idle = factor == 0.0
        if not slot.touched and slot.index not in self._aside and (self._idle or slot.parameter.grad is not None):
            self._aside[slot.index] = self.launcher.set_aside(slot)
        if factor == 1.0:
            return None
        return (torch.zeros_like(gradient) if self._idle else gradient * factor,)  # zeros: no NaN may come through

    def take_weight(self) -> float:
        """Return this backward's weight over n₀, taken once, when its first gradient is here. Raises InputError."""
        assert self.launcher.rank_weights is not None
        try:
            return self.launcher.rank_weights.take()
        except InputError:
            if self.launcher.weighted:  # else ranks have refused each other's weights alike
                self.give_up()
            raise

    def _arrived(self) -> Iterator[Tensor]:
        """Yield the `.grad`s that an optimizer reads, and that micro-batches of this step have added to."""
        arrived = (one.parameter.grad for one in self._updated if one.touched or one.index in self._aside)
        return (grad for grad in arrived if grad is not None)

    def _first_grad(self) -> tuple[int, int] | None:
        """Return place and version of the first of these: others once a script zeroes it."""
        first = next(self._arrived(), None)
        return None if first is None else (first.data_ptr(), first._version)

    def _begun_again(self, weighs: bool) -> bool:
        """Tell whether the script has zeroed what it had accumulated. A device is waited for only where it has changed
        the first gradient; zeros in place tell nothing where all that came so far `weighs` 0.
        """
        if self._first_grad() == self._seen:
            return False
        left = list(self._arrived())
        return not left or (weighs and not any(bool(grad.any()) for grad in left))

    def accumulated(self) -> None:
        self._end_weight()
        self._recorder.end_micro_batch()
        if self.launcher.weighted:
            self._seen = self._first_grad()

    def finish(self) -> None:
        """End a backward: after this, every `.grad` is final."""
        self._launch_rest()
        self._recorder.end_backward()
        self.launcher.settle([*self._saved, *self._aside.values()], separate=self._grads_detached)
        self._saved.clear()
        self._aside.clear()
        weights = self.launcher.rank_weights
        can_rest = self._unweighed is None and weights is not None and weights.each_given and weights.factor == 1.0
        if can_rest and self.launcher.weight_flags is not None:
            self._unweighed = True
            self._call_before(False)
        self._end_weight()
        self.clear_used()
        self.open = False
        self._recorder.end_step()

    def _end_weight(self) -> None:
        self._idle = False
        if self.launcher.rank_weights is not None:
            self.launcher.rank_weights.end_backward()

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
        """Take what `.grad` holds, else zeros, for gradients that this backward did not produce, as with DDP."""
        for slot in bucket.slots:
            if not slot.waiting:
                continue
            self._save(slot)
            slot.waiting = False
            # Of a lossy bucket, where a part of it would become a residual though it has been used.
            stale = (self.carried.compresses(bucket) or self.launcher.weighted) and not slot.touched
            if slot.parameter.grad is None or stale:
                slot.clear_view()
                slot.view.zero_()
                slot.parameter.grad = slot.view
            elif slot.large or self._grads_detached:
                slot.take(self._scale, apart=self._grads_detached)
        if bucket.waiting and not self._grads_detached:
            bucket.take_small(self._scale)

    def _save(self, slot: Slot) -> None:
        """Keep the `.grad` that a parameter has without this backward."""
        if not self.launcher.weighted:
            self.launcher.missing(slot)
            self._saved.append(SavedGrad.of(slot))
        elif not slot.touched and slot.index not in self._aside:
            self._aside[slot.index] = self.launcher.set_aside(slot)

    # What ends a step in another way, and the exchange.

    def clear_used(self) -> None:
        """Forget which gradients have come so far: they are of no step."""
        for slot in self.slots:
            slot.touched = False

    def abort_backward(self) -> bool:
        """Give up the step of a backward that an exception ended, and wait for messages in flight; return whether
        weighed micro-batches that came before it still count. Raises CommunicationError where others did not fail, and
        did not wait to know that this one did, or did not come.
        """
        weights, self._idle = self.launcher.rank_weights, False
        if weights is not None and not self.open and weights.take_back():
            return True
        try:
            if self.open:
                self.give_up()
        finally:
            given_up = self._given_up
            self._given_up = self.open = False
            self._saved.clear()
            self._aside.clear()
            if weights is not None:
                weights.abort()
        self.launcher.abort_backward()
        self.launcher.communicator.wait()
        usage = self.launcher.usage
        if given_up and usage is not None and not usage.on_host and usage.used_somewhere():
            raise CommunicationError(
                "an exception ended the last backward of this rank, and not of all others, which have gone on with "
                "gradients that are no averages; expected a backward that ends alike on all ranks: mend what raised "
                "it, or begin again from a checkpoint"
            )
        return False

    def give_up(self) -> None:
        """Send all unsent buckets and set the flag that an exception ended this rank's backward: so ranks' collectives
        stay in step, wherever in the backward each of them failed, and the other ranks raise.

        No rank waits for messages in flight before the next backward, and a script zeroes gradients before that, maybe
        in place: `.grad`s leave the buckets, which are still written to. But where all buckets have left, a rank whose
        weight the others may ask for waits until it knows.
        """
        if not (self.open or self._on_first_grad()):
            return  # this backward exchanges nothing
        self._given_up = self._given_up or self._next < len(self.buckets)
        try:
            for bucket in self.buckets[self._next :]:
                self.launcher.give_up(bucket)
                self._launch(bucket)
        finally:
            for slot in self.slots:
                slot.leave()
        weights = self.launcher.rank_weights
        if not self._given_up and weights is not None and weights.unsent is not None:
            self.launcher.communicator.wait()
            with suppress(InputError):
                self.launcher.correction()

    def onlookers(self, slot: Slot) -> bool:
        """Tell whether hooks of the user's run after a gradient has been added to `.grad`."""
        return bool(slot.parameter._post_accumulate_grad_hooks) or self._hooks[slot.name].accompanied

    def inherit_state(self, before: Exchange) -> None:
        """Take over which gradients have come since the last exchange (in `no_sync`), and the residuals."""
        # An exact plan has no state, and yet its steps count: selectors that draw lots draw others in each.
        state = {"residuals": {}, **before.carried.state(), "steps": before.carried.steps}
        self.carried.load_state(state, self._parameters)
        touched = {slot.name for slot in before.slots if slot.touched}
        self._seen = before._seen
        for slot in self.slots:
            slot.touched = slot.name in touched
        self._aside = {
            slot.index: replace(one, slot=slot)
            for slot in self.slots
            for one in before._aside.values()
            if one.slot.name == slot.name
        }

    def close(self) -> None:
        """Take the hooks off. `.grad`s stay what they are: views of buckets that are no longer written to."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self.launcher.communicator.close()
        # Cycles, whose memory would wait for the garbage collector.
        for bucket in self.buckets:
            bucket.payload.messages = ()
        for slot in self.slots:
            slot.__dict__.pop("bucket", None)

    def detach_grads(self) -> None:
        """Give `.grad`s memory of their own, so that the buckets' is free, unless others look at it, too."""
        looked_at = {id(message) for _, message in self._views.looked_at()}
        for message in (message for bucket in self.buckets for message in bucket.messages):
            for slot in message.slots if id(message) not in looked_at else ():
                if slot.parameter.grad is slot.view and not held_by_torch(slot.view, 1):
                    slot.view.data = slot.view.clone()


def _weigh(exchange: weakref.ref[Exchange], slot: Slot, gradients: tuple[Tensor | None]) -> tuple[Tensor] | None:
    """Weigh a gradient before autograd adds it to `.grad`."""
    here = exchange()
    return None if here is None or gradients[0] is None else here.weighed(slot, gradients[0])


def _gradient_ready(
    exchange: weakref.ref[Exchange], slot: Slot, _nothing: Any, gradients: tuple[Tensor | None]
) -> None:
    """Take one gradient: the hook of each parameter's node, in one Python frame, which is the cost of a step per
    gradient.
    """
    here = exchange()
    if here is None or (gradients[0] is None and slot.parameter.grad is None):
        return  # a backward function gave None for it: as if this rank had not used it
    slot.touched = slot.touched or not here._idle
    if not here.open:
        here._first = slot
        if here._unweighed:
            here.take_weight()
        if not here._on_first_grad():
            return
    if not slot.waiting:
        return here._on_duplicate_grad(slot)
    slot.waiting = False
    bucket = slot.bucket
    bucket.waiting -= 1
    try:
        if slot.large or here._grads_detached:
            slot.take(here._scale, apart=here._grads_detached)
        if bucket.waiting:
            here._recorder.ready(slot.index)
            return
        if not here._grads_detached:
            bucket.take_small(here._scale)
    except RuntimeError as error:
        raise_failed_move(error, bucket)
    here._recorder.ready(slot.index)
    while here._next < len(here.buckets) and not here.buckets[here._next].waiting:
        here._launch(here.buckets[here._next])
