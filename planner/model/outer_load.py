"""Work of outer steps on compute and network: local steps of a worker, and the round of each bucket between workers.

Ranks as workers send nothing in local steps, and a dense round is both halves of an all-reduce. Nodes as workers
average gradients over their ranks in every step, each bucket by a reduce-scatter and an all-gather on intra-node links;
where the optimizer step is sharded inside them, weights are gathered behind it in place of gradients.
In a round each rank sends its part of the node's message to the owners of that part, and all ranks gather what owners
send back.

Approximated: rounds and averages inside of nodes do not slow each other; an owner decodes as many bytes as between
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.cost.halves import ALL_GATHER, REDUCE_SCATTER, NodeCosts
from planner.cost.phases import Phase, measured_flat
from planner.cost.wire import WireCost, wire_cost
from planner.ir import Bucket, Codec, Places
from planner.model.codecs import Message, Spending, Wire
from planner.model.codecs.codec import prefix_sums
from planner.model.codecs.wire_dtypes import spend_on
from planner.model.delay_load import known_us
from planner.model.problem import Problem, memoised
from planner.model.spending import spending
from planner.model.step import Exchange, exchange_step_us
from runtime.plan.transports import TWO_SHOT

Worker = Literal["node", "sharded-node", "rank"]
NODE: Worker = "node"
SHARDED_NODE: Worker = "sharded-node"
"""A node with a sharded optimizer step."""
RANK: Worker = "rank"


def possible_workers(problem: Problem) -> tuple[Worker, ...]:
    """Return what may be a worker, that of the fewest workers first: nodes only where there are several, of several
    ranks, and the costs of intra-node and inter-node links are known.
    """
    return (RANK,) if problem.node_costs is None else (NODE, RANK)


def costs_of_nodes(problem: Problem, worker: Worker) -> NodeCosts | None:
    """Return the costs of nodes that are workers; None where ranks are, as on nodes of one rank."""
    return None if worker == RANK else problem.node_costs


def average_us(problem: Problem, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the time of averaging messages of these bytes over the ranks of a node, elementwise."""
    costs = problem.node_costs
    assert costs is not None
    return costs.scatter.times_us(sizes) + costs.gather.times_us(sizes)


def scatter_us(problem: Problem, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the time of reduce-scattering messages of these bytes over the ranks of a node, elementwise."""
    costs = problem.node_costs
    assert costs is not None
    return costs.scatter.times_us(sizes)


def own_update_us(problem: Problem, worker: Worker) -> float:
    """Return the time of a rank's update: of its part, where the step is sharded inside nodes."""
    return problem.update_us / (problem.cost.cluster.ranks_per_node if worker == SHARDED_NODE else 1)


def exchange_inside(problem: Problem, worker: Worker, buckets: Sequence[Bucket]) -> Exchange:
    """Return the messages of a local step with these buckets, and the update behind them; a rank has no messages."""
    costs, members = costs_of_nodes(problem, worker), [bucket.gradients for bucket in buckets]
    update_us = own_update_us(problem, worker)
    if costs is None:
        return Exchange((), (), update_us)
    if worker == NODE:
        costs_us = problem.bucket_cost_us(members, lambda sizes: average_us(problem, sizes))
        return Exchange(["all_reduce"] * len(members), costs_us, update_us)
    flags_bytes = float(problem.cost.cluster.ranks_per_node * problem.count)
    costs_us = list(problem.bucket_cost_us(members, lambda sizes: scatter_us(problem, sizes)))
    costs_us[-1] += costs.gather.time_us(flags_bytes)  # which gradients came
    gathers_us = problem.bucket_cost_us(members, costs.gather.times_us)
    return Exchange([REDUCE_SCATTER] * len(members), costs_us, update_us, gathers_us)


def local_us(problem: Problem, worker: Worker, buckets: Sequence[Bucket]) -> float:
    """Return the length of a local step with these buckets: without communication between workers."""
    exchange = exchange_inside(problem, worker, buckets)
    if not exchange.collectives:
        return problem.compute_end_us + exchange.end_us
    return exchange_step_us(problem, buckets, exchange)


def round_of(problem: Problem, worker: Worker, bucket: Bucket) -> Spending:
    """Return the messages and the compute time of a bucket's round. Packing weights, the outer step of an owner's part
    and mixing take as long as was measured for a delay.
    """
    sent, cluster = _sent(problem, worker, bucket), problem.cost.cluster
    size_bytes = float(problem.size_bytes[list(bucket.gradients)].sum())
    step_us = known_us(cluster.local_update, size_bytes / problem.ranks)
    return Spending(
        tuple(one._replace(time_us=one.time_us + step_us) for one in sent.messages[:1]) + sent.messages[1:],
        sent.before_us + known_us(cluster.push_pack, size_bytes),
        sent.after_us + known_us(cluster.pull_take, size_bytes),
    )


def _sent(problem: Problem, worker: Worker, bucket: Bucket) -> Spending:
    between_nodes = costs_of_nodes(problem, worker) is not None
    if between_nodes and isinstance(bucket.codec, Wire):
        return spend_on(_wire(problem, worker, bucket.codec.dtype), problem.elements(bucket))
    if not bucket.whole:
        return spending(problem, bucket)
    size_bytes = float(problem.size_bytes[list(bucket.gradients)].sum())
    phases = _phases(problem, worker)
    times_us = [problem.bucket_cost_us([bucket.gradients], phase.times_us)[0] for phase in phases]
    if not between_nodes:
        return Spending((Message("network", "all_reduce", size_bytes, sum(times_us)),))
    return Spending(
        tuple(
            Message("network", phase.name, phase.share * size_bytes, time_us)
            for phase, time_us in zip(phases, times_us, strict=True)
        )
    )


def round_us(problem: Problem, worker: Worker, codec: Codec, starts: Places, stops: Places) -> NDArray[np.float64]:
    """Return the time on the network of rounds of the gradients [start, stop), a bucket each."""
    if isinstance(codec, Wire):
        [phase] = _wire(problem, worker, codec.dtype).phases
        (before,) = prefix_sums(problem.numel)
        return phase.time_us(before[stops] - before[starts])
    total_us = np.zeros(())
    for phase_of_round in _phases(problem, worker):
        total_us = total_us + problem.range_time_us(phase_of_round.times_us, starts, stops)
    return total_us


@memoised
def _phases(problem: Problem, worker: Worker) -> tuple[Phase, ...]:
    """Return the messages of a dense round: between ranks the all-reduce, unless both of its halves were measured."""
    if (costs := costs_of_nodes(problem, worker)) is None:
        halves = {name: measured_flat(problem.cost.cluster, name) for name in (REDUCE_SCATTER, ALL_GATHER)}
        known = {name: curve for name, curve in halves.items() if curve is not None}
        curves = known if len(known) == len(halves) else {"all_reduce": problem.cost.all_reduce}
        return tuple(Phase(name=name, link="inter", curve=curve) for name, curve in curves.items())
    return costs.push, Phase(name=ALL_GATHER, link="inter", curve=problem.all_gather.curve)


@memoised
def _wire(problem: Problem, worker: Worker, dtype: str) -> WireCost:
    """Return the costs of rounds in a narrow dtype."""
    if costs_of_nodes(problem, worker) is None:
        return problem.wire_cost(dtype, TWO_SHOT)
    curves = tuple(phase.curve.of_share(phase.share) for phase in _phases(problem, worker))
    return wire_cost(problem.cost.cluster, dtype, curves, problem.ranks)
