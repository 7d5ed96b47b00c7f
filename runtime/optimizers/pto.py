"""Parallel tensor operator (PTO): work that every rank would repeat is split over the ranks, its results gathered.

Replicated tensors, such as weights and averaged gradients, are the same on all ranks; so is what follows from them.
Each rank computes the results of its share of the tensors, and one all-gather brings the small results together.
Source: CommLib (Shi et al., MLSys 2021, arXiv 2010.10458), Sec. 4.2.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.waits import GRACE_S
from runtime.comm.world import World, deadlines
from runtime.errors import InputError, PlanMismatch
from runtime.plan.lpt import longest_first
from runtime.torch_compat import all_gather_single, wait_for

Item = TypeVar("Item")

Operation = Callable[[list[Item]], Tensor | Sequence[Tensor]]
"""Function of some of the items, in their order, with one row or one tensor for each, which depends on its own item
alone."""

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
        """Elements that each rank sends: as many as the most that one of them has."""
        self.begins = tuple(owner * self.elements + begin for owner, begin in zip(owners, begins, strict=True))
        """First element of each item's result among those of all ranks, one rank's after the other's."""
        alike = prod(shapes[0]) if len(set(shapes)) == 1 else 0
        self.rows = torch.tensor([begin // alike for begin in self.begins], device=device) if alike else None
        """Row of each result among those of all ranks, where all have one shape; None where they do not."""

    @property
    def message_bytes(self) -> int:
        """Size of the message that all ranks gather."""
        return self.world.ranks * self.elements * self.dtype.itemsize

    def start(self, operation: Operation[Item], items: Sequence[Item]) -> Pending:
        """Compute this rank's share and send it. Raises InputError for results of another number, shape or dtype."""
        own = torch.zeros(self.elements, dtype=self.dtype, device=self.device)
        if self.mine:
            results: Any = operation([items[item] for item in self.mine])
            self._check(results)
            begin = 0
            for result, item in zip(results, self.mine, strict=True):
                numel = prod(self.shapes[item])
                own[begin : begin + numel].view(self.shapes[item]).copy_(result)
                begin += numel
        group = self.world.group
        if group is None or not self.elements:
            return Pending(self, own, None)
        gathered = own.new_empty(self.world.ranks * self.elements)
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

    def wait(self) -> Tensor:
        """Return the results of all items, which have one shape, one row each; on CUDA the current stream waits, not
        the host. Raises CommunicationError.
        """
        self._complete()
        rows = self._split.rows
        if rows is None:
            return self._gathered.new_empty((0, *self._split.shapes[0])) if self._split.shapes else self._gathered
        return self._gathered.view(-1, *self._split.shapes[0]).index_select(0, rows)

    def wait_each(self) -> list[Tensor]:
        """Return the result of each item, as views of one memory; otherwise as `wait`."""
        self._complete()
        places = zip(self._split.begins, self._split.shapes, strict=True)
        return [self._gathered[begin : begin + prod(shape)].view(shape) for begin, shape in places]

    def _complete(self) -> None:
        world = self._split.world
        if self._work is not None:
            with world.error_context(WHAT):
                if self._gathered.is_cuda:
                    wait_for(self._work)  # the backend's watchdog has the deadline
                else:
                    wait_for(self._work, timedelta(seconds=world.timeout_s + GRACE_S))
            self._work = None


def parallel_tensor_op(
    op: Operation[Item],
    tensors: Sequence[Item],
    group: dist.ProcessGroup | None = None,
    *,
    owners: Sequence[int] | None = None,
    shape: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    timeout_s: float | None = None,
) -> Pending:
    """Split work on replicated tensors over the ranks of a group and gather the small results in one message.

    Returns at once, with this rank's share computed and the message in flight; `.wait()` gives the results.

    Args:
        op: from a list of items to a tensor with one row for each; it is not called where a rank has no share. For
            results that are equal bit for bit to those of one rank alone, a row must depend on its own item only.
        tensors: tensors, or tuples of them, the same on every rank, on one device.
        group: the ranks; default: all of torch.distributed, or this process alone. Every rank of it has to call this
            with the same tensors, in the same order of calls.
        owners: by item, the rank that computes it; default: by number of elements, the largest first.
        shape: of one result; default: a scalar.
        dtype: of the results.
        timeout_s: deadline of every wait; default: the group's own.

    Returns:
        The pending results; `.wait()` gives them as one tensor, with one row for each item in the order of `tensors`.

    Raises:
        PlanMismatch: ranks came with other numbers or sizes of tensors, or other owners; found when sizes are new.
        InputError: `op` gives something else than it should, or `owners` are none.
        CommunicationError: another rank died or missed the deadline.

    Examples:
        >>> own_norms = lambda own: torch.stack([tensor.norm() for tensor in own])
        >>> parallel_tensor_op(own_norms, [torch.ones(4), torch.zeros(2)]).wait()
        tensor([2., 0.])
    """
    world = World.over(group, deadlines(timeout_s, group)[0])
    sizes = [sum(tensor.numel() for tensor in _tensors(item)) for item in tensors]
    if owners is not None and len(owners) != len(sizes):
        raise InputError(f"owners: found {len(owners)} for {len(sizes)} tensors, expected one for each; correct them")
    split_over = tuple(longest_first(sizes, world.ranks) if owners is None else owners)
    device = next((tensor.device for item in tensors for tensor in _tensors(item)), torch.device("cpu"))
    split = Split(world, split_over, [shape] * len(sizes), dtype, device)
    _agree(world, (tuple(sizes), split_over, shape, str(dtype)))
    return split.start(op, tensors)


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
