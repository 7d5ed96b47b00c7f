"""Costs of the two halves of an all-reduce: reduce-scatter (SSD-SGD's push) and all-gather (its pull).

Where nodes have several ranks, these are between nodes, of each rank's part of the node's gradients, and gradients are
averaged inside nodes before, and weights spread inside after them.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.cost import nccl
from planner.cost.collectives import Coefficients, collective_cost
from planner.cost.curve import CostCurve
from planner.cost.model import CommunicationCost
from planner.cost.phases import LinkName, Phase, flat_hop, measured_curve, measured_flat, phase_of
from planner.documents.profile import Cluster
from runtime.errors import InputError

REDUCE_SCATTER, ALL_GATHER = "reduce_scatter", "all_gather"
LIBRARY_GATHER, LIBRARY_SCATTER = f"library/{ALL_GATHER}", f"library/{REDUCE_SCATTER}"
"""Keys of a cluster's samples: the library's own collectives, which FSDP2 calls."""


@dataclass(frozen=True, kw_only=True)
class Half:
    """One of the two, over all ranks, or between nodes."""

    curve: CostCurve
    source: str
    """Origin of the curve, in words."""
    implied: bool = False
    """Whether its cost is not known and follows from the all-reduce."""


@dataclass(frozen=True, kw_only=True)
class NodeCosts:
    """Costs of what a worker of several ranks exchanges, over the bytes of the whole message."""

    push: Phase
    """Reduce-scatter between nodes, as `pull` of each rank's part."""
    pull: Phase
    scatter: Phase
    """Reduce-scatter inside nodes; with a gather behind it, it averages the node's gradients."""
    gather: Phase
    """All-gather inside nodes, also of weights that were pulled."""


def node_costs(cluster: Cluster) -> NodeCosts | None:
    """Return None on nodes of one rank, on a single node, and where intra-node or inter-node links have no cost."""
    inside, nodes = cluster.ranks_per_node, cluster.nodes
    if 1 in (inside, nodes):
        return None
    asked: list[tuple[str, LinkName, int, float]] = [
        (REDUCE_SCATTER, "inter", nodes, 1.0 / inside), (ALL_GATHER, "inter", nodes, 1.0 / inside),
        (REDUCE_SCATTER, "intra", inside, 1.0), (ALL_GATHER, "intra", inside, 1.0),
    ]  # fmt: skip
    # A cluster need not have costs of intra-node and inter-node links: then nothing is planned between nodes.
    try:
        phases = [phase_of(cluster, name, "ring", link, ranks, share) for name, link, ranks, share in asked]
    except InputError:
        return None
    push, pull, scatter, gather = (phase for phase in phases if phase is not None)
    return NodeCosts(push=push, pull=pull, scatter=scatter, gather=gather)


def worker_half(cost: CommunicationCost, collective: str) -> Half:
    """Return what `reduce_scatter` or `all_gather` costs between workers of a delay: ranks, or nodes, of each part."""
    between = node_costs(cost.cluster)
    if between is None:
        return half(cost, collective)
    phase = {REDUCE_SCATTER: between.push, ALL_GATHER: between.pull}[collective]
    known = measured_curve(cost.cluster, f"inter/{collective}") is not None
    computed = f"{collective}/ring with link constants" if cost.cluster.library is None else f"NCCL's {collective}"
    source = f"{'measured' if known else computed} between nodes"
    return Half(curve=phase.curve.of_share(phase.share), source=source)


def half(cost: CommunicationCost, collective: str) -> Half:
    """Return the cost of `reduce_scatter` or `all_gather` over all ranks by its most specific source.

    Samples, then a fitted line, then the library's model, then the ring's formula with the link's constants, as for the
    all-reduce. Where a cluster says only what an all-reduce costs, each half of it is taken to cost half of that: in a
    ring both halves send equally much.
    """
    cluster = cost.cluster
    if cluster.ranks == 1:
        return Half(curve=CostCurve.from_line(Coefficients(0.0, 0.0)), source="one rank: nothing to send")
    measured = measured_flat(cluster, collective)
    if measured is not None:
        return Half(curve=measured, source="measured")
    if (shape := nccl.shape_of(cluster)) is not None:
        return Half(curve=nccl.curve(collective, shape), source=nccl.describe(collective, shape))
    if (link := flat_hop(cluster)) is not None:
        formula = f"{collective}/ring"
        curve = CostCurve.from_line(collective_cost(formula, cluster.ranks, link))
        return Half(curve=curve, source=f"{formula} with link constants")
    return Half(curve=cost.all_reduce.scaled(0.5), source="half of the all-reduce", implied=True)
