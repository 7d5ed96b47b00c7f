"""The backend's own all-reduce, by whatever algorithm it chooses."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


class LibraryAllReduce:
    """`torch.distributed.all_reduce` with SUM."""

    def start(self, flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """See `Collective.start`."""
        work: dist.Work = dist.all_reduce(flat, group=group, async_op=True)
        return work
