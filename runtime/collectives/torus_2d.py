"""2D-torus all-reduce: reduce-scatter inside the node, all-reduce of each shard between nodes, all-gather inside.

Between nodes a rank sends 2(m−1)/m of its shard, so that a node sends what one rank would in a flat all-reduce over
nodes. Source: Mikami et al. (arXiv 1811.05233), the dense rival in CommLib (Shi et al., MLSys 2021).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from runtime.collectives.phases import Phase, Works, add_up, bounds, gather, present, scatter, share_of
from runtime.grid import Grid
from runtime.topology import Topology

if TYPE_CHECKING:
    from runtime.buckets import Message


class Torus2d:
    """See the module's text. Shards divide a message evenly but for the last ones."""

    def phases(self, topology: Topology) -> tuple[Phase, ...]:
        """See `PhasedCollective.phases`."""
        return present(
            [
                Phase("reduce_scatter", "intra", _scatter),
                Phase("all_reduce", "inter", _all_reduce),
                Phase("all_gather", "intra", _gather),
            ],
            topology,
        )


class _Shards:
    """Memory of a message, kept from step to step."""

    def __init__(self, flat: Tensor, grid: Grid) -> None:
        parts, rank = grid.per_node, grid.inside.rank
        limits = [bounds(flat.numel(), parts, part) for part in range(parts)]
        self.flat = flat
        self.sizes = [stop - start for start, stop in limits]
        share = share_of(flat.numel(), parts)
        self.whole = flat.new_zeros(parts * share)
        """What comes from the ranks of this node; then, of a message that ranks do not divide, all shards."""
        self.part = flat.new_zeros(share)
        self.mine = self.part[: self.sizes[rank]]
        """This rank's shard."""
        self.even = parts * share == flat.numel()


def _shards(message: Message, grid: Grid) -> _Shards:
    known = message.scratch
    if not isinstance(known, _Shards) or known.flat is not message.flat:
        known = message.scratch = _Shards(message.flat, grid)
    return known


def _scatter(message: Message, grid: Grid) -> Works:
    shards, group = _shards(message, grid), grid.inside.group
    assert group is not None
    received = shards.whole[: grid.per_node * shards.mine.numel()]
    yield from scatter(message.flat, received, shards.sizes, grid.inside.rank, group)
    add_up(received.view(grid.per_node, -1), shards.mine)


def _all_reduce(message: Message, grid: Grid) -> Works:
    mine = _shards(message, grid).mine if grid.per_node > 1 else message.flat
    if mine.numel():  # alike on all ranks of this place
        yield dist.all_reduce(mine, group=grid.between.group, async_op=True)


def _gather(message: Message, grid: Grid) -> Works:
    shards, group = _shards(message, grid), grid.inside.group
    assert group is not None
    yield from gather(message.flat if shards.even else shards.whole, shards.part, group)
    if not shards.even:
        message.flat.copy_(shards.whole[: message.flat.numel()])
