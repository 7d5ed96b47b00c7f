"""Collectives that are one or two calls of the backend, for whatever a bucket sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.collectives.phases import Vector, Works, all_to_all, gather


def library_all_reduce(message: Vector, group: dist.ProcessGroup) -> Works:
    """All-reduce by the backend, with the algorithm that it chooses."""
    yield dist.all_reduce(message.flat, group=group, async_op=True)


@dataclass(eq=False)
class Packed:
    """Selected elements of one rank: values, indices and a tail of flags, as words of four bytes."""

    flat: Tensor
    """1-D int32."""
    gathered: Tensor
    """Every rank's `flat`, one after the other."""
    value_words: int = 0
    """Number of words that are values; they are the first ones."""

    def phases(self, group: dist.ProcessGroup) -> Works:
        """Gather every rank's elements, as in LAGS-SGD and DGC: every rank adds them up by itself."""
        return gather(self.gathered, self.flat, group)


def naive_all_gather(message: Packed, group: dist.ProcessGroup) -> Works:
    """Gather values and indices separately, each with its own start-up: CommLib's NaiveAG, to compare with."""
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
    """One rank's encoded message: rows of bytes of one length, one for each owner of a part."""

    def __init__(
        self, ranks: int, row_bytes: int, device: torch.device, narrow: Callable[[Tensor, Tensor], None]
    ) -> None:
        """Lay out rows of zeros; `narrow(received, own)` adds up rows of shape (ranks, row_bytes) and fills the row of
        the sum, (1, row_bytes).
        """
        self.rows = torch.zeros(ranks, row_bytes, dtype=torch.uint8, device=device)
        """Bytes that this rank sends; row r goes to rank r."""
        self.received, self.gathered = torch.zeros_like(self.rows), torch.zeros_like(self.rows)
        """Rows of this rank's part from every rank; and those of the sums of all parts."""
        self.own = torch.zeros_like(self.rows[:1])
        self._narrow = narrow
        self.peers: list[int] | None = None
        """Owners that get rows of this rank; None: all."""

    def send_among(self, peers: Sequence[int]) -> None:
        """Send rows to these owners alone, this rank among them, and get theirs; all ranks gather all sums. Ranks of
        other peers send what this one does not.
        """
        self.peers, self.received = list(peers), self.received[: len(peers)].clone()

    def hold(self, *, held: bool) -> None:
        """Allocate the rows, zeros, or free them until a step that is far off."""
        for rows in (self.rows, self.received, self.gathered, self.own):
            rows.untyped_storage().resize_(rows.numel() if held else 0)
            if held:
                rows.zero_()

    def narrow(self) -> None:
        """Encode the sum of the received rows, between the two phases."""
        self._narrow(self.received, self.own)

    def phases(self, group: dist.ProcessGroup) -> Works:
        """Send all-to-all, sum, and all-gather: a ring all-reduce's bytes in the format of `wire`, whose sums are
        wider.
        """
        sent = self.rows if self.peers is None else self.rows[self.peers]
        yield from all_to_all(self.received.view(-1), sent.view(-1), group, self.peers)
        self.narrow()
        yield from gather(self.gathered.view(-1), self.own.view(-1), group)


@dataclass(eq=False)
class Factored:
    """One rank's factors of matrices, and what it sends as it is; 1-D tensors that become their sums over ranks."""

    left: Tensor
    right: Tensor
    """Sent after `left`."""
    project: Callable[[], None]
    """Fills `right` when the sum of `left` is here."""
    subtract: Callable[[], None]
    """Called while `right` is sent."""

    def phases(self, group: dist.ProcessGroup) -> Works:
        """All-reduce left factors, then right ones, which need the sums of the left."""
        if self.left.numel():
            yield dist.all_reduce(self.left, group=group, async_op=True)
            self.project()
        if self.right.numel():
            work = dist.all_reduce(self.right, group=group, async_op=True)
            self.subtract()
            yield work


def by_message(message: Any, group: dist.ProcessGroup) -> Works:
    """Start the phases that the message itself knows, `message.phases(group)`."""
    return message.phases(group)  # type: ignore[no-any-return]
