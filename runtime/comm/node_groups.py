"""Groups for collectives on two kinds of link: the ranks of this node, and those of this place within their nodes."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.comm.topology import LinkName, Topology
from runtime.comm.world import World


@dataclass(frozen=True)
class Grid:
    """The groups of collectives on two kinds of link, as one rank is in them."""

    world: World
    topology: Topology
    inside: World
    """The ranks of this node."""
    between: World
    """The ranks of this place within their nodes."""

    @classmethod
    def make(cls, world: World, topology: Topology) -> Grid:
        """All ranks call this at the same place.

        Raises:
            CommunicationError: not all ranks came within the deadline.
        """
        return cls(world, topology, world.split(topology.nodes), world.split(topology.places))

    @property
    def nodes(self) -> int:
        return self.topology.count

    @property
    def per_node(self) -> int:
        """Ranks on each node."""
        return self.topology.per_node

    @property
    def flat_link(self) -> LinkName:
        """The links that a collective over all ranks keeps busy."""
        return "inter" if self.nodes > 1 else "intra"

    def leave(self) -> None:
        """Gives the groups back."""
        self.inside.leave()
        self.between.leave()
