"""Flat buffers that carry a bucket's gradients, and the gradients as views of them.

An exact step passes once over each gradient: it is scaled by 1/ranks while it is copied into its place (or in place,
where `.grad` already is the view), as DDP does, so that equal buckets give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby
from sys import getrefcount
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from runtime.comm.communicator import Payload
from runtime.errors import InputError
from runtime.plan import Plan, PlanBucket
from runtime.torch_compat import held_by_torch, own_memory

LARGE_BYTES = 64 * 1024
"""Gradients of at least this size are moved into the bucket one by one, smaller ones together."""


@dataclass(eq=False)
class Slot:
    """The place of one gradient in a bucket."""

    name: str
    index: int
    """Position in the plan's readiness order."""
    parameter: nn.Parameter
    large: bool = field(init=False)
    """Whether its bytes cost more than a call: moved at once, while it is in the cache, and not with the others."""
    view: Tensor = field(init=False)
    """The gradient's part of the flat buffer, in the parameter's shape and strides."""
    address: int = field(init=False)
    _home: Tensor = field(init=False, repr=False)
    """Another tensor of the same memory, which scripts cannot reach."""
    bucket: BucketBuffer = field(init=False, repr=False)
    waiting: bool = True
    touched: bool = False
    """Whether a backward has produced a gradient since the last exchange (also without synchronization)."""

    def __post_init__(self) -> None:
        self.large = self.parameter.numel() * self.parameter.element_size() >= LARGE_BYTES

    def take(self, scale: float, *, apart: bool = False) -> None:
        """Move `.grad`, times `scale`, into the view and make the view the parameter's `.grad`. Where a hook has
        dropped `.grad`, it is zeros, as with DDP. With `apart`, `.grad` stays what it is.
        """
        gradient = self.parameter.grad
        if gradient is self.view:
            if gradient.data_ptr() == self.address:
                gradient.mul_(scale)
                return
            self.take_back()
        self.clear_view()
        if gradient is None:
            self.view.zero_()
        else:
            self.refuse_graph(gradient)
            if apart and gradient.dtype != self.view.dtype:  # else torch refuses it as `.grad`
                raise RuntimeError(f"the gradient of {self.name} is {gradient.dtype}, expected {self.view.dtype}")
            torch.mul(gradient, scale, out=self.view)
        if not apart:
            self.parameter.grad = self.view

    def place(self, view: Tensor, *, follow: bool = True) -> None:
        """Make `view` the gradient's place. A view that is `.grad` becomes it, for gradients are added up there; one
        that is not, or does not `follow`, stays where it is, with whoever has kept it.
        """
        if follow and hasattr(self, "view") and self.parameter.grad is self.view:
            self.view.data = view
        else:
            self.view = view
        self._home, self.address = view.data, view.data_ptr()

    def take_back(self) -> None:
        """Take a new view where a script has given the old one other memory (`parameter.grad.data = …`)."""
        self.view = self._home.data

    def leave(self) -> None:
        """Give `.grad` memory of its own, where it is the view and neither a graph nor DLPack knows its memory: what is
        done to it from now on is not done to the bucket, nor the other way round.
        """
        if self.parameter.grad is self.view and not held_by_torch(self.view, 1):
            self._part()

    def _part(self) -> None:
        """Take a new view, and give the old one, which others hold, memory of its own."""
        old, self.view = self.view, self._home.data
        old.data = self.view.clone()

    def refuse_graph(self, gradient: Tensor) -> None:
        """Raise InputError for a gradient that is to be differentiated: the average would be a constant."""
        if gradient.requires_grad:
            raise InputError(
                f"the gradient of {self.name} requires a gradient itself, as backward(create_graph=True) makes it; "
                f"expected a plain one, for the average over ranks cannot be differentiated (with DDP neither): take "
                f"torch.autograd.grad(loss, parameters, create_graph=True) and add what depends on it to the loss, or "
                f"leave create_graph out"
            )

    def clear_view(self) -> None:
        """Make the view free to be written to, while it is not the parameter's `.grad`.

        A script may have kept the last gradient, or made it another parameter's: it gets memory of its own. Where
        DLPack or a graph keeps it, which know its memory, the bucket leaves that to them.
        """
        if getrefcount(self.view) <= _ONLY_HERE:
            return
        if held_by_torch(self.view):
            self.bucket.move(next(message for message in self.bucket.messages if self in message.slots))
        else:
            self._part()


_holder = SimpleNamespace(view=object())
_ONLY_HERE = getrefcount(_holder.view)
"""Result of `getrefcount` for an attribute that nothing else holds."""


@dataclass(eq=False, frozen=True)
class SavedGrad:
    """The `.grad` of a parameter that a backward did not reach, to be given back if no rank's did."""

    slot: Slot
    gradient: Tensor | None
    values: Tensor | None
    """A copy, where `.grad` is the bucket's own memory."""

    @classmethod
    def of(cls, slot: Slot) -> SavedGrad:
        gradient = slot.parameter.grad
        return cls(slot, gradient, gradient.detach().clone() if gradient is slot.view else None)

    @property
    def values_before(self) -> Tensor | None:
        """Values of `.grad` before the backward, or None."""
        before = self.values if self.values is not None else self.gradient
        return None if before is None else before.detach()

    @classmethod
    def set_aside(cls, slot: Slot) -> SavedGrad:
        """Take a `.grad` away from its parameter; where it is the bucket's own memory, a copy is kept."""
        gradient, slot.parameter.grad = slot.parameter.grad, None
        return cls(slot, gradient.detach().clone() if gradient is slot.view else gradient, None)

    def add(self) -> None:
        """Add the earlier values to the new average."""
        if self.values_before is not None:
            self.slot.view.add_(self.values_before)

    def give_back(self) -> None:
        """Restore `.grad`."""
        if self.values is not None:
            self.slot.view.copy_(self.values)
        else:
            self.slot.parameter.grad = self.gradient


@dataclass(eq=False)
class Message:
    """The gradients of one dtype in one bucket: what a collective gets."""

    flat: Tensor
    """1-D, all that is sent."""
    slots: list[Slot]
    storage: torch.UntypedStorage = field(init=False, repr=False)
    scratch: Any = field(default=None, repr=False)
    """Memory that its collective keeps from step to step."""

    def __post_init__(self) -> None:
        self.place(self.flat)

    def place(self, flat: Tensor, *, follow: bool = True) -> None:
        """Lay the gradients out in `flat`, in order; see `Slot.place`."""
        self.flat, self.storage = flat, flat.untyped_storage()
        offset = 0
        for slot in self.slots:
            slot.place(view_of(flat, offset, slot.parameter), follow=follow)
            offset += slot.parameter.numel()

    @property
    def size_bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()


@dataclass(eq=False)
class BucketBuffer:
    """One bucket at run time."""

    index: int
    slots: list[Slot]
    messages: list[Message]
    label: str
    """Name in messages to people: index, collective, first and last gradient."""
    waiting: int = 0
    payload: Payload = field(init=False)
    """Payload of its collective: its messages, or those that a mode or a compressor has put in their place."""
    small: list[Slot] = field(init=False)
    _small_runs: list[Tensor] = field(init=False, repr=False)
    """The parts of the flat buffers that small gradients fill without a gap."""

    def __post_init__(self) -> None:
        self.small = [slot for slot in self.slots if not slot.large]
        self._find_runs()
        self.payload = Payload(self.index, self.label, self.messages)
        for slot in self.slots:
            slot.bucket = self

    def _find_runs(self) -> None:
        self._small_runs = [run for message in self.messages for run in _small_runs(message)]

    def move(self, message: Message) -> None:
        """Give one message other memory; views that are `.grad`s go along, all else that looks at the old does not."""
        for slot in message.slots:
            if slot.parameter.grad is slot.view and held_by_torch(slot.view, holders=1):
                raise InputError(
                    f"the gradient of {slot.name} is added up in place and looked at through DLPack or a graph, while "
                    f"another one of {self.label} has been replaced and is kept, too; expected one of both in a "
                    f"bucket: keep `.grad.clone()`, or zero all gradients alike"
                )
        message.place(message.flat.clone())
        self._find_runs()

    def part(self, message: Message) -> None:
        """Give one message other memory; `.grad`s stay where they are."""
        message.place(torch.zeros_like(message.flat), follow=False)
        self._find_runs()

    def take_small(self, scale: float) -> None:
        """`Slot.take` for all small gradients at once."""
        moved: list[Slot] = []
        gradients: list[Tensor] = []
        for slot in self.small:
            gradient = slot.parameter.grad
            if gradient is slot.view:
                if gradient.data_ptr() == slot.address:
                    continue
                slot.take_back()
            slot.clear_view()
            if gradient is None:
                slot.view.zero_()
                slot.parameter.grad = slot.view
            else:
                slot.refuse_graph(gradient)
                moved.append(slot)
                gradients.append(gradient)
        if moved:
            torch._foreach_copy_([slot.view for slot in moved], gradients)
        for slot in moved:
            slot.parameter.grad = slot.view
        for run in self._small_runs:
            run.mul_(scale)


def _small_runs(message: Message) -> list[Tensor]:
    runs, offset = [], 0
    for large, neighbours in groupby(message.slots, key=lambda slot: slot.large):
        numel = sum(slot.parameter.numel() for slot in neighbours)
        if not large:
            runs.append(message.flat[offset : offset + numel])
        offset += numel
    return runs


def make_plain_buckets(
    plan: Plan, parameters: Mapping[str, nn.Parameter], tail_elements: int = 0,
    length_of: Callable[[PlanBucket, int], int] | None = None,
    message_of: Callable[[str], tuple[int, int]] | None = None,
) -> list[BucketBuffer]:  # fmt: skip
    """Make buckets that send all gradients as they are.

    Args:
        plan: has the gradients of each bucket.
        parameters: of the model, by name.
        tail_elements: number of elements behind the gradients of the last bucket.
        length_of: (bucket, elements of one of its flat buffers) → length of that buffer; default: the same.
        message_of: see `lay_out`.

    Returns:
        The buckets in plan order, filled with zeros.
    """
    buckets: list[BucketBuffer] = []
    places = count()
    for index, planned in enumerate(plan.buckets):
        members = [Slot(name, next(places), parameters[name]) for name in planned.gradients]
        tail = tail_elements if index == len(plan.buckets) - 1 else 0
        label = f"bucket {index} ({planned.collective}/{planned.algorithm}, {members[0].name} … {members[-1].name})"
        padded = None if length_of is None else partial(length_of, planned)
        buckets.append(BucketBuffer(index, members, lay_out(members, tail, padded, message_of), label))
    return buckets


def lay_out(
    slots: Sequence[Slot], tail_elements: int = 0, length_of: Callable[[int], int] | None = None,
    message_of: Callable[[str], tuple[int, int]] | None = None,
) -> list[Message]:  # fmt: skip
    """Lay gradients out in one flat buffer for each dtype, in order of first appearance.

    Args:
        slots: the gradients, in order.
        tail_elements: number of elements behind the gradients of the first buffer.
        length_of: elements of a buffer → its length; default: the same.
        message_of: name of a gradient → the buffer, among those of its dtype, and its place in the order there, in
            which gradients of equal places keep theirs; default: all are in one.

    Returns:
        A message for each dtype, or for each buffer of it.
    """
    found: dict[tuple[torch.dtype, int], list[Slot]] = {}
    places = {slot.name: (0, 0) if message_of is None else message_of(slot.name) for slot in slots}
    for slot in slots:
        found.setdefault((slot.parameter.dtype, places[slot.name][0]), []).append(slot)
    messages: list[Message] = []
    for (dtype, _), members in found.items():
        members.sort(key=lambda slot: places[slot.name][1])
        numel = sum(slot.parameter.numel() for slot in members)
        elements = numel + (tail_elements if not messages else 0)
        length = elements if length_of is None else length_of(elements)
        flat = torch.zeros(length, dtype=dtype, device=members[0].parameter.device)
        messages.append(Message(flat, members))
    return messages


def view_of(flat: Tensor, offset: int, parameter: Tensor, *, alone: bool = False) -> Tensor:
    """Return the parameter's part of a buffer, with its strides if they are dense (channels-last, for example).

    Args:
        flat: the buffer, 1-D.
        offset: first element of the part.
        parameter: has the shape and strides.
        alone: whether the storage of the result has nothing else of the buffer.
    """
    strides = parameter.stride() if is_dense(parameter) else torch.empty(parameter.shape, device="meta").stride()
    # Not a view in autograd's books: those may not be changed in place by `.grad.detach_()`.
    storage = own_memory(flat[offset : offset + parameter.numel()]) if alone else flat.untyped_storage()
    return flat.new_empty(0).set_(storage, 0 if alone else offset, parameter.size(), strides)


def is_dense(tensor: Tensor) -> bool:
    """Tell whether the strides cover numel elements without gaps or overlap."""
    expected = 1
    dimensions = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    for stride, size in sorted(dimensions):
        if stride != expected:
            return False
        expected *= size
    return True


class Part:
    """One rank's part of a message of a bucket, which is cut into as many parts as there are ranks."""

    def __init__(
        self, message: Message, rank: int, ranks: int, share: int | None = None, first: int | None = None
    ) -> None:
        """`share`: elements of this part; by default of equal parts, as few as there can be. `first`: its first element
        in the message; by default that of equal parts.
        """
        self.message, self.rank, self.ranks = message, rank, ranks
        self.numel = sum(slot.parameter.numel() for slot in message.slots)
        self.share = -(-self.numel // ranks) if share is None else share
        """Elements of a part; of equal ones the last may be shorter, and are filled up."""
        self.first = rank * self.share if first is None else first

    def cuts(self) -> Iterator[tuple[Slot, int, slice]]:
        """Yield of what is in this rank's part (parameter, first of its elements in memory order, where they lie)."""
        first, offset = self.first, 0
        for slot in self.message.slots:
            start, stop = max(offset, first), min(offset + slot.parameter.numel(), first + self.share)
            if start < stop:
                yield slot, start - offset, slice(start - first, stop - first)
            offset += slot.parameter.numel()

    def views(self, whole: Tensor, *, alone: bool = False) -> dict[str, Tensor]:
        """Return the gradients' or weights' places in a vector of all parts; see `view_of`. Shapes: the parameters'."""
        found, offset = {}, 0
        for slot in self.message.slots:  # laid out as gradients are, whatever becomes of the parameter's own layout
            found[slot.name] = view_of(whole, offset, slot.view, alone=alone)
            offset += slot.parameter.numel()
        return found
