"""Collectives of several phases, each on the links inside a node or on those between nodes.

A phase costs a line (or a measured curve) over its own message. Source: 2D-torus all-reduce as in CommLib (Shi et al.,
MLSys 2021). The exchanges that the ranks of one node run at once between nodes share its network cards: there β is
β_inter · max(1, n / nics_per_node). `planner.cost.sparse` has the collectives of selected elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.cost import nccl
from planner.cost.collectives import Coefficients, collective_cost
from planner.cost.curve import CostCurve
from planner.cost.tree import tree_curve
from planner.documents.profile import Cluster, Link
from runtime.errors import InputError
from runtime.plan.transports import TORUS_2D, TREE, Transport

LinkName = Literal["intra", "inter"]


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
        """Return the time when the whole collective is asked for `size_bytes`."""
        return self.curve.at(self.share * size_bytes)

    def times_us(self, size_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """`time_us`, elementwise."""
        return self.curve(self.share * size_bytes)


PhasesOf = Callable[[Cluster, CostCurve, Link | None], tuple[Phase, ...]]
"""(cluster, its flat all-reduce, link constants to use where the cluster has none) → phases."""


def torus_2d(cluster: Cluster, flat: CostCurve, otherwise: Link | None = None) -> tuple[Phase, ...]:
    """Reduce-scatter inside the node, all-reduce of each rank's part between nodes, all-gather inside the node.

    With one rank a node it is the flat all-reduce, by whatever that was measured to cost.

    Raises InputError: no cost for intra-node or inter-node links.
    """
    inside = cluster.ranks_per_node
    if inside == 1 and cluster.nodes > 1:
        return (Phase(name="all_reduce", link="inter", curve=flat),)
    phases = [
        phase_of(cluster, "reduce_scatter", "ring", "intra", inside),
        phase_of(cluster, "all_reduce", "ring", "inter", cluster.nodes, share=1.0 / inside),
        phase_of(cluster, "all_gather", "ring", "intra", inside),
    ]
    return tuple(phase for phase in phases if phase is not None)


def tree(cluster: Cluster, flat: CostCurve, otherwise: Link | None = None) -> tuple[Phase, ...]:
    """Return the phase of two binary trees through all ranks: measured (`tree`), or by `planner.cost.tree`.

    Raises InputError: no cost for intra-node or inter-node links.
    """
    if cluster.ranks == 1:
        return ()
    over: LinkName = "inter" if cluster.nodes > 1 else "intra"
    curve = measured_curve(cluster, "tree")
    if curve is None:
        one_link = 1 in (cluster.nodes, cluster.ranks_per_node)
        intra = None if cluster.ranks_per_node == 1 else link_of(cluster, "intra", otherwise if one_link else None)
        inter = None if cluster.nodes == 1 else unshared(cluster, otherwise if one_link else None)
        curve = tree_curve(cluster.nodes, cluster.ranks_per_node, intra, inter, cluster.nics_per_node)
    return (Phase(name="all_reduce", link=over, curve=curve),)


PHASES: Mapping[Transport, PhasesOf] = {TORUS_2D: torus_2d, TREE: tree}
"""Registry: transport → phases of a dense collective, linear in the tensor's bytes."""


def phase_of(
    cluster: Cluster, collective: str, algorithm: str, link: LinkName, ranks: int, share: float = 1.0
) -> Phase | None:
    """Return a phase by its most specific cost: samples, line, library, link constants. None for a single rank."""
    if ranks == 1:
        return None
    formula = f"{collective}/{algorithm}"
    curve = measured_curve(cluster, f"{link}/{collective}")
    if curve is None and (shape := nccl.shape_on(cluster, link)) is not None:
        curve = nccl.curve(collective, shape)
    curve = curve or CostCurve.from_line(collective_cost(formula, ranks, link_of(cluster, link)))
    return Phase(name=collective, link=link, curve=curve, share=share)


def measured_curve(cluster: Cluster, key: str, *, queued: bool = False) -> CostCurve | None:
    """Return what the cluster has measured under a key of `samples` and `collectives`: samples before a fitted line.

    `queued`: of `back_to_back` before these.
    """
    samples, line = (cluster.samples or {}).get(key), (cluster.collectives or {}).get(key)
    if queued:
        samples = (cluster.back_to_back or {}).get(key, samples)
    fitted = None if line is None else Coefficients.of(line)
    if samples is not None:
        return CostCurve.from_samples(samples, fitted)
    return None if fitted is None else CostCurve.from_line(fitted)


def flat_link(cluster: Cluster) -> LinkName:
    """Return the network that messages through all ranks occupy."""
    return "inter" if cluster.nodes > 1 else "intra"


def flat_hop(cluster: Cluster) -> Link | None:
    """Return the link whose constants formulas of flat collectives take; None where it is not known."""
    link = cluster.inter if flat_link(cluster) == "inter" else cluster.intra
    return None if link is None else slowest_hop(cluster, link)


def slowest_hop(cluster: Cluster, link: Link) -> Link:
    """Return the link at whose pace a flat collective proceeds, given the one that limits it between nodes.

    Ranks send in steps, and each step waits for its slowest hop. Where nodes have several ranks and the link inside
    them takes longer per byte, that is the pace: in a ring all hops but one of each node are inside. The start-up time
    of each step is then the larger one: never less than formulas have where the link inside is the faster one.
    """
    inside = cluster.intra
    if inside is None or 1 in (cluster.nodes, cluster.ranks_per_node):
        return link
    # The time of a byte is that of sending and of adding it.
    within, between = (hop.beta_us_per_byte + hop.gamma_us_per_byte for hop in (inside, link))
    if within <= between:
        return link
    return replace(inside, alpha_us=max(inside.alpha_us, link.alpha_us))


def measured_flat(cluster: Cluster, collective: str, *, queued: bool = False) -> CostCurve | None:
    """Return what was measured over all ranks; with one kind of link, also under that link's key. `queued`: see
    `measured_curve`.
    """
    one_link = 1 in (cluster.nodes, cluster.ranks_per_node)
    return measured_curve(cluster, collective, queued=queued) or (
        measured_curve(cluster, f"{flat_link(cluster)}/{collective}") if one_link else None
    )


def link_of(cluster: Cluster, name: LinkName, otherwise: Link | None = None) -> Link:
    """Return a link's constants; between nodes as one of the concurrent exchanges of a node sees them (inter*).

    Those of `otherwise` count where the cluster has none. Raises InputError where both lack.
    """
    link = (cluster.intra if name == "intra" else cluster.inter) or otherwise or nccl.link_of(cluster, name)
    if link is None:
        where = "inside a node" if name == "intra" else "between nodes"
        raise InputError(
            f'cluster {cluster.name or "(unnamed)"}: no cost for the links {where}; expected the constants "{name}" '
            f'(alpha_us, beta_us_per_byte), or samples such as "{name}/all_reduce"; to measure them, run `planner '
            f"profile` on {'the ranks of one node' if name == 'intra' else 'one rank of each node'}"
        )
    sharing = 1.0 if name == "intra" else max(1.0, cluster.ranks_per_node / cluster.nics_per_node)
    return replace(link, beta_us_per_byte=link.beta_us_per_byte * sharing)


def unshared(cluster: Cluster, otherwise: Link | None = None) -> Link:
    """Return the link between nodes as one message alone sees it. See `link_of`."""
    return link_of(replace(cluster, ranks_per_node=1), "inter", otherwise)
