"""Collectives that are one or two calls of the backend, for whatever a bucket sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.collectives.phases import Vector, Works, all_to_all, gather


def library_all_reduce(message: Vector, group: dist.ProcessGroup) -> Works:
    """The backend's own all-reduce, by whatever algorithm it chooses."""
    yield dist.all_reduce(message.flat, group=group, async_op=True)


@dataclass(eq=False)
class Packed:
    """Selected elements of one rank: values, indices and a tail of flags, as words of four bytes."""

    flat: Tensor
    """1-D int32."""
    gathered: Tensor
    """Every rank's, one after the other."""
    value_words: int = 0
    """How many of the words, the first ones, are values."""


def sparse_flat(message: Packed, group: dist.ProcessGroup) -> Works:
    """The flat sparse all-reduce of LAGS-SGD and DGC: what is gathered is added up by every rank for itself."""
    return gather(message.gathered, message.flat, group)


def naive_all_gather(message: Packed, group: dist.ProcessGroup) -> Works:
    """Values and indices gathered apart, each with its own start-up: CommLib's NaiveAG, to compare with."""
    ranks, words = dist.get_world_size(group), message.value_words
    rows = message.gathered.view(ranks, -1)
    for start, stop in ((0, words), (words, message.flat.numel())):
        if start == stop:
            continue
        part = message.flat[start:stop]
        whole = part.new_empty(ranks * part.numel())
        yield from gather(whole, part, group)
        rows[:, start:stop] = whole.view(ranks, -1)


class Narrowed:
    """One rank's message in codes: rows of bytes, one for each owner of a part, and all of one length."""

    def __init__(
        self, ranks: int, row_bytes: int, device: torch.device, narrow: Callable[[Tensor, Tensor], None]
    ) -> None:
        """`narrow`: adds up received rows, shape (ranks, row_bytes), and fills the row of the sum, (1, row_bytes)."""
        self.rows = torch.zeros(ranks, row_bytes, dtype=torch.uint8, device=device)
        """All that this rank sends; row r goes to rank r."""
        self.received, self.gathered = torch.zeros_like(self.rows), torch.zeros_like(self.rows)
        """This rank's part from every rank; and the sums of all parts."""
        self.own = torch.zeros_like(self.rows[:1])
        self._narrow = narrow

    def narrow(self) -> None:
        """Between the two phases."""
        self._narrow(self.received, self.own)


def narrowed_all_reduce(message: Narrowed, group: dist.ProcessGroup) -> Works:
    """All-to-all, sums, all-gather: a ring all-reduce's bytes in the format of `wire`, whose sums are wider."""
    yield from all_to_all(message.received.view(-1), message.rows.view(-1), group)
    message.narrow()
    yield from gather(message.gathered.view(-1), message.own.view(-1), group)


class Factored:
    """One rank's factors of matrices, and what it sends as it is."""

    def __init__(self, left: Tensor, right: Tensor, project: Callable[[], None], subtract: Callable[[], None]) -> None:
        """`left` and `right` (1-D) become their sums over ranks. `project`: fills `right` when `left` has come;
        `subtract`: what else is to be done then, while `right` travels.
        """
        self.left, self.right = left, right
        self._project, self._subtract = project, subtract

    def project(self) -> None:
        """Between the two phases."""
        self._project()

    def subtract(self) -> None:
        """Beside the second one."""
        self._subtract()


def factored_all_reduce(message: Factored, group: dist.ProcessGroup) -> Works:
    """The backend's own all-reduce of left factors, then of right ones, which need the sums of the left."""
    if message.left.numel():
        yield dist.all_reduce(message.left, group=group, async_op=True)
        message.project()
    if message.right.numel():
        work = dist.all_reduce(message.right, group=group, async_op=True)
        message.subtract()
        yield work


def push_pull(message: Any, group: dist.ProcessGroup) -> Works:
    """What a message knows by itself to have to be started: `message.phases(group)`."""
    return message.phases(group)  # type: ignore[no-any-return]
