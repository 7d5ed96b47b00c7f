"""An all-reduce whose messages are narrower than its sums: every rank adds up the part that it owns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from runtime.torch_compat import all_gather_single, all_to_all_single

if TYPE_CHECKING:
    from runtime.sparse.narrowed import Narrowed


class NarrowedAllReduce:
    """All-to-all, sums, all-gather: the bytes of a ring all-reduce in the narrow dtype."""

    def run(self, message: Narrowed, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """See `Collective.run`."""
        message.rank = dist.get_rank(group)
        received, flat, gathered, own = (
            tensor.view(torch.uint8) for tensor in (message.received, message.flat, message.gathered, message.own)
        )  # as bytes: backends know few dtypes
        yield all_to_all_single(received, flat, group=group, async_op=True)
        message.add_up()
        yield all_gather_single(gathered, own, group=group, async_op=True)
