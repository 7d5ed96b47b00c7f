"""2D-torus all-reduce: reduce-scatter inside the node, all-reduce of each shard between nodes, all-gather inside.

Between nodes a rank sends 2(m−1)/m of its shard, so that a node sends what one rank would in a flat all-reduce over
nodes. Source: Mikami et al. (arXiv 1811.05233), the dense rival in CommLib (Shi et al., MLSys 2021).
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from runtime.comm.collectives.phases import Phase, Vector, Works, bounds, gather, present, reduce_scatter, share_of
from runtime.comm.topology import Topology
from runtime.comm.world import Grid


def torus_2d_phases(topology: Topology) -> tuple[Phase, ...]:
    """Return the phases of the 2D torus. Shards divide a message evenly but for the last ones."""
    first, second = Phase("reduce_scatter", "intra", _scatter), Phase("all_reduce", "inter", _all_reduce)
    return present([first, second, Phase("all_gather", "intra", _gather)], topology)


class _Shards:
    """Memory of a message, kept from step to step."""

    def __init__(self, flat: Tensor, grid: Grid) -> None:
        parts = grid.topology.ranks_per_node
        self.flat = flat
        share, (start, stop) = share_of(flat.numel(), parts), bounds(flat.numel(), parts, grid.inside.rank)
        self.received = flat.new_zeros(parts, stop - start)
        self.part = flat.new_zeros(share)
        self.mine = self.part[: stop - start]
        self.whole = flat if parts * share == flat.numel() else flat.new_zeros(parts * share)
        """All shards: the message itself, where ranks divide it."""


def _shards(message: Vector, grid: Grid) -> _Shards:
    known = message.scratch
    if not isinstance(known, _Shards) or known.flat is not message.flat:
        known = message.scratch = _Shards(message.flat, grid)
    return known


def _scatter(message: Vector, grid: Grid) -> Works:
    shards = _shards(message, grid)
    yield from reduce_scatter(message.flat, shards.received, shards.mine, grid.inside.process_group)


def _all_reduce(message: Vector, grid: Grid) -> Works:
    mine = _shards(message, grid).mine if grid.topology.ranks_per_node > 1 else message.flat
    if mine.numel():  # alike on all ranks of this place
        yield dist.all_reduce(mine, group=grid.between.group, async_op=True)


def _gather(message: Vector, grid: Grid) -> Works:
    shards = _shards(message, grid)
    yield from gather(shards.whole, shards.part, grid.inside.process_group)
    if shards.whole is not message.flat:
        message.flat.copy_(shards.whole[: message.flat.numel()])
