"""The ops of one step that waits for its messages: selection, phases on several links, and unpacking included.

Each network takes its messages sorted by bucket + phase, then bucket: while bucket 1 is reduced between nodes, bucket 2
is scattered inside them.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.ir import Schedule
from planner.model.codecs import Spending
from planner.model.engine import COMPUTE, NETWORK, Op, Ops
from planner.model.problem import Problem
from planner.model.spending import slowdowns, spending
from planner.model.step import Exchange
from planner.model.updates import update_us


def step_ops(problem: Problem, schedule: Schedule, exchange: Exchange | None = None) -> Ops:
    """Return the ops of a step that sends what its buckets' collectives do, or `exchange`.

    Ops of a bucket have its number: its messages, and on compute `sparsify` and `unpack`.
    """
    ops, buckets = Ops(), schedule.buckets
    spent_on = [spending(problem, bucket) for bucket in buckets]
    if exchange is None:
        messages, end_us = _messages(problem, spent_on), update_us(problem, schedule)
    else:
        sent = zip(exchange.collectives, exchange.costs_us, strict=True)
        messages, end_us = [[(NETWORK, name, time_us)] for name, time_us in sent], exchange.end_us
    factors = [(problem.contention.compute, problem.contention.network)] * len(buckets)
    if problem.cost.slowdown is not None:
        by_size = slowdowns(problem, buckets, spent_on)
        # Contention by size was measured of messages that pass through all ranks.
        factors = [f if b.transport.hierarchical else of for of, b, f in zip(by_size, buckets, factors, strict=True)]

    ops.add(Op(COMPUTE, problem.forward_us, kind="forward"))
    closes, ends = {max(bucket.gradients): index for index, bucket in enumerate(buckets)}, [0] * len(buckets)
    for gradient, compute in enumerate(problem.profile.compute.gradients):
        last = ops.add(Op(COMPUTE, compute.backward_us, kind="backward"))
        if gradient in closes:
            index = closes[gradient]
            select_us = spent_on[index].before_us
            ends[index] = ops.add(Op(COMPUTE, select_us, kind="sparsify", bucket=index)) if select_us > 0.0 else last
    waves = sorted((index + phase, index, phase) for index, of in enumerate(messages) for phase in range(len(of)))
    for _, index, phase in waves:
        lane, kind, time_us = messages[index][phase]
        ends[index] = ops.add(Op(lane, time_us, (ends[index],), kind, bucket=index, factors=factors[index]))
    for index, spent in enumerate(spent_on):
        if spent.after_us > 0.0:
            ends[index] = ops.add(Op(COMPUTE, spent.after_us, (ends[index],), "unpack", bucket=index))
    ops.add(Op(COMPUTE, end_us, tuple(ends), "update"))
    return ops


def _messages(problem: Problem, spent_on: Sequence[Spending]) -> list[list[tuple[str, str, float]]]:
    """Return (lane, name, time) of every phase of every bucket.

    Where some collective has phases on both kinds of link, one that passes through all ranks uses the inter-node links.
    """
    phases = [[(message.resource, message.name, message.time_us) for message in spent.messages] for spent in spent_on]
    if all(lane == NETWORK for of in phases for lane, _, _ in of):
        return phases
    flat = "inter" if problem.cost.cluster.nodes > 1 else "intra"
    return [[(flat if lane == NETWORK else lane, name, us) for lane, name, us in of] for of in phases]
