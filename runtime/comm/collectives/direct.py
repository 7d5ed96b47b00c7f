"""Collectives that are one or two calls of the backend, for whatever a bucket sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from runtime.comm.collectives.phases import Vector
from runtime.torch_compat import all_gather_single


class LibraryAllReduce:
    """The backend's own all-reduce, by whatever algorithm it chooses."""

    def run(self, message: Vector, group: dist.ProcessGroup) -> Iterator[dist.Work]:
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


class SparseFlat:
    """The flat sparse all-reduce of LAGS-SGD and DGC: what is gathered is added up by every rank for itself."""

    def run(self, message: Packed, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        yield all_gather_single(message.gathered, message.flat, group=group, async_op=True)


class NaiveAllGather:
    """Values and indices gathered apart, each with its own start-up: CommLib's NaiveAG, to compare with."""

    def run(self, message: Packed, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        ranks, words = dist.get_world_size(group), message.value_words
        rows = message.gathered.view(ranks, -1)
        for start, stop in ((0, words), (words, message.flat.numel())):
            if start == stop:
                continue
            part = message.flat[start:stop]
            whole = part.new_empty(ranks * part.numel())
            yield all_gather_single(whole, part, group=group, async_op=True)
            rows[:, start:stop] = whole.view(ranks, -1)


class Phased(Protocol):
    """A message that knows what has to be started for it, one after the other."""

    def phases(self, group: dist.ProcessGroup) -> Iterator[dist.Work]: ...


class PushPull:
    """A parameter server: gradients are pushed to their owners (as all-to-all), and new weights are pulled."""

    def run(self, message: Phased, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        return message.phases(group)
