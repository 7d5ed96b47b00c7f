"""Collectives of several phases, each on the links inside nodes or on those between them; and what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.collectives.exchange import all_gather, exchange
from runtime.comm.topology import LinkName, Topology
from runtime.comm.world import Grid

Works = Iterator[dist.Work]
"""Works of a phase, started one after the other: the generator is resumed when the work that it yielded has ended."""


@dataclass(frozen=True)
class Phase:
    """One step of a collective, on intra-node or inter-node links."""

    name: str
    """`reduce_scatter`, `all_reduce` or `all_gather`."""
    link: LinkName
    run: Callable[[Any, Grid], Works]
    """(message, groups) → what is started; for what a message is see `Collective`."""


class Vector(Protocol):
    """Message of a dense collective."""

    flat: Tensor
    """1-D; becomes the sum over ranks."""
    scratch: Any
    """Memory that the collective keeps from step to step."""


def present(phases: Sequence[Phase], topology: Topology) -> tuple[Phase, ...]:
    """Return the phases of a collective in which more than one rank takes part."""
    many = {"intra": topology.ranks_per_node > 1, "inter": topology.num_nodes > 1}
    return tuple(phase for phase in phases if many[phase.link])


def share_of(numel: int, parts: int) -> int:
    """Return the elements of each part of a divided vector: the last parts may have fewer, or none."""
    return -(-numel // parts)


def bounds(numel: int, parts: int, part: int) -> tuple[int, int]:
    """Return (start, stop) of one part."""
    share = share_of(numel, parts)
    return min(numel, part * share), min(numel, (part + 1) * share)


def reduce_scatter(
    vector: Tensor, received: Tensor, out: Tensor, group: dist.ProcessGroup, sizes: Sequence[int] | None = None
) -> Works:
    """Fill `out` with this rank's part of the sum of all ranks' vectors, which are added up in order of rank.

    Libraries' own reduce-scatters can take several times as long, and add up in an order of their own.

    Args:
        vector: 1-D, of the same length on all ranks.
        received: memory for this rank's part of every rank's. Shape (ranks, elements of the part).
        out: 1-D; of a wider dtype than the vector's, if that is to be added up in.
        group: the ranks.
        sizes: elements of the vector that each rank adds up, in order of rank; default: as `bounds` says.
    """
    ranks, size_bytes = len(received), vector.itemsize
    limits = [bounds(vector.numel(), ranks, part) for part in range(ranks)]
    gives = [size * size_bytes for size in sizes or (stop - start for start, stop in limits)]
    gets = [received.shape[1] * size_bytes] * ranks
    # As bytes: backends know few dtypes.
    yield exchange(received.view(-1).view(torch.uint8), vector.view(torch.uint8), gets, gives, group)
    add_up(list(received), out)


def all_to_all(received: Tensor, given: Tensor, group: dist.ProcessGroup, peers: Sequence[int] | None = None) -> Works:
    """Send part r of `given` (1-D, ranks · n) to rank r; fill `received` (of the same shape) with the parts for this
    rank. With `peers`, this rank among them, parts are theirs alone, in their order.
    """
    given_bytes, everyone = given.view(torch.uint8), range(group.size())
    among = everyone if peers is None else peers
    each = [given_bytes.numel() // len(among) if rank in among else 0 for rank in everyone]
    yield exchange(received.view(torch.uint8), given_bytes, each, each, group)


def gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Works:
    """Fill `whole` (1-D, ranks · n) with every rank's `part` (1-D, n), one after the other."""
    yield all_gather(whole, part, group)


def by_owners(
    rows: Tensor, received: Tensor, own: Callable[[], Tensor], whole: Tensor, group: dist.ProcessGroup,
    peers: Sequence[int] | None = None,
) -> Works:  # fmt: skip
    """Send each owner its row, and gather what owners make of those that they receive.

    Args:
        rows: one for each rank, of one length.
        received: becomes the rows for this rank, of all ranks or of `peers`, in their order.
        own: returns what this owner makes of them. 1-D.
        whole: becomes what all owners have made, one after the other. 1-D; may be the memory of `rows`.
        group: the ranks.
        peers: ranks that exchange rows, this one among them, where others send the rest. None: all.
    """
    sent = rows if peers is None or len(peers) == len(rows) else rows[list(peers)]
    yield from all_to_all(received.view(-1), sent.view(-1), group, peers)
    yield from gather(whole, own(), group)


def add_up(rows: Sequence[Tensor], out: Tensor) -> None:
    """Fill `out`, which is none of them, with the sum of the rows of its shape, in their order and in its dtype."""
    first = 2 if len(rows) > 1 and rows[0].dtype == out.dtype else 1
    if first == 2:
        torch.add(rows[0], rows[1], out=out)  # one pass less
    else:
        out.copy_(rows[0])
    for row in rows[first:]:
        out += row
