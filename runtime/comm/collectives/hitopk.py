"""HiTopKComm (CommLib: Shi et al., MLSys 2021, Algorithm 2): dense inside nodes, the largest elements between them.

1. reduce-scatter inside the node: each rank has a shard of the node's sum
2. its residual is added to it, and the largest elements are selected
3. all-gather of these between the ranks of one place: sums of shards over all nodes
4. all-gather of the shards inside the node: as they are, or as the selected elements where these are fewer bytes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from runtime.comm.collectives.phases import Phase, Works, gather, present, reduce_scatter
from runtime.comm.topology import Topology
from runtime.comm.world import Grid


@dataclass(eq=False)
class Shard:
    """What a bucket gives, and the memory for what comes back."""

    vector: Tensor
    """This rank's gradients, 1-D."""
    received: Tensor
    """This rank's shard of those of the node's ranks, in order of rank. Shape (ranks of the node, elements)."""
    summed: Tensor
    """Their sum. Shape (elements,)."""
    tail: Tensor
    """What is sent behind the gradients. Shape (tail,)."""
    tails: Tensor
    """That of every rank of the node. Shape (ranks of the node, tail)."""
    selected: Tensor
    """Values, indices within the shard, and the tail, as words of four bytes (int32)."""
    selected_everywhere: Tensor
    """Every node's, one after the other."""
    own: Tensor
    """What the ranks of the node need of this shard: the elements selected on all nodes, or their sum."""
    whole: Tensor
    """Every shard's, one after the other."""
    select: Callable[[], None]
    """Fills `selected` when `summed` is there."""
    add_nodes: Callable[[], None]
    """Fills `own` when `selected_everywhere` is there."""


def hitopk_phases(topology: Topology) -> tuple[Phase, ...]:
    """The phases of HiTopKComm; what is selected is `runtime.sparse.hitopk`'s affair."""
    first, second = Phase("reduce_scatter", "intra", _scatter), Phase("all_gather", "inter", _exchange)
    return present([first, second, Phase("all_gather", "intra", _gather)], topology)


def _scatter(message: Shard, grid: Grid) -> Works:
    group = grid.inside.group
    assert group is not None
    yield from reduce_scatter(message.vector, message.received, message.summed, group)
    if message.tail.numel():
        yield from gather(message.tails.view(-1), message.tail, group)
    message.select()


def _exchange(message: Shard, grid: Grid) -> Works:
    group = grid.between.group
    assert group is not None
    yield from gather(message.selected_everywhere, message.selected, group)
    message.add_nodes()


def _gather(message: Shard, grid: Grid) -> Works:
    group = grid.inside.group
    assert group is not None
    yield from gather(message.whole, message.own, group)
