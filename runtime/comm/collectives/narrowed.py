"""An all-reduce whose messages are narrower than its sums: every rank adds up the part that it owns."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from runtime.comm.collectives.phases import gather, reduce_scatter, share_of


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
        """The sum, narrowed."""
        self.gathered = torch.zeros_like(self.flat)
        """The sums of all parts."""
        self.rank = 0

    def narrow(self) -> None:
        """Between the two phases."""
        self.own.copy_(self.total)
        self.total -= self.own


class NarrowedAllReduce:
    """All-to-all, sums, all-gather: the bytes of a ring all-reduce in the narrow dtype."""

    def run(self, message: Narrowed, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        message.rank = dist.get_rank(group)
        yield from reduce_scatter(message.flat, message.received, message.total, group)
        message.narrow()
        yield from gather(message.gathered, message.own, group)
