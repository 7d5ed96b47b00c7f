"""Collectives of several phases, each on the links inside nodes or on those between them; and what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.grid import Grid
from runtime.topology import LinkName, Topology
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


def scatter(vector: Tensor, received: Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup) -> Works:
    """Sends part r of `vector` to rank r; `received` becomes this rank's part from every rank, one after the other.

    Libraries' own reduce-scatters can take several times as long, and add up in an order of their own.

    Args:
        vector: 1-D.
        received: 1-D, as many elements as ranks have in this one's part together.
        sizes: elements of each part.
        rank: this rank's number in the group.
        group: the ranks.
    """
    width = vector.element_size()
    out = [sizes[rank] * width] * len(sizes)
    # As bytes: backends know few dtypes.
    yield all_to_all_single(
        received.view(torch.uint8), vector.view(torch.uint8), out, [size * width for size in sizes], group=group,
        async_op=True,
    )  # fmt: skip


def gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Works:
    """`whole` (1-D, ranks · n) becomes every rank's `part` (1-D, n), one after the other."""
    yield all_gather_single(whole.view(torch.uint8), part.view(torch.uint8), group=group, async_op=True)


def add_up(parts: Tensor, out: Tensor) -> Tensor:
    """`out` (1-D, n) becomes the sum of the rows of `parts`, (ranks, n), in order of rank."""
    out.copy_(parts[0])
    for row in parts[1:]:
        out += row
    return out
