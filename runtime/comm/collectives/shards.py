"""Collectives that are dense inside nodes, and send less than all between them.

1. reduce-scatter inside the node: each rank has a shard of the node's sum
2. a residual may be added to it, and what is sent of the shard is chosen, or encoded
3. that goes between the ranks of one place: sums of shards over all nodes
4. all-gather of the shards inside the node

HiTopKComm sends the largest elements, which are gathered, in step 4 too where these are fewer bytes (CommLib: Shi et
al., MLSys 2021, Algorithm 2). A 2D torus of narrow dtypes between nodes sends all elements of the shard in two shots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from runtime.comm.collectives.direct import Narrowed, Packed
from runtime.comm.collectives.phases import Phase, Works, gather, present, reduce_scatter
from runtime.comm.topology import Topology
from runtime.comm.world import Grid


@dataclass(eq=False)
class Shard:
    """A bucket's message, and the memory for what is received."""

    vector: Tensor
    """This rank's gradients, 1-D."""
    received: Tensor
    """This rank's shard of those of the node's ranks, in order of rank. Shape (ranks of the node, elements)."""
    summed: Tensor
    """Their sum. Shape (elements,)."""
    tail: Tensor
    """Small integers that are sent behind the gradients. Shape (tail,)."""
    tails: Tensor
    """Tails of all ranks of the node. Shape (ranks of the node, tail)."""
    between: Packed | Narrowed
    """Message to the ranks of the cross-node group: the shard, and the tail of the node."""
    own: Tensor
    """Part of this rank that the node's ranks gather: the sum of the shard over all nodes, or its selected elements."""
    whole: Tensor
    """Every shard's, one after the other."""
    fill: Callable[[], None]
    """Fills `between` when `summed` is there."""
    add_nodes: Callable[[], None]
    """Fills `own` when `between` has come."""


def shard_phases(name: str, topology: Topology) -> tuple[Phase, ...]:
    """Return the phases of messages that are `Shard`s; `name`: of the phase between nodes."""
    first, second = Phase("reduce_scatter", "intra", _scatter), Phase(name, "inter", _exchange)
    return present([first, second, Phase("all_gather", "intra", _gather)], topology)


def _exchange(message: Shard, grid: Grid) -> Works:
    yield from message.between.phases(grid.between.process_group)
    message.add_nodes()


def _scatter(message: Shard, grid: Grid) -> Works:
    group = grid.inside.process_group
    if message.vector.numel():
        yield from reduce_scatter(message.vector, message.received, message.summed, group)
    if message.tail.numel():
        yield from gather(message.tails.view(-1), message.tail, group)
    message.fill()


def _gather(message: Shard, grid: Grid) -> Works:
    if message.whole.numel():
        yield from gather(message.whole, message.own, grid.inside.process_group)
