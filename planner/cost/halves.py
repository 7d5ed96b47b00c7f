"""What the two halves of an all-reduce cost apart: reduce-scatter (SSD-SGD's push) and all-gather (its pull)."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cost.collectives import Coefficients, collective_cost
from planner.cost.curve import CostCurve
from planner.cost.model import CommunicationCost
from planner.cost.phases import LinkName, measured_curve
from planner.profile.document import Cluster

REDUCE_SCATTER, ALL_GATHER = "reduce_scatter", "all_gather"


@dataclass(frozen=True, kw_only=True)
class Half:
    """One of the two, over all ranks."""

    curve: CostCurve
    source: str
    """Where the curve comes from, in words."""
    implied: bool = False
    """Whether nobody said what it costs, so that it follows from the all-reduce."""


def half(cost: CommunicationCost, collective: str) -> Half:
    """The cost of `reduce_scatter` or `all_gather` by its most specific source.

    Samples, then a fitted line, then the ring's formula with the link's constants, as for the all-reduce. Where a
    cluster says only what an all-reduce costs, each half of it is taken to cost half of that: in a ring both halves
    send equally much.
    """
    cluster = cost.cluster
    if cluster.ranks == 1:
        return Half(curve=CostCurve.from_line(Coefficients(0.0, 0.0)), source="one rank: nothing to send")
    measured = _measured(cluster, collective)
    if measured is not None:
        return Half(curve=measured, source="measured")
    link = cluster.inter if _link(cluster) == "inter" else cluster.intra
    if link is not None:
        formula = f"{collective}/ring"
        curve = CostCurve.from_line(collective_cost(formula, cluster.ranks, link))
        return Half(curve=curve, source=f"{formula} with link constants")
    return Half(curve=cost.all_reduce.scaled(0.5), source="half of the all-reduce", implied=True)


def _link(cluster: Cluster) -> LinkName:
    return "inter" if cluster.nodes > 1 else "intra"


def _measured(cluster: Cluster, collective: str) -> CostCurve | None:
    """What was measured over all ranks; with one kind of link, also under that link's key."""
    one_link = 1 in (cluster.nodes, cluster.ranks_per_node)
    return measured_curve(cluster, collective) or (
        measured_curve(cluster, f"{_link(cluster)}/{collective}") if one_link else None
    )
