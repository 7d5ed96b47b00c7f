"""Cost of compression: collectives of selected elements (values and indices), as phases on the links inside nodes
and between them, and on the compute resource selecting elements of a bucket and adding up what was selected.

Source: CommLib (Shi et al., MLSys 2021, Eq. 7-10), with two departures: indices are sent, too, so a selected element
takes 8 bytes, and HiTopKComm's last gather is a ring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.collectives import collective_cost
from planner.cost.curve import CostCurve
from planner.cost.phases import LinkName, flat_hop, flat_link, link_of, measured_flat, phase_of, slowest_hop
from planner.documents.profile import Cluster, Link, SelectionLine
from runtime.errors import InputError
from runtime.plan.transports import FLAT, HITOPK, NAIVE_ALL_GATHER, Transport

Floats = NDArray[np.float64]

SELECTED_BYTES = 8
"""A selected element: four bytes of value, four of index."""

LinkTimes = tuple[tuple[LinkName, float], ...]
"""(link, time_us) of each phase, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparsePhase:
    """One step of a collective of selected elements."""

    name: str
    """`reduce_scatter` or `all_gather`."""
    link: LinkName
    curve: CostCurve
    """Time over this phase's message."""
    message_bytes: Callable[[Any, Any], Any]
    """(selected elements, dense bytes) → bytes of the message; elementwise for arrays."""

    def time_us(self, selected: int, dense_bytes: float) -> float:
        """Return the time for a number of selected elements of a tensor of so many bytes."""
        return self.curve.at(float(self.message_bytes(selected, dense_bytes)))


def flat(cluster: Cluster, otherwise: Link | None = None) -> tuple[SparsePhase, ...]:
    """Gather every rank's selected elements by recursive doubling over all ranks; `selected` is each rank's.

    Link constants of `otherwise` count where the cluster has none.
    """
    ranks, name = cluster.ranks, flat_link(cluster)
    if ranks == 1:
        return ()
    curve = measured_flat(cluster, "all_gather", queued=True)
    if curve is None:
        link = slowest_hop(cluster, link_of(cluster, name, otherwise))
        curve = CostCurve.from_line(collective_cost("all_gather/recursive_doubling", ranks, link))
    return (
        SparsePhase(
            name="all_gather",
            link=name,
            curve=curve,
            message_bytes=lambda selected, dense_bytes: ranks * SELECTED_BYTES * selected,
        ),
    )


def naive_all_gather(cluster: Cluster, otherwise: Link | None = None) -> tuple[SparsePhase, ...]:
    """Return CommLib's NaiveAG: the same bytes, but values and indices in messages of their own."""
    return tuple(replace(phase, curve=phase.curve.repeated(2)) for phase in flat(cluster, otherwise))


def flat_is_implied(cluster: Cluster) -> bool:
    """Return whether the cluster has no cost of a flat gather, so that it follows from the all-reduce."""
    return cluster.ranks > 1 and flat_hop(cluster) is None and measured_flat(cluster, "all_gather") is None


def hitopk(cluster: Cluster, otherwise: Link | None = None) -> tuple[SparsePhase, ...]:
    """Reduce-scatter in the node, gather the shards' selections between nodes, gather in the node.

    `selected` is each shard's. With one rank a node this is `flat`.
    """
    inside, nodes = cluster.ranks_per_node, cluster.nodes
    if inside == 1:
        return flat(cluster, otherwise)
    total = nodes * SELECTED_BYTES
    phases = (
        (phase_of(cluster, "reduce_scatter", "ring", "intra", inside), lambda selected, dense: dense),
        (phase_of(cluster, "all_gather", "recursive_doubling", "inter", nodes), lambda selected, _: total * selected),
        (
            phase_of(cluster, "all_gather", "ring", "intra", inside),
            lambda selected, dense: np.minimum(dense, inside * total * selected),
        ),
    )
    return tuple(
        SparsePhase(name=phase.name, link=phase.link, curve=phase.curve, message_bytes=message_bytes)
        for phase, message_bytes in phases
        if phase is not None
    )


SPARSE_PHASES: Mapping[Transport, Callable[[Cluster, Link | None], tuple[SparsePhase, ...]]] = {
    FLAT: flat,
    HITOPK: hitopk,
    NAIVE_ALL_GATHER: naive_all_gather,
}
"""Registry: transport of selected elements → its phases on a cluster."""


def selected_elements(density: float, numel: int) -> int:
    """Return k = max(1, ⌊density · numel⌋), never more than there are."""
    return min(numel, max(1, math.floor(density * numel)))


def sparse_us(transport: Transport, cluster: Cluster, numel: int, density: float, element_bytes: int = 4) -> LinkTimes:
    """Return the time of each phase for a tensor of `numel` elements; HiTopKComm selects from each shard of a node."""
    shards = cluster.ranks_per_node if transport.hierarchical else 1
    selected = selected_elements(density, math.ceil(numel / shards))
    phases = SPARSE_PHASES[transport](cluster, None)
    return tuple((phase.link, phase.time_us(selected, numel * element_bytes)) for phase in phases)


FREE = SelectionLine(alpha_us=0.0, beta_us_per_byte=0.0)


def selector_line(given: SelectionLine | dict[str, SelectionLine] | None, selector: str, where: str) -> SelectionLine:
    """Return what selecting (or unpacking) by a selector costs: the document's one line, or that of this one; else 0.

    Raises InputError: the document has lines by selector, and none for this one.
    """
    if given is None:
        return FREE
    if isinstance(given, SelectionLine):
        return given
    if selector not in given:
        raise InputError(
            f"{where}: no cost for the selector {selector!r}; found {', '.join(given) or 'none'}; expected "
            f'"{selector}": {{"alpha_us": …, "beta_us_per_byte": …}} there: time its selection over a few sizes'
        )
    return given[selector]


@dataclass(frozen=True, eq=False)
class SelectionCost:
    """Lines over a bucket's dense bytes, one for each density that was timed, and between them for those between.

    Below the least and above the largest density the lines stay.
    """

    density: Floats
    """Ascending. Shape (densities,)."""
    alpha_us: Floats
    beta_us_per_byte: Floats

    @classmethod
    def of(cls, line: SelectionLine, shards: int = 1) -> SelectionCost:
        """`shards`: over how many ranks a bucket is shared out before each selects from its own."""
        rows = line.by_density or ((1.0, line.alpha_us, line.beta_us_per_byte),)
        density, alpha_us, beta = np.array(sorted(rows), dtype=np.float64).T
        return cls(density, alpha_us, beta / shards)

    def line(self, density: ArrayLike) -> tuple[Floats, Floats]:
        """(alpha_us, beta_us_per_byte) where this share of all elements is selected; elementwise."""
        at = np.asarray(density, dtype=np.float64)
        return np.interp(at, self.density, self.alpha_us), np.interp(at, self.density, self.beta_us_per_byte)

    def __call__(self, dense_bytes: ArrayLike, density: ArrayLike) -> Floats:
        """Microseconds for buckets of so many dense bytes in all; elementwise."""
        alpha_us, beta = self.line(density)
        return np.asarray(alpha_us + beta * np.asarray(dense_bytes, dtype=np.float64))
