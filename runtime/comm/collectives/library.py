"""The backend's own all-reduce, by whatever algorithm it chooses."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist

from runtime.comm.parcel import Vector


class LibraryAllReduce:
    """`torch.distributed.all_reduce` with SUM."""

    def run(self, message: Vector, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """See `Collective.run`."""
        yield dist.all_reduce(message.flat, group=group, async_op=True)
