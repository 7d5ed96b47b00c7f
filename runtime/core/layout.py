"""A plan's buckets laid out in memory, and what one rank has of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

from torch import Tensor, nn

from runtime.core.buckets import BucketBuffer, Message, Slot, lay_out, make_slot, view_of
from runtime.plan import Plan


def make_plain_buckets(
    plan: Plan, parameters: Mapping[str, nn.Parameter], tail_elements: int = 0, parts: int = 1
) -> list[BucketBuffer]:
    """Buckets that send all gradients as they are; `tail_elements` behind the last, and messages of a length that
    `parts` divides.
    """
    buckets: list[BucketBuffer] = []
    places = count()
    for index, planned in enumerate(plan.buckets):
        members = [make_slot(name, next(places), parameters[name]) for name in planned.gradients]
        tail = tail_elements if index == len(plan.buckets) - 1 else 0
        messages = lay_out(members, tail_elements=tail, parts=parts)
        label = f"bucket {index} ({planned.collective}/{planned.algorithm}, {members[0].name} … {members[-1].name})"
        buckets.append(BucketBuffer(index, members, messages, label))
    return buckets


class Part:
    """What one rank has of a message of a bucket, cut into as many equal parts as there are ranks."""

    def __init__(self, message: Message, rank: int, ranks: int) -> None:
        self.message, self.rank, self.ranks = message, rank, ranks
        self.numel = sum(slot.parameter.numel() for slot in message.slots)
        self.share = -(-self.numel // ranks)
        """Elements of a part; the last one may be shorter, and is filled up."""

    def cuts(self) -> Iterator[tuple[Slot, int, slice]]:
        """(parameter, first of its elements in memory order, where they lie in this rank's part) of what is in it."""
        first, offset = self.rank * self.share, 0
        for slot in self.message.slots:
            start, stop = max(offset, first), min(offset + slot.parameter.numel(), first + self.share)
            if start < stop:
                yield slot, start - offset, slice(start - first, stop - first)
            offset += slot.parameter.numel()

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """The gradients' or weights' places in a vector of all parts. Shapes as the parameters'."""
        found, offset = {}, 0
        for slot in self.message.slots:  # laid out as gradients are, whatever becomes of the parameter's own layout
            found[slot.name] = view_of(whole, offset, slot.view)
            offset += slot.parameter.numel()
        return found
