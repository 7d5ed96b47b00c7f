"""An all-reduce whose messages are narrower than its sums: every rank adds up the part that it owns."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from runtime.torch_compat import all_gather_single, all_to_all_single


class Narrowed:
    """One rank's message, padded so that every rank owns as much."""

    def __init__(self, numel: int, ranks: int, wire: torch.dtype, wide: torch.dtype, device: torch.device) -> None:
        self.ranks, self.share = ranks, -(-numel // ranks)
        self.flat = torch.zeros(ranks * self.share, dtype=wire, device=device)
        """All that this rank sends, 1-D; part r goes to rank r."""
        self.received = torch.zeros_like(self.flat)
        """This rank's part from every rank."""
        self.own = torch.zeros(self.share, dtype=wire, device=device)
        """The sum of this rank's part."""
        self.lost = torch.zeros(self.share, dtype=wide, device=device)
        """What narrowing the sum has lost."""
        self.gathered = torch.zeros_like(self.flat)
        """The sums of all parts."""
        self.rank = 0

    def add_up(self) -> None:
        """Between the two phases: sums of this rank's part, in order of rank."""
        parts = self.received.view(self.ranks, -1)
        total = parts[0].to(self.lost.dtype)
        for rank in range(1, self.ranks):
            total += parts[rank]
        self.own.copy_(total)
        torch.sub(total, self.own, out=self.lost)


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
