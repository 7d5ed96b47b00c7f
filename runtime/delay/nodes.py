"""Workers that are nodes of several ranks: gradients are averaged inside a node, and pushed between nodes.

    bucket complete  ─▶ inside the node each rank gets, and adds up, what ranks with its place own (reduce-scatter);
                        it leaves for them between nodes, and meanwhile the node's average comes to all of its ranks
    pull             ─▶ between nodes each rank gets the weights that ranks with its place own, and spreads them inside

Three queues carry that, each in an order of its own that is the same on all of its ranks: averages, pushes and pulls
between nodes, and what is pulled inside nodes, which so never stands before an average that backward's end waits for.
What one of them has carried is handed to the next one by whoever notices that it has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.by_device import make_communicator
from runtime.comm.collectives.direct import by_message
from runtime.comm.collectives.phases import add_up, gather
from runtime.comm.communicator import CommTiming, Communicator, Payload, nothing
from runtime.comm.topology import Topology
from runtime.comm.world import Grid, World
from runtime.delay.pushes import Rows, copy_into_rows
from runtime.delay.server import Shard
from runtime.plan import Plan


@dataclass(frozen=True)
class NodeGroups:
    """The groups of one rank."""

    grid: Grid
    spread: World
    """The ranks of this node once more: what is pulled crosses no average."""

    @classmethod
    def make(cls, world: World, topology: Topology) -> NodeGroups:
        """Make the groups; all ranks call this at the same place."""
        return cls(Grid.make(world, topology), world.split(topology.nodes))

    def leave(self) -> None:
        self.grid.leave()
        self.spread.leave()


class NodeLinks:
    """The three queues. As a `Communicator` it is the one between nodes, and waits for all of them."""

    def __init__(self, groups: NodeGroups, buckets: int, device: torch.device) -> None:
        grid = groups.grid
        self.inside, self.between, self.spread = (
            make_communicator(part, [by_message] * buckets, device, grid.world, across_steps=True)
            for part in (grid.inside, grid.between, groups.spread)
        )

    def launch(self, bucket: Payload, sent: CommTiming, prepare: Callable[[], None] = nothing) -> None:
        """See `Communicator.launch`: between nodes."""
        self.between.launch(bucket, sent, prepare)

    def wait(self, until: CommTiming | None = None) -> None:
        """See `Communicator.wait`: for all of it, or for a message between nodes and what it has brought."""
        if until is None:
            self.inside.wait()
        self.between.wait(until)
        self.spread.wait()

    def close(self) -> None:
        for one in (self.inside, self.between, self.spread):
            one.close()


class IntraNodeAllReduce:
    """The gradients of one message, inside a node."""

    def __init__(self, shard: Shard, ranks_per_node: int, metadata_bytes: int) -> None:
        flat = shard.message.flat
        self._shard, self._whole = shard, shard.whole()
        self.rows = Rows(ranks_per_node, shard.node_share * flat.dtype.itemsize, metadata_bytes, flat.device)
        self._sent, self._received = (
            self.rows.body(of, flat.dtype, shard.node_share) for of in (self.rows.sent, self.rows.received)
        )
        self.then: Callable[[], None] = nothing
        """Called when this rank has its part of the sum."""

    def pack(self) -> None:
        # The gradients are divided by the ranks of the node already.
        copy_into_rows(self._sent, self._shard.message.flat[: self._shard.numel])

    def phases(self, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        yield from self.rows.phases(group)
        mine = self._shard.of_node
        assert mine is not None
        add_up(list(self._received), mine)
        self.then()
        yield from gather(self._whole, mine, group)
        self._shard.message.flat[: self._shard.numel] = self._whole[: self._shard.numel]


@dataclass(frozen=True, eq=False)
class IntraNodeBroadcast:
    """Weights that ranks with this rank's place own, sent to the node's other ranks."""

    whole: Tensor
    """Memory of all weights. Shape (ranks · share,)."""
    part: Tensor
    """Shape (node_share,)."""

    def phases(self, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        return gather(self.whole, self.part, group)


def communicator_of(groups: NodeGroups | None, world: World, buckets: int, device: torch.device) -> Communicator:
    """Return what carries a delay: between nodes where these are the workers, else between ranks."""
    if groups is not None:
        return NodeLinks(groups, buckets, device)
    return make_communicator(world, [by_message] * buckets, device, across_steps=True)


def workers_of(plan: Plan, world: World) -> Topology:
    """Return the nodes that are a plan's workers: of one rank each where it has as many nodes as ranks."""
    if (plan.world.nodes or world.ranks) == world.ranks:
        return Topology.of_one_rank_each(world.ranks)
    assert isinstance(world.topology, Topology)  # else the plan has been refused
    return world.topology
