"""Selected elements of every rank to every rank, values and indices as one message, by one all-gather."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist

from runtime.torch_compat import all_gather_single

if TYPE_CHECKING:
    from runtime.sparse.selected import Packed


class SparseFlat:
    """The flat sparse all-reduce of LAGS-SGD and DGC: what is gathered is added up by every rank for itself."""

    def run(self, message: Packed, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """See `Collective.run`."""
        yield all_gather_single(message.gathered, message.flat, group=group, async_op=True)
