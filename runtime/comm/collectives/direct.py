"""Collectives that are one or two calls of the backend, for whatever a bucket sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.collectives.phases import Vector, Works, add_up, by_owners, gather, share_of
from runtime.comm.topology import Topology


def library_all_reduce(message: Vector, group: dist.ProcessGroup) -> Works:
    """All-reduce by the backend, with the algorithm that it chooses."""
    yield dist.all_reduce(message.flat, group=group, async_op=True)


@dataclass(eq=False)
class Packed:
    """Selected elements of one rank: values, indices and a tail of flags, as words of four bytes."""

    flat: Tensor
    """1-D int32."""
    gathered: Tensor
    """Every rank's `flat`, one after the other."""
    value_words: int = 0
    """Number of words that are values; they are the first ones."""
    nodes: Topology | None = None
    """Nodes whose ranks have the same words, which each node sends once; None: every rank sends its own."""
    _place: int = 0

    @property
    def copies(self) -> int:
        """Number of ranks that have the same words, of which `gathered` has one copy."""
        return 1 if self.nodes is None else self.nodes.ranks_per_node

    def send_once(self, topology: Topology, rank: int) -> None:
        """Send the words of a node once, whose ranks have the same: each of them sends a part. `gathered` becomes every
        node's words.
        """
        self.nodes, self._place = topology, topology.local_rank(rank)
        self.gathered = self.gathered[: topology.num_nodes * self.flat.numel()].clone()

    def phases(self, group: dist.ProcessGroup) -> Works:
        """Gather every rank's elements, as in LAGS-SGD and DGC: every rank adds them up by itself."""
        if self.nodes is None:
            yield from gather(self.gathered, self.flat, group)
            return
        nodes, parts, words = self.nodes.num_nodes, self.nodes.ranks_per_node, self.flat.numel()
        share = share_of(words, parts)
        padded = self.flat.new_zeros(parts * share)
        padded[:words] = self.flat
        whole = padded.new_empty(nodes * parts * share)
        yield from gather(whole, padded[self._place * share : (self._place + 1) * share], group)
        by_node = [rank for ranks in self.nodes.nodes for rank in ranks]
        self.gathered.view(nodes, words).copy_(whole.view(-1, share)[by_node].view(nodes, -1)[:, :words])


def naive_all_gather(message: Packed, group: dist.ProcessGroup) -> Works:
    """Gather values and indices separately, each with its own start-up: CommLib's NaiveAG, to compare with. What ranks
    of a node send once is gathered together.
    """
    if message.nodes is not None:
        yield from message.phases(group)
        return
    ranks, words = dist.get_world_size(group), message.value_words
    rows = message.gathered.view(ranks, -1)
    for start, stop in ((0, words), (words, message.flat.numel())):
        if start == stop:
            continue
        part = message.flat[start:stop]
        whole = part.new_empty(ranks * part.numel())
        yield from gather(whole, part, group)
        rows[:, start:stop] = whole.view(ranks, -1)


class Narrowed:
    """One rank's encoded message: rows of bytes of one length, one for each owner of a part."""

    def __init__(
        self, ranks: int, row_bytes: int, device: torch.device, narrow: Callable[[Tensor, Tensor], None]
    ) -> None:
        """Lay out rows of zeros; `narrow(received, own)` adds up rows of shape (ranks, row_bytes) and fills the row of
        the sum, (1, row_bytes).
        """
        self.rows = torch.zeros(ranks, row_bytes, dtype=torch.uint8, device=device)
        """Bytes that this rank sends; row r goes to rank r."""
        self.received, self.gathered = torch.zeros_like(self.rows), torch.zeros_like(self.rows)
        """Rows of this rank's part from every rank; and those of the sums of all parts."""
        self.own = torch.zeros_like(self.rows[:1])
        self._narrow = narrow
        self.peers: Sequence[int] | None = None
        """Owners that get rows of this rank; None: all."""

    def send_once(self, topology: Topology, rank: int) -> None:
        """Send rows to the owners that have this rank's place on their nodes alone, and get theirs; all ranks gather
        all sums. Other ranks of the node, which have the same rows, send the others.
        """
        self.peers = topology.cross_node_groups[topology.local_rank(rank)]
        self.received = self.received[: len(self.peers)].clone()

    def hold(self, *, held: bool) -> None:
        """Allocate the rows, those that are sent as zeros, or free them until a step that is far off."""
        for rows in (self.rows, self.received, self.gathered, self.own):
            rows.untyped_storage().resize_(rows.numel() if held else 0)
        for rows in (self.rows, self.own) if held else ():
            rows.zero_()

    def narrow(self) -> Tensor:
        """Encode the sum of the received rows, between the two phases, and return it (1-D)."""
        self._narrow(self.received, self.own)
        return self.own.view(-1)

    def phases(self, group: dist.ProcessGroup) -> Works:
        """Send all-to-all, sum, and all-gather: a ring all-reduce's bytes in the format of `wire`, whose sums are
        wider.
        """
        return by_owners(self.rows, self.received, self.narrow, self.gathered.view(-1), group, self.peers)


@dataclass(eq=False)
class Factored:
    """One rank's factors of matrices, and what it sends as it is; 1-D tensors that become their sums over ranks."""

    left: Tensor
    right: Tensor
    """Sent after `left`."""
    project: Callable[[], None]
    """Fills `right` when the sum of `left` is here."""
    subtract: Callable[[], None]
    """Called while `right` is sent."""
    copies: int = 1
    """Number of ranks that have the same factors, of which sums have one copy."""
    _peers: Sequence[int] | None = None

    def send_once(self, topology: Topology, rank: int) -> None:
        """Send the factors of a node once, whose ranks have the same: they become sums over nodes. Ranks that have one
        place on their nodes add up parts of them.
        """
        self.copies = topology.ranks_per_node
        self._peers = topology.cross_node_groups[topology.local_rank(rank)]

    def phases(self, group: dist.ProcessGroup) -> Works:
        """All-reduce left factors, then right ones, which need the sums of the left."""
        if self.left.numel():
            yield from self._sum(self.left, group)
            self.project()
        if self.right.numel():
            works = self._sum(self.right, group)
            work = next(works)
            self.subtract()
            yield work
            yield from works

    def _sum(self, flat: Tensor, group: dist.ProcessGroup) -> Works:
        if self._peers is None:
            yield dist.all_reduce(flat, group=group, async_op=True)
            return
        ranks, share = group.size(), share_of(flat.numel(), group.size())
        whole, summed = flat.new_zeros(ranks * share), flat.new_empty(share)
        whole[: flat.numel()] = flat
        received = flat.new_empty(len(self._peers), share)

        def own() -> Tensor:
            add_up(list(received), summed)
            return summed

        yield from by_owners(whole.view(ranks, share), received, own, whole, group, self._peers)
        flat.copy_(whole[: flat.numel()])


def by_message(message: Any, group: dist.ProcessGroup) -> Works:
    """Start the phases that the message itself knows, `message.phases(group)`."""
    return message.phases(group)  # type: ignore[no-any-return]
