"""Synchronous steps: buckets are all-reduced, and every `.grad` becomes the average over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from runtime.comm.communicator import Communicator
from runtime.core.buckets import BucketBuffer, SavedGrad, Slot
from runtime.core.exchange import ErrorFeedback, Launcher
from runtime.core.usage import UsageFlags
from runtime.monitor.recorder import Recorder


class AllReduce(Launcher):
    """Launcher of synchronous steps."""

    def __init__(
        self, buckets: Sequence[BucketBuffer], usage: UsageFlags | None, communicator: Communicator,
        carried: ErrorFeedback, recorder: Recorder, *, exact: bool,
    ) -> None:  # fmt: skip
        """Send buckets by a communicator.

        Args:
            buckets: in plan order; a rank alone has none.
            usage: flags behind the last bucket; None: there are no buckets, or `.grad`s stay this rank's own.
            communicator: sends the buckets.
            carried: residuals of compressed buckets.
            recorder: records when buckets are sent.
            exact: whether `.grad`s are plain averages.
        """
        self.communicator, self.scale = communicator, 1.0 if usage is None else 1.0 / usage.ranks
        self._buckets = buckets
        self._slots = [slot for bucket in buckets for slot in bucket.slots]
        self.usage, self._carried, self._recorder, self._exact = usage, carried, recorder, exact

    def detaches_grads(self, hooks_may_read: bool, kept: Callable[[], bool]) -> bool:
        return self._exact and not self._carried.active and (hooks_may_read or kept())

    def launch(self, bucket: BucketBuffer) -> None:
        sent = self._recorder.sent(bucket.index)
        self.communicator.launch(bucket.payload, sent, partial(self._carried.add_to, bucket))

    def settle(self, missing: Sequence[SavedGrad], *, separate: bool) -> None:
        carries = self._carried.active
        if carries:
            self._carried.settle(self._wait_for)
        self.wait()
        self._correct()
        unused = self._settle_missing(missing, carries) if missing else set()
        if separate:
            self._copy_averages([slot for slot in self._slots if slot.index not in unused])

    def _correct(self) -> None:
        """Multiply averages by what ranks' weights require: all of a bucket but the flags behind it."""
        factor = self.correction()
        for message in (message for bucket in self._buckets for message in bucket.messages) if factor != 1.0 else ():
            message.flat[: sum(slot.parameter.numel() for slot in message.slots)].mul_(factor)

    def _wait_for(self, bucket: BucketBuffer | None) -> None:
        """Wait until a bucket has come, or all have: later ones are sent while it is unpacked."""
        if bucket is None:
            self.wait()
            self.correction()  # raises where nothing counts, before anything counts as sent
        else:
            self.communicator.wait(self._recorder.sent(bucket.index))

    def _settle_missing(self, missing: Sequence[SavedGrad], carries: bool) -> set[int]:
        """Let parameters that no rank used keep their `.grad`, others get the average; returns the former's places."""
        used = set() if self.usage is None else self.usage.used_somewhere()
        for saved in missing:
            if saved.slot.index in used:
                if self.weighted:  # else it was sent with the gradients of this step
                    saved.add()
                continue
            # A residual may come in a step in which no rank uses its parameter.
            if carries and bool(saved.slot.view.any()):
                saved.add()
            else:
                saved.give_back()
        return {saved.slot.index for saved in missing} - used

    def _copy_averages(self, slots: Sequence[Slot]) -> None:
        """Fill `.grad`s apart from the buckets: as with DDP, what a hook has kept of them becomes the average."""
        gradients = []
        for slot in slots:
            gradient = slot.parameter.grad
            if gradient is None or gradient is slot.view:
                gradient = slot.parameter.grad = torch.empty_like(slot.view)
            gradients.append(gradient)
        if slots:
            torch._foreach_copy_(gradients, [slot.view for slot in slots])
