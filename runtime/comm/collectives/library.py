"""The backend's own all-reduce, by whatever algorithm it chooses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from runtime.core.buckets import Message


class LibraryAllReduce:
    """`torch.distributed.all_reduce` with SUM."""

    def run(self, message: Message, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """See `Collective.run`."""
        yield dist.all_reduce(message.flat, group=group, async_op=True)
