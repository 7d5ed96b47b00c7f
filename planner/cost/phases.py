"""Collectives of several phases, each on the links inside a node or on those between nodes.

A phase costs a line (or a measured curve) over its own message. Sources: 2D-torus all-reduce and HiTopKComm as in
CommLib (Shi et al., MLSys 2021, Eq. 7-10), with two departures: indices travel too, so a selected element takes 8
bytes, and the last gather is a ring. The exchanges that the ranks of one node run at once between nodes share its
network cards: there β is β_inter · max(1, n / nics_per_node).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.cost.collectives import Coefficients, collective_cost
from planner.cost.curve import CostCurve
from planner.profile.document import Cluster, Link
from runtime.errors import InputError

LinkName = Literal["intra", "inter"]

SELECTED_BYTES = 8
"""A selected element: four bytes of value, four of index."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One step of a collective on one kind of link."""

    name: str
    """`reduce_scatter`, `all_reduce` or `all_gather`."""
    link: LinkName
    curve: CostCurve
    """Time over this phase's message."""
    share: float = 1.0
    """This phase's message, as a share of the bytes that the collective is asked for."""

    def time_us(self, size_bytes: float) -> float:
        """Time when the whole collective is asked for `size_bytes`."""
        return self.curve.at(self.share * size_bytes)

    def times_us(self, size_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """`time_us`, elementwise."""
        return self.curve(self.share * size_bytes)


LinkTimes = tuple[tuple[LinkName, float], ...]
"""(link, time_us) of each phase, in order."""

PhasesOf = Callable[[Cluster, CostCurve], tuple[Phase, ...]]
"""(cluster, its flat all-reduce) → phases."""


def torus_2d(cluster: Cluster, flat: CostCurve) -> tuple[Phase, ...]:
    """Reduce-scatter inside the node, all-reduce of each rank's part between nodes, all-gather inside the node.

    With one rank a node it is the flat all-reduce, by whatever that was measured to cost.

    Raises:
        InputError: no cost for one of the two kinds of link.
    """
    inside = cluster.ranks_per_node
    if inside == 1 and cluster.nodes > 1:
        return (Phase(name="all_reduce", link="inter", curve=flat),)
    phases = [
        _phase(cluster, "reduce_scatter", "ring", "intra", inside),
        _phase(cluster, "all_reduce", "ring", "inter", cluster.nodes, share=1.0 / inside),
        _phase(cluster, "all_gather", "ring", "intra", inside),
    ]
    return tuple(phase for phase in phases if phase is not None)


PHASES: Mapping[tuple[str, str], PhasesOf] = {("all_reduce", "torus_2d"): torus_2d}
"""Registry: (collective, algorithm) → phases of a dense collective, linear in the tensor's bytes."""


def selected_elements(density: float, numel: int) -> int:
    """k = max(1, ⌊density · numel⌋), never more than there are."""
    return min(numel, max(1, math.floor(density * numel)))


def sparse_flat_us(cluster: Cluster, numel: int, density: float, element_bytes: int = 4) -> LinkTimes:
    """`sparse/flat`: every rank's selected values and indices, gathered by recursive doubling over all ranks."""
    ranks = cluster.ranks
    if ranks == 1:
        return ()
    name: LinkName = "inter" if cluster.nodes > 1 else "intra"
    cost = collective_cost("all_gather/recursive_doubling", ranks, _link(cluster, name))
    return ((name, _time_us(cost, ranks * SELECTED_BYTES * selected_elements(density, numel))),)


def sparse_hitopk_us(cluster: Cluster, numel: int, density: float, element_bytes: int = 4) -> LinkTimes:
    """`sparse/hitopk`: reduce-scatter in the node, gather of the shards' selections between nodes, gather in it."""
    inside, nodes, dense_bytes = cluster.ranks_per_node, cluster.nodes, numel * element_bytes
    of_shard = selected_elements(density, math.ceil(numel / inside))
    steps: list[tuple[LinkName, str, int, float]] = [
        ("intra", "reduce_scatter/ring", inside, dense_bytes),
        ("inter", "all_gather/recursive_doubling", nodes, nodes * SELECTED_BYTES * of_shard),
        ("intra", "all_gather/ring", inside, min(dense_bytes, nodes * inside * SELECTED_BYTES * of_shard)),
    ]
    return tuple(
        (link, _time_us(collective_cost(formula, ranks, _link(cluster, link)), size_bytes))
        for link, formula, ranks, size_bytes in steps
        if ranks > 1
    )


SPARSE_COSTS: Mapping[str, Callable[[Cluster, int, float, int], LinkTimes]] = {
    "flat": sparse_flat_us,
    "hitopk": sparse_hitopk_us,
}
"""Registry: algorithm of `sparse` → (link, time_us) of each phase, for a tensor of `numel` elements at a density."""


def _time_us(cost: Coefficients, size_bytes: float) -> float:
    return cost.start_up_us + cost.per_byte_us * size_bytes


def _phase(
    cluster: Cluster, collective: str, algorithm: str, link: LinkName, ranks: int, share: float = 1.0
) -> Phase | None:
    """A phase by its most specific cost: samples, fitted line, link constants. None for a single rank."""
    if ranks == 1:
        return None
    key = f"{link}/{collective}"
    samples, line = (cluster.samples or {}).get(key), (cluster.collectives or {}).get(key)
    fitted = None if line is None else Coefficients(line.alpha_us, line.beta_us_per_byte)
    if samples is not None:
        curve = CostCurve.from_samples(samples, fitted)
    else:
        curve = CostCurve.from_line(fitted or collective_cost(f"{collective}/{algorithm}", ranks, _link(cluster, link)))
    return Phase(name=collective, link=link, curve=curve, share=share)


def _link(cluster: Cluster, name: LinkName) -> Link:
    """The link's constants; between nodes as one of the concurrent exchanges of a node sees them (inter*)."""
    link = cluster.intra if name == "intra" else cluster.inter
    if link is None:
        where = "inside a node" if name == "intra" else "between nodes"
        raise InputError(
            f'cluster {cluster.name or "(unnamed)"}: no cost for the links {where}; expected the constants "{name}" '
            f'(alpha_us, beta_us_per_byte), or samples such as "{name}/all_reduce"'
        )
    sharing = 1.0 if name == "intra" else max(1.0, cluster.ranks_per_node / cluster.nics_per_node)
    return replace(link, beta_us_per_byte=link.beta_us_per_byte * sharing)
