"""Selected elements of every rank to every rank, values and indices apart: CommLib's NaiveAG, to compare with."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist

from runtime.comm.collectives.sparse_flat import Packed
from runtime.torch_compat import all_gather_single


class NaiveAllGather:
    """Two gathers, one after the other; each starts up by itself."""

    def run(self, message: Packed, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """See `Collective.run`."""
        ranks, words = dist.get_world_size(group), message.value_words
        rows = message.gathered.view(ranks, -1)
        for start, stop in ((0, words), (words, message.flat.numel())):
            if start == stop:
                continue
            part = message.flat[start:stop]
            whole = part.new_empty(ranks * part.numel())
            yield all_gather_single(whole, part, group=group, async_op=True)
            rows[:, start:stop] = whole.view(ranks, -1)
