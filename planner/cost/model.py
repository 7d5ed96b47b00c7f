"""Cost of a collective on a number of ranks, from a cluster document: samples, then lines, then formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost import nccl
from planner.cost.collectives import Coefficients, collective_cost, solve_link
from planner.cost.curve import CostCurve, fit_line
from planner.cost.phases import flat_hop, measured_curve
from planner.documents.profile import Cluster, Contention, Line, Link, Sample, SizeFactors
from runtime.errors import InputError
from runtime.plan.strict_json import MAX_RANKS

T = TypeVar("T")
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Slowdown:
    """Factors by which a message and the computation during it slow each other down, by the message's size.

    Measured factors are joined by lines of speed (their reciprocals) over the logarithm of the size. Where every core
    computes, what a message waits for a core hardly depends on its size: small ones are slowed most, and speed over the
    logarithm of the size is then nearly straight between neighbours. Beyond the first and last size the factors stay.
    """

    log2_bytes: Floats
    compute_speed: Floats
    network_speed: Floats

    @classmethod
    def of(cls, by_size: Sequence[SizeFactors] | None) -> Slowdown | None:
        """None where the factors are the same for all sizes."""
        if by_size is None:
            return None
        size, compute, network = np.array(sorted(by_size), dtype=np.float64).T
        return cls(np.log2(size), 1.0 / compute, 1.0 / network)

    def __call__(self, message_bytes: ArrayLike) -> tuple[Floats, Floats]:
        """Return (factor of compute, factor of the network) while such a message is in flight, elementwise."""
        at = np.log2(np.maximum(np.asarray(message_bytes, dtype=np.float64), 1.0))
        compute = 1.0 / np.interp(at, self.log2_bytes, self.compute_speed)
        return compute, 1.0 / np.interp(at, self.log2_bytes, self.network_speed)

    @property
    def least(self) -> tuple[float, float]:
        """Return the factors that no message falls below."""
        return float(1.0 / self.compute_speed.max()), float(1.0 / self.network_speed.max())


@dataclass(frozen=True, kw_only=True)
class CommunicationCost:
    """Cost of communication on one cluster with one number of ranks."""

    cluster: Cluster
    all_reduce: CostCurve
    """The library's flat all-reduce."""
    source: str
    """Origin of the curve, in words."""
    extrapolated: bool = False
    """Whether it was derived for another number of ranks than was measured."""
    interval: float | None = None
    """Largest relative error of 9 of 10 measurements, if a library's model gives the costs."""
    link: Link | None = None
    """Link that the measured all-reduce implies, if it was fitted: for collectives that were not measured."""

    @property
    def contention(self) -> Contention:
        return self.cluster.contention or Contention()

    @cached_property
    def slowdown(self) -> Slowdown | None:
        """Contention by the size of messages, where it was measured."""
        return Slowdown.of(self.contention.by_size)

    @cached_property
    def slowdown_of_gathers(self) -> Slowdown | None:
        """Return the same for flat gathers of selected elements, if it was measured separately."""
        return Slowdown.of(self.contention.gathers_by_size)


def resize(cluster: Cluster, ranks: int) -> Cluster:
    """Return the same machines and links with another number of ranks; ranks per node stay.

    Raises InputError: `ranks` does not fill whole nodes.
    """
    per_node = cluster.ranks_per_node
    if ranks < 1 or (ranks > per_node and ranks % per_node):
        raise InputError(
            f"{ranks} ranks do not fill nodes of {per_node}; expected a multiple of {per_node} (ranks_per_node), "
            f"for example {max(1, ranks // per_node) * per_node}"
        )
    resized = replace(cluster, nodes=max(1, ranks // per_node), ranks_per_node=min(ranks, per_node))
    return resized if resized == cluster else _without_measurements_of_others(cluster, resized)


def _without_measurements_of_others(cluster: Cluster, resized: Cluster) -> Cluster:
    """Measured collectives stay where the ranks that take part are as many as they were."""
    same = {"intra": resized.ranks_per_node == cluster.ranks_per_node, "inter": resized.nodes == cluster.nodes}

    def kept(curves: dict[str, T] | None) -> dict[str, T] | None:
        left = {key: curve for key, curve in (curves or {}).items() if same.get(key.partition("/")[0], False)}
        return left or None

    return replace(resized, samples=kept(resized.samples), collectives=kept(resized.collectives), back_to_back=None)


def scale(cluster: Cluster, nodes: int, ranks_per_node: int) -> Cluster:
    """Return a cluster of so many nodes with the all-reduce that was measured on this one, scaled to its ranks.

    Each measured time is multiplied by what the published formula of the algorithm gives for its size on the new ranks
    over what it gives on the old ones, so that a curve keeps its shape. Holds while messages pass through the same kind
    of link. Other collectives are left out. Costs are then marked as extrapolated.

    Raises InputError: no all-reduce was measured, or on one rank.
    """
    key = _measured_key(cluster)
    if cluster.ranks == 1 or _measured(cluster, key) is None:
        raise InputError(
            f"cluster {cluster.name or '(unnamed)'}: found no all-reduce that was measured on two ranks or more, "
            f"expected one to scale; measure it with `planner profile`"
        )
    formula, ranks = f"all_reduce/{cluster.all_reduce_algorithm}", nodes * ranks_per_node
    link = _implied_link(cluster, formula, key) or Link(alpha_us=0.0, beta_us_per_byte=0.0)
    before, after = collective_cost(formula, cluster.ranks, link), collective_cost(formula, ranks, link)

    def scaled(sample: Sample) -> Sample:
        size_bytes, time_us = sample
        before_us = before.start_up_us + before.per_byte_us * size_bytes
        factor = (after.start_up_us + after.per_byte_us * size_bytes) / before_us if before_us > 0.0 else 1.0
        return size_bytes, round(time_us * factor, 3)

    def of(curves: dict[str, tuple[Sample, ...]] | None) -> dict[str, tuple[Sample, ...]] | None:
        return None if curves is None or key not in curves else {"all_reduce": tuple(map(scaled, curves[key]))}

    line = Line(alpha_us=after.start_up_us, beta_us_per_byte=after.per_byte_us)
    return replace(
        cluster, nodes=nodes, ranks_per_node=ranks_per_node, samples=of(cluster.samples),
        back_to_back=of(cluster.back_to_back), collectives={"all_reduce": line},
        scaled_from=cluster.scaled_from or cluster.ranks,
    )  # fmt: skip


def communication_cost(cluster: Cluster, ranks: int | None = None) -> CommunicationCost:
    """Return the cost of communication on `cluster`, resized to `ranks` where given.

    The most specific source wins: samples (taken back to back before isolated ones), then fitted lines, then the
    library's cost model, then link constants in the published formulas. Samples and lines hold only for the ranks they
    were measured on; for others the library's model or the link constants are used, or those that the fit implies, and
    the result is marked as extrapolated.

    Raises InputError: the cluster has no cost for an all-reduce; says how to measure it.
    """
    target = cluster if ranks is None else resize(cluster, ranks)
    if target.ranks > MAX_RANKS:
        raise InputError(f"found more than {MAX_RANKS} ranks; expected fewer: check nodes and ranks_per_node")
    key = _measured_key(cluster)
    if target.ranks == 1 and (cluster.ranks != 1 or _measured(cluster, key) is None):
        return CommunicationCost(
            cluster=target,
            all_reduce=CostCurve.from_line(Coefficients(0.0, 0.0)),
            source="one rank: nothing to send",
            extrapolated=_measured(cluster, key) is not None,
        )
    if target.ranks == cluster.ranks:
        measured = _measured(cluster, key)
        if measured is not None:
            curve, source = measured
            implied = _implied_link(cluster, f"all_reduce/{cluster.all_reduce_algorithm}", key)
            return CommunicationCost(
                cluster=target, all_reduce=curve, source=source, link=implied,
                extrapolated=cluster.scaled_from is not None,
            )  # fmt: skip
    if (shape := nccl.shape_of(target)) is not None:
        shape.machine.check(target.nodes, target.ranks_per_node, f"cluster {target.name or '(unnamed)'}: $.nccl.")
        fit = shape.machine.fit
        return CommunicationCost(
            cluster=target,
            all_reduce=nccl.curve("all_reduce", shape),
            source=nccl.describe("all_reduce", shape),
            extrapolated=fit is not None and target.ranks not in fit.measured_on,
            interval=nccl.interval_of(shape),
            link=target.inter if target.nodes > 1 else target.intra,
        )
    return _from_formula(cluster, target, key)


def _measured_key(cluster: Cluster) -> str:
    """Return the key of the measured flat all-reduce; with one rank a node (or one node) one link is all."""
    known = {*(cluster.samples or {}), *(cluster.collectives or {})}
    one_link = "inter/" if cluster.ranks_per_node == 1 else "intra/" if cluster.nodes == 1 else ""
    return f"{one_link}all_reduce" if "all_reduce" not in known and one_link else "all_reduce"


def _measured(cluster: Cluster, key: str) -> tuple[CostCurve, str] | None:
    # Calls in a queue before calls alone: in a step ranks have not just met at a barrier.
    if (curve := measured_curve(cluster, key, queued=True)) is None:
        return None
    where = "" if cluster.scaled_from is None else f", scaled from {cluster.scaled_from} ranks"
    where = f"{_emulated(cluster)}{where}"
    for curves, how in ((cluster.back_to_back, ", back to back"), (cluster.samples, "")):
        if curves is not None and key in curves:
            return curve, f"{len(curves[key])} measured samples{how}{where}"
    return curve, f"fitted line{where}"


def _emulated(cluster: Cluster) -> str:
    return "" if cluster.emulated is None else f", emulated {cluster.name or 'cluster'}"


def _from_formula(cluster: Cluster, target: Cluster, key: str) -> CommunicationCost:
    formula = f"all_reduce/{cluster.all_reduce_algorithm}"
    link, origin = flat_hop(target), "link constants"
    if link is None and cluster.ranks > 1:
        link = _implied_link(cluster, formula, key)
        origin = f"link solved from {cluster.ranks} ranks{_emulated(cluster)}"
    if link is None and target.ranks > 1:
        wanted = "intra" if target.nodes == 1 else "inter"
        raise InputError(
            f"cluster {cluster.name or '(unnamed)'}: no cost for an all-reduce on {target.ranks} ranks; expected "
            f'samples.all_reduce, collectives.all_reduce or the link constants "{wanted}"; measure them with '
            f"`planner profile` on that cluster"
        )
    cost = collective_cost(formula, target.ranks, link or Link(alpha_us=0.0, beta_us_per_byte=0.0))
    return CommunicationCost(
        cluster=target,
        all_reduce=CostCurve.from_line(cost),
        source=f"{formula} with {origin}",
        link=link,
        extrapolated=target.ranks != cluster.ranks and _measured(cluster, key) is not None,
    )


def _implied_link(cluster: Cluster, formula: str, key: str) -> Link | None:
    if _measured(cluster, key) is None or cluster.ranks == 1:
        return None
    line = (cluster.collectives or {}).get(key)
    fitted = fit_line((cluster.samples or {}).get(key, [])) if line is None else Coefficients.of(line)
    return solve_link(formula, cluster.ranks, fitted)
