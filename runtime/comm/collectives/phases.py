"""Collectives of several phases, each on the links inside nodes or on those between them; and what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.node_groups import Grid
from runtime.comm.topology import LinkName, Topology
from runtime.torch_compat import all_gather_single, all_to_all_single

Works = Iterator[dist.Work]
"""What a phase starts, one after the other: the generator goes on when the work that it has given has ended."""


@dataclass(frozen=True)
class Phase:
    """One step of a collective on one kind of link."""

    name: str
    """`reduce_scatter`, `all_reduce` or `all_gather`."""
    link: LinkName
    run: Callable[[Any, Grid], Works]
    """(message, groups) → what is started; for what a message is see `Collective.run`."""


class PhasedCollective(Protocol):
    """Carries one message of a bucket to all ranks, in phases that other buckets' phases may come between."""

    def phases(self, topology: Topology) -> tuple[Phase, ...]:
        """The phases, in order; those of a single rank or a single node are left out."""
        ...


def present(phases: Sequence[Phase], topology: Topology) -> tuple[Phase, ...]:
    """Of the phases of a collective, those in which more than one rank takes part."""
    many = {"intra": topology.per_node > 1, "inter": topology.count > 1}
    return tuple(phase for phase in phases if many[phase.link])


def share_of(numel: int, parts: int) -> int:
    """Elements of each part of a vector that is divided: the last parts may have fewer, or none."""
    return -(-numel // parts)


def bounds(numel: int, parts: int, part: int) -> tuple[int, int]:
    """(start, stop) of one part."""
    share = share_of(numel, parts)
    return min(numel, part * share), min(numel, (part + 1) * share)


class Scatter:
    """Of a vector every rank of a group gets its part, from every other one: a reduce-scatter before the adding up.

    Libraries' own reduce-scatters can take several times as long, and add up in an order of their own; what a rank
    keeps for itself is not copied.
    """

    def __init__(self, vector: Tensor, parts: int, rank: int) -> None:
        """`vector` (1-D) is divided into as many parts as the group has ranks; this one has number `rank`."""
        self.vector, self.rank = vector, rank
        self.limits = [bounds(vector.numel(), parts, part) for part in range(parts)]
        self.start, self.stop = self.limits[rank]
        self.received = vector.new_zeros(parts - 1, self.stop - self.start)
        """This rank's part of the other ranks' vectors, in order of rank."""

    def operations(self, group: dist.ProcessGroup) -> list[dist.P2POp]:
        """What is sent and received; parts without elements are not."""
        rows, operations = iter(self.received), []
        for peer, (start, stop) in enumerate(self.limits):
            if peer != self.rank:
                operations += exchange(self.vector[start:stop], next(rows), peer, group)
        return operations

    @property
    def rows(self) -> list[Tensor]:
        """This rank's part of every rank's vector, in order of rank; all have been received."""
        rows = list(self.received)
        return [*rows[: self.rank], self.vector[self.start : self.stop], *rows[self.rank :]]


def exchange(given: Tensor, received: Tensor, peer: int, group: dist.ProcessGroup) -> list[dist.P2POp]:
    """Sends to a rank of the group and receives from it; what has no elements does not travel."""
    # As bytes: backends know few dtypes.
    kinds = ((dist.isend, given), (dist.irecv, received))
    return [dist.P2POp(k, t.view(torch.uint8), group=group, group_peer=peer) for k, t in kinds if t.numel()]


def start(operations: list[dist.P2POp]) -> Works:
    """Starts all of them at once."""
    if operations:
        yield from dist.batch_isend_irecv(operations)


def all_to_all(received: Tensor, given: Tensor, group: dist.ProcessGroup) -> Works:
    """Part r of `given` (1-D, ranks · n) goes to rank r; `received` (likewise) becomes what ranks gave this one."""
    # As bytes: backends know few dtypes.
    yield all_to_all_single(received.view(torch.uint8), given.view(torch.uint8), group=group, async_op=True)


def gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Works:
    """`whole` (1-D, ranks · n) becomes every rank's `part` (1-D, n), one after the other."""
    yield all_gather_single(whole.view(torch.uint8), part.view(torch.uint8), group=group, async_op=True)


def add_up(rows: Sequence[Tensor], out: Tensor) -> Tensor:
    """`out` becomes the sum of the rows, which have its shape, in their order; it may be none of them."""
    if len(rows) == 1:
        return out.copy_(rows[0])
    torch.add(rows[0], rows[1], out=out)
    for row in rows[2:]:
        out += row
    return out
