"""Parallel tensor operator (PTO): work that every rank would repeat is split over the ranks, its results gathered.

Replicated tensors, such as weights and averaged gradients, are the same on all ranks; so is what follows from them.
Each rank computes the results of its share of the tensors, or of its part of each, and one all-gather brings the
results together. Source: CommLib (Shi et al., MLSys 2021, arXiv 2010.10458), Sec. 4.2.

On hosts each rank's message ends with a flag: where an operation raised, every rank raises, and no rank waits for the
deadline. On devices the flag would have the host wait; there the backend's watchdog ends the other ranks.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from math import prod
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.waits import GRACE_S
from runtime.comm.world import World, deadlines
from runtime.errors import CommunicationError, InputError, PlanMismatch
from runtime.plan.lpt import longest_first
from runtime.torch_compat import all_gather_single, wait_for

Item = TypeVar("Item")

Operation = Callable[[list[Item]], Tensor | Sequence[Tensor]]
"""Function of some of the items, in their order, with one row or one tensor for each, which depends on its own item
alone."""

SplitBy = Literal["tensors", "elements"]
"""Unit that ranks share: whole tensors, or the elements of each."""

WHAT = "the exchange of what a parallel tensor operation computed"


class Split:
    """The rank that computes each item's result, and the results' shapes and dtype; the same on all ranks."""

    def __init__(
        self, world: World, owners: Sequence[int], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """`owners`: by item, the rank that computes it; raises InputError for none. `shapes`: of each result."""
        odd = next((owner for owner in owners if not 0 <= owner < world.ranks), None)
        if odd is not None:
            raise InputError(f"owners: found rank {odd}, expected ranks from 0 to {world.ranks - 1}; correct them")
        self.world, self.owners, self.shapes = world, tuple(owners), tuple(shapes)
        self.dtype, self.device = dtype, device
        self.mine = tuple(item for item, owner in enumerate(owners) if owner == world.rank)
        held = [0] * world.ranks
        begins = []
        for owner, shape in zip(owners, shapes, strict=True):
            begins.append(held[owner])
            held[owner] += prod(shape)
        self.elements = max(held)
        """Elements of results that each rank sends: as many as the most that one of them has."""
        self.sent = self.elements + int(device.type == "cpu" and self.elements > 0)
        """Elements that each rank sends, with the flag."""
        self.begins = tuple(owner * self.sent + begin for owner, begin in zip(owners, begins, strict=True))
        """First element of each item's result among those of all ranks, one rank's after the other's."""
        begins = [owner * self.elements + begin for owner, begin in zip(owners, begins, strict=True)]
        alike = prod(shapes[0]) if len(set(shapes)) == 1 else 0
        self.rows = torch.tensor([begin // alike for begin in begins], device=device) if alike else None
        """Row of each result among those of all ranks, where all have one shape; None where they do not."""

    @property
    def message_bytes(self) -> int:
        """Size of the results that all ranks gather, without flags."""
        return self.world.ranks * self.elements * self.dtype.itemsize

    def start(self, operation: Operation[Item], items: Sequence[Item]) -> Pending:
        """Compute this rank's share and send it. Raises InputError for results of another number, shape or dtype, and
        what `operation` raised, on a host once other ranks have the flag.
        """
        own = torch.zeros(self.sent, dtype=self.dtype, device=self.device)
        try:
            if self.mine:
                self._compute(operation, items, own)
        except Exception:
            if self.sent > self.elements:
                own[self.elements :] = 1
                with suppress(CommunicationError):  # the first error counts
                    self._send(own).complete()
            raise
        return self._send(own)

    def _compute(self, operation: Operation[Item], items: Sequence[Item], own: Tensor) -> None:
        results: Any = operation([items[item] for item in self.mine])
        self._check(results)
        begin = 0
        for result, item in zip(results, self.mine, strict=True):
            numel = prod(self.shapes[item])
            own[begin : begin + numel].view(self.shapes[item]).copy_(result)
            begin += numel

    def _send(self, own: Tensor) -> Pending:
        group = self.world.group
        if group is None or not self.elements:
            return Pending(self, own, None)
        gathered = own.new_empty(self.world.ranks * self.sent)
        with self.world.error_context(WHAT):
            # As bytes: backends know few dtypes.
            to, of = gathered.view(torch.uint8), own.view(torch.uint8)
            return Pending(self, gathered, all_gather_single(to, of, group=group, async_op=True))

    def _check(self, results: Any) -> None:
        shapes = [self.shapes[item] for item in self.mine]
        rows = isinstance(results, Tensor)
        if rows and len(set(shapes)) == 1 and tuple(results.shape) == (len(shapes), *shapes[0]):
            found = [results]
        else:
            found = list(results) if isinstance(results, Sequence) else []
            if [tuple(one.shape) for one in found if isinstance(one, Tensor)] != shapes:
                found = []
        if found and all(one.dtype == self.dtype and one.device == self.device for one in found):
            return
        described = f"{tuple(results.shape)}, {results.dtype} on {results.device}" if rows else type(results).__name__
        expected = f"a tensor with one row for each item, {(len(shapes), *shapes[0])}"
        if len(set(shapes)) > 1:
            expected = f"a tensor for each item, {shapes}"
        raise InputError(
            f"the operation returned {described}, expected {expected}, {self.dtype} on {self.device}; stack the "
            f"results, or say their shape and dtype"
        )


class Pending:
    """Results in flight."""

    def __init__(self, split: Split, gathered: Tensor, work: dist.Work | None) -> None:
        self._split, self._gathered, self._work = split, gathered, work
        self._flagged = split.sent > split.elements
        """True until the flags have been read."""

    def wait(self) -> Tensor:
        """Return the results of all items, which have one shape, one row each; on CUDA the current stream waits, not
        the host. Raises CommunicationError.
        """
        self._check_flags()
        split, gathered = self._split, self._gathered
        if split.rows is None:
            return gathered.new_empty((0, *split.shapes[0])) if split.shapes else gathered
        results = gathered.view(-1, split.sent)[:, : split.elements].reshape(-1, *split.shapes[0])
        return results.index_select(0, split.rows)

    def wait_each(self) -> list[Tensor]:
        """Return the result of each item, as views of one memory; otherwise as `wait`."""
        self._check_flags()
        places = zip(self._split.begins, self._split.shapes, strict=True)
        return [self._gathered[begin : begin + prod(shape)].view(shape) for begin, shape in places]

    def _check_flags(self) -> None:
        """Complete; raise CommunicationError if the operation raised on any rank."""
        self.complete()
        if not self._flagged:
            return
        split = self._split
        raised = self._gathered.view(-1, split.sent)[:, split.elements].nonzero().flatten().tolist()
        if raised:
            ranks = ", ".join(map(str, raised))
            raise CommunicationError(
                f"rank {split.world.rank}: a parallel tensor operation raised on rank {ranks}, so that its results are "
                f"missing on all ranks; look at the error there"
            )
        self._flagged = False

    def complete(self) -> None:
        """Wait for the message. Raises CommunicationError."""
        world = self._split.world
        if self._work is not None:
            with world.error_context(WHAT):
                if self._gathered.is_cuda:
                    wait_for(self._work)  # the backend's watchdog has the deadline
                else:
                    wait_for(self._work, timedelta(seconds=world.timeout_s + GRACE_S))
            self._work = None


class PendingParts(Pending):
    """Results in flight of which each item has one for the part of each rank."""

    def __init__(self, sent: Pending, forms: Sequence[tuple[int, ...] | None]) -> None:
        """`forms`: shape of each item whose parts are joined; None: they are stacked."""
        super().__init__(sent._split, sent._gathered, sent._work)
        self._forms = forms

    def wait(self) -> Tensor:
        each = self.wait_each()
        return torch.stack(each) if each else self._gathered

    def wait_each(self) -> list[Tensor]:
        ranks, parts = self._split.world.ranks, super().wait_each()
        return [
            torch.stack(of) if form is None else torch.cat(of).view(form)
            for place, form in enumerate(self._forms)
            for of in [parts[place * ranks : (place + 1) * ranks]]
        ]


def parallel_tensor_op(
    op: Operation[Item],
    tensors: Sequence[Item],
    group: dist.ProcessGroup | None = None,
    *,
    split: SplitBy = "tensors",
    owners: Sequence[int] | None = None,
    shape: tuple[int, ...] | None = (),
    dtype: torch.dtype = torch.float32,
    timeout_s: float | None = None,
) -> Pending:
    """Split work on replicated tensors over the ranks of a group and gather the small results in one message.

    Returns at once, with this rank's share computed and the message in flight; `.wait()` gives the results.

    Args:
        op: from a list of items to a tensor with one row for each, or to a list of results; it is not called where a
            rank has no share. For results that are equal bit for bit to those of one rank alone, a result must depend
            on its own item, and with `split="elements"` each element on its own elements, only.
        tensors: tensors, or tuples of them, the same on every rank, on one device.
        group: the ranks; default: all of torch.distributed, or this process alone. Every rank of it has to call this
            with the same tensors, in the same order of calls.
        split: `"tensors"` shares whole items. `"elements"` shares each tensor's elements, for few long tensors: `op`
            gets this rank's part of every item, 1-D, in order of rank, empty where a tensor has fewer elements than
            there are ranks.
        owners: by item, the rank that computes it; default: by number of elements, the largest first.
        shape: of one result; default: a scalar. None: that of the item, or of its part. With `split="elements"` the
            result of an item is its parts' joined in its own shape (None), or a row for each rank.
        dtype: of the results.
        timeout_s: deadline of every wait; default: the group's own.

    Returns:
        The pending results; `.wait()` gives them as one tensor, with one row for each item in the order of `tensors`,
        `.wait_each()` as a list, for items of different shapes.

    Raises:
        PlanMismatch: ranks came with other numbers or sizes of tensors, or other owners; found when sizes are new.
        InputError: `op` gives something else than it should, `split` or `owners` are none.
        CommunicationError: another rank died or missed the deadline; or, from `.wait()` on a host, `op` raised on
            another rank, which the text names. The rank itself raises what `op` raised.

    Examples:
        >>> own_norms = lambda own: torch.stack([tensor.norm() for tensor in own])
        >>> parallel_tensor_op(own_norms, [torch.ones(4), torch.zeros(2)]).wait()
        tensor([2., 0.])
        >>> parallel_tensor_op(lambda own: [part.sqrt() for part in own], [torch.full((4,), 9.0)], split="elements",
        ...                    shape=None).wait_each()
        [tensor([3., 3., 3., 3.])]
    """
    if split not in get_args(SplitBy):
        raise InputError(f"split: found {split!r}, expected one of {', '.join(map(repr, get_args(SplitBy)))}")
    world = World.over(group, deadlines(timeout_s, group)[0])
    sizes = [sum(tensor.numel() for tensor in _tensors(item)) for item in tensors]
    if owners is not None and split == "elements":
        raise InputError('owners: found some with split="elements", expected none: each rank has a part of every item')
    if owners is not None and len(owners) != len(sizes):
        raise InputError(f"owners: found {len(owners)} for {len(sizes)} tensors, expected one for each; correct them")
    device = next((tensor.device for item in tensors for tensor in _tensors(item)), torch.device("cpu"))
    if split == "elements":
        return _start_parts(op, tensors, world, shape, dtype, device)
    split_over = tuple(longest_first(sizes, world.ranks) if owners is None else owners)
    shapes = [tuple(_tensors(item)[0].shape) if shape is None else shape for item in tensors]
    whole = Split(world, split_over, shapes, dtype, device)
    _agree(world, (tuple(sizes), split_over, shape, str(dtype)))
    return whole.start(op, tensors)


def _start_parts(
    op: Operation[Item], tensors: Sequence[Item], world: World, shape: tuple[int, ...] | None, dtype: torch.dtype,
    device: torch.device,
) -> PendingParts:  # fmt: skip
    for place, item in enumerate(tensors):
        sizes = [tensor.numel() for tensor in _tensors(item)]
        if len(set(sizes)) != 1:
            raise InputError(
                f'tensors[{place}]: found tensors of {sizes} elements, expected as many in each for split="elements"'
            )
    numels = [_tensors(item)[0].numel() for item in tensors]
    ranks, rank = range(world.ranks), world.rank
    bounds = [[numel * end // world.ranks for end in (*ranks, world.ranks)] for numel in numels]
    shapes = [(of[r + 1] - of[r],) if shape is None else shape for of in bounds for r in ranks]
    parts: list[Any] = [
        _sliced(item, of[r], of[r + 1]) if r == rank else None
        for item, of in zip(tensors, bounds, strict=True)
        for r in ranks
    ]
    split = Split(world, [r for _ in numels for r in ranks], shapes, dtype, device)
    _agree(world, (tuple(numels), "elements", shape, str(dtype)))
    forms = [tuple(_tensors(item)[0].shape) if shape is None else None for item in tensors]
    return PendingParts(split.start(op, parts), forms)


def _sliced(item: Any, start: int, stop: int) -> Any:
    if isinstance(item, Tensor):
        return item.reshape(-1)[start:stop]
    return tuple(_sliced(one, start, stop) for one in item)


def _tensors(item: Any) -> Sequence[Tensor]:
    return (item,) if isinstance(item, Tensor) else tuple(chain.from_iterable(map(_tensors, item)))


_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()


def _agree(world: World, call: object) -> None:
    # Messages of different sizes would end some backends' processes.
    if world.group is None:
        return
    known = _agreed.setdefault(world.group, set())
    digest = hashlib.sha256(repr(call).encode()).hexdigest()
    if digest in known:
        return
    everyone = world.gather((digest, str(call)), "comparing the tensors of a parallel tensor operation")
    if len({one for one, _ in everyone}) > 1:
        found = ", ".join(f"rank {rank}: {text[:120]}" for rank, (_, text) in enumerate(everyone[:4]))
        raise PlanMismatch(
            f"ranks called parallel_tensor_op with different tensors or owners ((elements, owners, shape, dtype): "
            f"{found}); give every rank the same"
        )
    known.add(digest)
