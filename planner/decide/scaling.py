"""Steps of the plan and its baselines on other numbers of ranks of the same cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.cost.model import communication_cost, resize
from planner.decide.strategies import BASELINES, make_schedule
from planner.documents.profile import Cluster
from planner.emit.lower import predict
from planner.model.problem import Problem
from planner.search.tables import has_two_links
from runtime.errors import InputError
from runtime.plan.interfaces import LATE_GATHER
from runtime.plan.predicted import ScalingPoint

OPTIMAL = "optimal"

LEAST_RANKS, MOST_RANKS, FACTOR = 64, 16384, 16
"""The curve goes up to FACTOR times the plan's ranks, within these limits."""

GRADIENTS_SOLVED, GRADIENTS_SOLVED_CONTENDED, GRADIENTS_SOLVED_ON_LINKS = 30_000, 3_000, 2_000
GRADIENTS_SOLVED_LATE = 1_200
"""Gradients over all points of a curve that the optimum is computed for: about one second."""


def scaling_curve(problem: Problem, here_us: Mapping[str, float], strategy: str = OPTIMAL) -> tuple[ScalingPoint, ...]:
    """Return the step of `optimal` and the baselines, by number of ranks, at powers of two that the cluster allows.

    `here_us` has the steps on the plan's own ranks by strategy, `strategy` stands as `optimal` for the plan on others.
    Very large problems get the point of the plan's own ranks and few others.
    """
    others = {ranks: there for ranks in _rank_counts(problem.cost.cluster) if (there := _at(problem, ranks))}
    solved = GRADIENTS_SOLVED_CONTENDED if problem.contended else GRADIENTS_SOLVED
    solved = GRADIENTS_SOLVED_ON_LINKS if has_two_links(problem) else solved
    solved = min(solved, GRADIENTS_SOLVED_LATE) if strategy.endswith(LATE_GATHER) else solved
    kept = _subsample(sorted(others), solved // problem.count)
    points = [_point(problem, here_us, problem.cost.cluster)]
    for ranks in kept:
        there = others[ranks]
        named = {OPTIMAL: strategy, **{name: name for name in BASELINES}}
        times_us = {name: predict(there, make_schedule(there, of)).iteration_us for name, of in named.items()}
        points.append(_point(there, times_us, problem.cost.cluster))
    return tuple(sorted(points, key=lambda point: point.ranks))


def _rank_counts(cluster: Cluster) -> list[int]:
    """Return powers of two within a node, then powers of two of whole nodes; without the cluster's own number."""
    most = min(max(LEAST_RANKS, FACTOR * cluster.ranks), max(MOST_RANKS, cluster.ranks))
    powers = [2**exponent for exponent in range(most.bit_length())]
    within = [ranks for ranks in powers if ranks < cluster.ranks_per_node]
    across = [nodes * cluster.ranks_per_node for nodes in powers]
    return [ranks for ranks in (*within, *across) if ranks <= most and ranks != cluster.ranks]


def _at(problem: Problem, ranks: int) -> Problem | None:
    """Return the problem on another number of ranks; None where the cluster has no cost for it."""
    try:
        resize(problem.cost.cluster, ranks)
        return Problem(profile=problem.profile, cost=communication_cost(problem.cost.cluster, ranks))
    except InputError:
        return None


def _subsample(values: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the values, evenly spread, the last one among them."""
    if most <= 0:
        return []
    # Counted from the end: what a curve is looked at for is its largest number of ranks.
    step = -(-len(values) // most) if values else 1
    return list(values[::-1][::step][::-1])


def _point(problem: Problem, times_us: Mapping[str, float], cluster: Cluster) -> ScalingPoint:
    measured = problem.ranks == cluster.ranks and bool(cluster.samples or cluster.collectives)
    return ScalingPoint(
        ranks=problem.ranks,
        nodes=problem.cost.cluster.nodes,
        basis="extrapolated" if problem.cost.extrapolated else "measured" if measured else "formula",
        source=problem.cost.source,
        iteration_us=dict(times_us),
    )
