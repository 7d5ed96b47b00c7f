"""HiTopKComm (CommLib: Shi et al., MLSys 2021, Algorithm 2): dense inside nodes, the largest elements between them.

1. reduce-scatter inside the node: each rank has a shard of the node's sum
2. its residual is added to it, and the largest elements are selected
3. all-gather of these between the ranks of one place: sums of shards over all nodes
4. all-gather of the shards inside the node: as they are, or as the selected elements where these are fewer bytes
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.comm.collectives.phases import Phase, Works, gather, present, start
from runtime.comm.node_groups import Grid
from runtime.comm.topology import Topology

if TYPE_CHECKING:
    from runtime.sparse.hitopk import Shard


class HiTopK:
    """The network's part of it; what is added up and selected is `runtime.sparse.hitopk`'s."""

    def phases(self, topology: Topology) -> tuple[Phase, ...]:
        """See `PhasedCollective.phases`."""
        return present(
            [
                Phase("reduce_scatter", "intra", _scatter),
                Phase("all_gather", "inter", _exchange),
                Phase("all_gather", "intra", _gather),
            ],
            topology,
        )


def _scatter(message: Shard, grid: Grid) -> Works:
    group = grid.inside.group
    assert group is not None
    yield from start(message.operations(group))
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
