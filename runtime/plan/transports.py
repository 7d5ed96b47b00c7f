"""Transports: how the messages of a bucket reach all ranks, as a collective and its algorithm.

`TRANSPORTS` lists those that plans name. Their costs are in `planner.cost`, what executes them is in
`runtime.comm.collectives`. Imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Transport:
    """A collective and its algorithm, with the traits that planner and runtime ask for; equal where both names are.

    >>> str(TORUS_2D)
    'all_reduce/torus_2d'
    """

    collective: str
    algorithm: str
    exact: bool = field(default=False, compare=False, repr=False)
    """Whether it adds up elements as they are: a dense bucket sent by it is averaged up to the order of summation."""
    sparse: bool = field(default=False, compare=False, repr=False)
    """Whether it carries selected elements."""
    basic: bool = field(default=False, compare=False, repr=False)
    """Whether it is no topology of its own (`runtime.plan.combinations.TOPOLOGY`)."""
    staged: bool = field(default=False, compare=False, repr=False)
    """Whether its phases occupy intra-node or inter-node links; the others occupy the network as a whole."""
    hierarchical: bool = field(default=False, compare=False, repr=False)
    """Whether its phases are intra-node, inter-node and intra-node again."""
    stock: bool = field(default=False, compare=False, repr=False)
    """Whether it is the library's own all-reduce, which stock executors call."""
    tunable: bool = field(default=False, compare=False, repr=False)
    """Whether NCCL has the algorithm, so that its tuner can choose it."""
    point_to_point: bool = field(default=False, compare=False, repr=False)
    """Whether ranks send to single other ranks, which gloo does from host memory alone."""

    native: bool = field(default=False, compare=False, repr=False)
    """Whether the backend adds up in the wire's dtype."""

    @property
    def by_shards(self) -> bool:
        """Whether elements are selected from each rank's shard of its node's sum."""
        return self.sparse and self.hierarchical

    def __str__(self) -> str:
        return f"{self.collective}/{self.algorithm}"


LIBRARY = Transport("all_reduce", "library", exact=True, basic=True, stock=True)
TORUS_2D = Transport("all_reduce", "torus_2d", exact=True, staged=True, hierarchical=True)
TREE = Transport("all_reduce", "tree", exact=True, staged=True, tunable=True, point_to_point=True)
TWO_SHOT = Transport("all_reduce", "two_shot", basic=True)
NATIVE = Transport("all_reduce", "native", native=True)
FLAT = Transport("sparse", "flat", sparse=True, basic=True)
NAIVE_ALL_GATHER = Transport("sparse", "naive_all_gather", sparse=True)
HITOPK = Transport("sparse", "hitopk", sparse=True, staged=True, hierarchical=True)

TRANSPORTS: Mapping[tuple[str, str], Transport] = {
    (each.collective, each.algorithm): each
    for each in (LIBRARY, TORUS_2D, TREE, TWO_SHOT, NATIVE, FLAT, NAIVE_ALL_GATHER, HITOPK)
}
"""Registry: (collective, algorithm), as in a plan → transport."""


def transport_of(collective: str, algorithm: str) -> Transport:
    """Return the transport of these names; for unknown ones, which no registry executes, one without traits."""
    return TRANSPORTS.get((collective, algorithm)) or Transport(collective, algorithm)
