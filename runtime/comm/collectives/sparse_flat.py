"""Selected elements of every rank to every rank, values and indices as one message, by one all-gather."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from runtime.torch_compat import all_gather_single


@dataclass(eq=False)
class Packed:
    """One rank's message: values, indices and a tail of flags, as words of four bytes."""

    flat: Tensor
    """1-D int32."""
    gathered: Tensor
    """Every rank's, one after the other."""
    value_words: int = 0
    """How many of the words, the first ones, are values."""


class SparseFlat:
    """The flat sparse all-reduce of LAGS-SGD and DGC: what is gathered is added up by every rank for itself."""

    def run(self, message: Packed, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """See `Collective.run`."""
        yield all_gather_single(message.gathered, message.flat, group=group, async_op=True)
