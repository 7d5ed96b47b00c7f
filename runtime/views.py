"""Keeps gradients inside their flat buffers, and the buffers to themselves, whatever a script does with `.grad`."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.buckets import BucketBuffer
from runtime.torch_compat import storage_uses


class ViewGuard:
    """Looks once per step, some microseconds for a ResNet, at what happened to the buffers since the last one.

    - `parameter.grad.data = …` (also inside `model.half()`) gives the very tensor that is the bucket's view other
      memory: what is written to it from then on would not travel.
    - `parameter.grad.detach()` or `.data`, kept by a script, is the bucket's memory: the next backward would write
      over it, where plain PyTorch would make new gradients after `zero_grad()`.
    """

    def __init__(self, buckets: Sequence[BucketBuffer]) -> None:
        self._slots = [slot for bucket in buckets for slot in bucket.slots]
        self._buckets = buckets
        self._remember()

    def _remember(self) -> None:
        self._addresses = [slot.address for slot in self._slots]
        messages = [(bucket, message) for bucket in self._buckets for message in bucket.messages]
        self._uses = [(bucket, message, storage_uses(message.storage)) for bucket, message in messages]

    def restore(self) -> None:
        """Points strayed views back into the buffer; what the user put there stays the parameter's `.grad`. Moves
        buffers that somebody else looks at to memory of their own.
        """
        if [slot.view.data_ptr() for slot in self._slots] != self._addresses:
            for slot in self._slots:
                if slot.view.data_ptr() != slot.address:
                    slot.take_back()
        shared = [(bucket, message) for bucket, message, uses in self._uses if storage_uses(message.storage) > uses]
        # While every `.grad` is the view, gradients are added up in place, which whoever looks at them has to see.
        moved = [pair for pair in shared if any(slot.parameter.grad is not slot.view for slot in pair[1].slots)]
        for bucket, message in moved:
            bucket.move(message)
        if moved:
            self._remember()

    def part(self) -> None:
        """Leaves buffers to the `.grad`s that are in them, which stay what they are."""
        parted = [(b, m) for b, m, _ in self._uses if any(slot.parameter.grad is slot.view for slot in m.slots)]
        for bucket, message in parted:
            bucket.part(message)
        if parted:
            self._remember()
