"""Costs of the messages of FSDP2's step on a cluster, over all ranks or inside groups of them (HSDP)."""

from __future__ import annotations

from planner.cost.halves import ALL_GATHER, REDUCE_SCATTER, half
from planner.cost.model import communication_cost
from planner.cost.phases import phase_of
from planner.documents.profile import Cluster
from planner.fsdp2.simulator import Cost, Costs
from runtime.errors import InputError

SLOWDOWN = 1.5
"""Slow-down of computation during messages, with whatever else grows with them: set on the rows of A100 of MPT's
published throughputs, and rows of H100 were held back (docs/results/validation.md). NCCL's kernels take multiprocessors
and memory bandwidth from computation; kernels alone are not known to slow one another down by more."""


def message_costs(cluster: Cluster, shard_ranks: int | None = None) -> Costs:
    """Return the costs of messages alone.

    Args:
        cluster: with all ranks.
        shard_ranks: how many ranks, those of a node, hold a copy of the model together; default: all.

    Raises InputError: a cost is not known.
    """
    inside = shard_ranks is not None and shard_ranks < cluster.ranks
    cost = communication_cost(cluster, shard_ranks if inside else None)
    between = phase_of(cluster, "all_reduce", "ring", "inter", cluster.nodes) if inside else None
    return Costs(
        gather_us=half(cost, ALL_GATHER).curve.at,
        scatter_us=half(cost, REDUCE_SCATTER).curve.at,
        reduce_us=None if between is None else between.curve.at,
        gather_inside_us=_inside(cluster),
    )


def _inside(cluster: Cluster) -> Cost | None:
    if cluster.nodes == 1 or cluster.ranks_per_node == 1:
        return None
    try:
        phase = phase_of(cluster, ALL_GATHER, "ring", "intra", cluster.ranks_per_node)
    except InputError:
        return None
    return None if phase is None else phase.time_us
