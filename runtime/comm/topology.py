"""The ranks of each node: hierarchical collectives need them, and all ranks have to agree on them.

A launcher sets them (torchrun's GROUP_RANK and LOCAL_WORLD_SIZE; without one, machines differ by their names), or
a `DeviceMesh` of two dimensions has them, whose rows are nodes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from runtime.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LinkName = Literal["intra", "inter"]
"""The links inside a node, and those between nodes."""
Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class NodeInfo:
    """One rank's knowledge of where it runs."""

    node: str
    local_ranks: str | None = None
    """Number of ranks that the launcher reports to have started on that node; None: it reported none, or not all train
    together.
    """
    mesh: Rows | None = None
    """Ranks by node, as a DeviceMesh says."""


@dataclass(frozen=True)
class Topology:
    """Ranks by node; every node has as many, in ascending order."""

    nodes: Rows

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @classmethod
    def of_one_rank_each(cls, ranks: int) -> Topology:
        """Return a topology in which every rank is a node of its own."""
        return cls(tuple((rank,) for rank in range(ranks)))

    @property
    def ranks_per_node(self) -> int:
        return len(self.nodes[0])

    def local_rank(self, rank: int) -> int:
        return next(ranks.index(rank) for ranks in self.nodes if rank in ranks)

    @property
    def cross_node_groups(self) -> Rows:
        """Ranks by their place within their node: those that exchange a shard between nodes."""
        return tuple(tuple(sorted(ranks)) for ranks in zip(*self.nodes, strict=True))

    @property
    def owners(self) -> tuple[int, ...]:
        """Numbers of the ranks when they are counted by local rank: first ones of all nodes, then second ones."""
        numbers = {
            rank: number for number, rank in enumerate(rank for ranks in self.cross_node_groups for rank in ranks)
        }
        return tuple(numbers[rank] for rank in range(len(numbers)))

    def __str__(self) -> str:
        return f"{self.num_nodes} nodes of {self.ranks_per_node} ranks"


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name of this process's machine: torchrun's node number if it started the ranks, else the host's."""
    return environment.get("GROUP_RANK") or socket.gethostname()


def node_info(group: dist.ProcessGroup | None = None, mesh: DeviceMesh | None = None) -> NodeInfo:
    """Return what this rank of a group (default: all) knows. Raises InputError for a mesh of other ranks."""
    node = node_name()
    if mesh is None:
        whole = group is None or dist.get_world_size(group) == dist.get_world_size()
        return NodeInfo(node, os.environ.get("LOCAL_WORLD_SIZE") if whole else None)
    if mesh.mesh.ndim != 2:
        raise InputError(
            f"mesh: found a DeviceMesh of {mesh.mesh.ndim} dimensions, expected two, nodes by ranks of a node: such as "
            f'init_device_mesh("cuda", (nodes, ranks_per_node))'
        )
    known = dist.get_process_group_ranks(group) if group is not None else list(range(mesh.mesh.numel()))
    ranks = mesh.mesh.tolist()
    if sorted(rank for row in ranks for rank in row) != sorted(known):
        raise InputError(
            f"mesh: found a DeviceMesh of the ranks {ranks}, expected each of {sorted(known)} once: the ranks that "
            f"train together"
        )
    return NodeInfo(node, mesh=tuple(sorted(tuple(sorted(known.index(rank) for rank in row)) for row in ranks)))


def find_topology(everyone: Sequence[NodeInfo]) -> Topology | str:
    """Return the topology, or what is wrong with it, from what every rank knows: alike on all ranks."""
    meshes = {one.mesh for one in everyone}
    if len(meshes) > 1:
        listed = ", ".join(f"rank {rank}: {one.mesh}" for rank, one in list(enumerate(everyone))[:4])
        return f"ranks were given different meshes ({listed}); give all the same"
    [mesh] = meshes
    if mesh is not None:
        return Topology(mesh)
    members: dict[str, list[int]] = {}
    for rank, one in enumerate(everyone):
        members.setdefault(one.node, []).append(rank)
    counts = {node: len(ranks) for node, ranks in members.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"node {node} has {count}" for node, count in list(counts.items())[:8])
        return f"the nodes are uneven: {listed}; expected as many ranks on each: start as many, or give a mesh"
    for rank, one in enumerate(everyone):
        if one.local_ranks not in (None, str(counts[one.node])):
            return (
                f"rank {rank} was told that its node has {one.local_ranks} ranks (LOCAL_WORLD_SIZE), while "
                f"{counts[one.node]} say that they are on node {one.node} (GROUP_RANK); start all with the same "
                f"launcher, or give a mesh"
            )
    return Topology(tuple(tuple(ranks) for ranks in members.values()))


def nodes_problem(what: str, nodes: Sequence[int], ranks: int, topology: Topology | str | None) -> str | None:
    """Return why ranks cannot do what a plan has for its nodes, or None.

    Args:
        what: the plan has, as a clause.
        nodes: numbers of nodes that can do it, the plan's first; none: any number can.
        ranks: of the plan.
        topology: the nodes that there are, or the reason why they are not known.
    """
    if not isinstance(topology, Topology):
        return f"{what}, but {topology or 'ranks have not agreed on their nodes; attach with this plan'}"
    if not nodes or topology.num_nodes in nodes:
        return None
    return (
        f"{what}, but found {topology}; expected {nodes[0]} of {ranks // nodes[0]} ranks: start that number, give a "
        f"mesh, or make a plan for this cluster"
    )
