"""Collectives that are one or two calls of the backend, for whatever a bucket sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.collectives.phases import Vector, Works, gather, reduce_scatter, share_of


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
    """One rank's message, padded so that every rank owns as much."""

    def __init__(self, numel: int, ranks: int, wire: torch.dtype, wide: torch.dtype, device: torch.device) -> None:
        self.share = share_of(numel, ranks)
        self.flat = torch.zeros(ranks * self.share, dtype=wire, device=device)
        """All that this rank sends, 1-D; part r goes to rank r."""
        self.received = torch.zeros_like(self.flat).view(ranks, -1)
        """This rank's part from every rank."""
        self.total = torch.zeros(self.share, dtype=wide, device=device)
        """The sum of this rank's part; then what narrowing it has lost."""
        self.own = torch.zeros(self.share, dtype=wire, device=device)
        self.gathered = torch.zeros_like(self.flat)
        self.rank = 0

    def narrow(self) -> None:
        """Between the two phases."""
        self.own.copy_(self.total)
        self.total -= self.own


def narrowed_all_reduce(message: Narrowed, group: dist.ProcessGroup) -> Works:
    """All-to-all, sums, all-gather: a ring all-reduce's bytes in the narrow dtype of `wire`, whose sums are wider."""
    message.rank = dist.get_rank(group)
    yield from reduce_scatter(message.flat, message.received, message.total, group)
    message.narrow()
    yield from gather(message.gathered, message.own, group)


def push_pull(message: Any, group: dist.ProcessGroup) -> Works:
    """What a message knows by itself to have to be started: `message.phases(group)`."""
    return message.phases(group)  # type: ignore[no-any-return]
