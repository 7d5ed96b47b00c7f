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
      memory: what is written to it from then on would not travel.
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
        """Points strayed views back into the buffer; what the user put there stays the parameter's `.grad`. Moves
        buffers that somebody else looks at to memory of their own.
        """
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
        """The messages whose memory somebody else has kept."""
        return [(bucket, message) for bucket, message, uses in self._uses if storage_uses(message.storage) > uses]

    def part(self) -> None:
        """Leaves buffers to the `.grad`s that are in them, which stay what they are."""
        parted = [(b, m) for b, m, _ in self._uses if any(slot.parameter.grad is slot.view for slot in m.slots)]
        for bucket, message in parted:
            bucket.part(message)
        if parted:
            self._remember()

    def others_kept(self, first: Slot | None) -> bool:
        """Whether somebody has kept a `.grad` that is none of the views: backward adds to it, which they have to see.

        Args:
            first: its gradient has come already; a new one is the backward's, too, and nobody else's.
        """
        set_ones = [slot for slot in self._slots if slot.parameter.grad is not None]
        others = [(slot, _storage_of(slot)) for slot in set_ones if _is_apart(slot)]
        addresses = [storage.data_ptr() for _, storage in others]
        sharing = Counter(addresses)
        for (slot, storage), address in zip(others, addresses, strict=True):
            references, elsewhere = _references(slot.parameter)
            uses = 0 if slot is first and _is_new(slot) else storage_uses(storage) - 1
            if elsewhere or references > _ALONE or uses > sharing[address]:
                return True
        return False


def _is_apart(slot: Slot) -> bool:
    gradient = slot.parameter.grad
    return gradient is not None and gradient is not slot.view and gradient.layout == torch.strided


def _is_new(slot: Slot) -> bool:
    """Whether nothing has been added to the gradient yet."""
    return slot.parameter.grad is not None and slot.parameter.grad._version == 0


def _storage_of(slot: Slot) -> torch.UntypedStorage:
    assert slot.parameter.grad is not None
    return slot.parameter.grad.untyped_storage()


def _references(parameter: Tensor) -> tuple[int, bool]:
    """To the very tensor that is the parameter's `.grad`: of Python, and whether torch knows others."""
    assert parameter.grad is not None
    return getrefcount(parameter.grad), held_by_torch(parameter.grad, 1)


def _references_alone() -> tuple[int, bool]:
    parameter = torch.zeros((), requires_grad=True)
    parameter.grad = torch.zeros(())
    return _references(parameter)


_ALONE = _references_alone()[0]
"""How many Python has of a `.grad` that nothing else holds."""
