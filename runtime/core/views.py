"""Keeps gradients inside their flat buffers, and the buffers to themselves, whatever a script does with `.grad`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from sys import getrefcount

import torch
from torch import Tensor

from runtime.core.buckets import BucketBuffer, Message, Slot
from runtime.torch_compat import held_by_torch, storage_uses


class ViewGuard:
    """Looks once per step, some microseconds for a ResNet, at what happened to the buffers since the last one.

    - `parameter.grad.data = …` (also inside `model.half()`) gives the very tensor that is the bucket's view other
      memory: what is written to it from then on would not be sent.
    - `parameter.grad.detach()` or `.data`, kept by a script, is the bucket's memory: the next backward would write
      over it, where plain PyTorch would make new gradients after `zero_grad()`.
    - `parameter.grad.untyped_storage().resize_(0)` frees the memory of a whole message, which then gets another one.
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
        """Point relocated views back into the buffer, and move buffers that a script looks at."""
        if [slot.view.data_ptr() for slot in self._slots] != self._addresses:
            for slot in self._slots:
                if slot.view.data_ptr() != slot.address:
                    slot.take_back()
        freed = [(bucket, one) for bucket, one, _ in self._uses if one.storage.nbytes() < one.size_bytes]
        for bucket, message in freed:
            bucket.part(message)
        if freed:
            self._remember()
        # While every `.grad` is the view, gradients are added up in place, which whoever looks at them has to see.
        moved = [
            pair for pair in self.looked_at() if any(slot.parameter.grad is not slot.view for slot in pair[1].slots)
        ]
        for bucket, message in moved:
            bucket.move(message)
        if moved:
            self._remember()

    def looked_at(self) -> list[tuple[BucketBuffer, Message]]:
        """Return the messages whose memory a script has kept."""
        return [(bucket, message) for bucket, message, uses in self._uses if storage_uses(message.storage) > uses]

    def part(self) -> None:
        """Leave buffers to the `.grad`s that are in them, which stay what they are."""
        parted = [(b, m) for b, m, _ in self._uses if any(slot.parameter.grad is slot.view for slot in m.slots)]
        for bucket, message in parted:
            bucket.part(message)
        if parted:
            self._remember()

    def others_kept(self, first: Slot | None) -> bool:
        """Return whether a script has kept a `.grad` that is none of the views: it has to see what backward adds. The
        gradient of `first` has come already; a new one is the backward's, too, and no script's.
        """
        # No list of gradients: it would hold what is asked about.
        others = [(slot, _storage_of(slot.parameter)) for slot in self._slots if _is_apart(slot)]
        sharing = Counter(storage.data_ptr() for _, storage in others)
        for slot, storage in others:
            references, elsewhere = _references(slot.parameter)
            # To a gradient that only this backward has made, nothing has been added yet.
            made_now = slot is first and getattr(slot.parameter.grad, "_version", 1) == 0
            uses = 0 if made_now else storage_uses(storage) - 1
            if elsewhere or references > _ALONE or uses > sharing[storage.data_ptr()]:
                return True
        return False


def _is_apart(slot: Slot) -> bool:
    gradient = slot.parameter.grad
    return gradient is not None and gradient is not slot.view and gradient.layout == torch.strided


def _storage_of(parameter: Tensor) -> torch.UntypedStorage:
    assert parameter.grad is not None
    return parameter.grad.untyped_storage()


def _references(parameter: Tensor) -> tuple[int, bool]:
    """Count references to the very tensor that is `.grad`: Python's, and whether torch knows others."""
    assert parameter.grad is not None
    return getrefcount(parameter.grad), held_by_torch(parameter.grad, 1)


def _references_alone() -> int:
    parameter = torch.zeros((), requires_grad=True)
    parameter.grad = torch.zeros(())
    return _references(parameter)[0]


_ALONE = _references_alone()
"""Number of Python's references to a `.grad` that nothing else holds."""
