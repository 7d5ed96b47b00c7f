"""Collectives that a bucket can be sent by. `COLLECTIVES` and `PHASED` are the only lists of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist

from runtime.comm.collectives.direct import by_message, library_all_reduce, naive_all_gather
from runtime.comm.collectives.phases import Phase, Works
from runtime.comm.collectives.shards import shard_phases
from runtime.comm.collectives.torus_2d import torus_2d_phases
from runtime.comm.collectives.tree import tree_phases
from runtime.comm.topology import Topology
from runtime.plan import Plan, PlanBucket
from runtime.plan.transports import FLAT, HITOPK, LIBRARY, NAIVE_ALL_GATHER, NATIVE, TORUS_2D, TREE, TWO_SHOT, Transport

Collective = Callable[[Any, dist.ProcessGroup], Works]
"""(message, ranks) → what it starts, one phase after the other, to carry one message of a bucket to all ranks.

A message is of the same size and dtype on every rank: `runtime.core.buckets.Message` (its `flat`, 1-D, becomes the sum
over ranks), `runtime.comm.collectives.direct.Packed` (its `gathered` becomes every rank's `flat`), `Narrowed` there
(its `gathered` becomes the sum) or `Factored` there (its `left` and `right` become sums)."""

COLLECTIVES: Mapping[Transport, Collective] = {
    LIBRARY: library_all_reduce,
    NATIVE: library_all_reduce,
    TWO_SHOT: by_message,
    FLAT: by_message,
    NAIVE_ALL_GATHER: naive_all_gather,
}
"""Registry: transport → implementation. Add one here and the contract test covers it."""

PHASED: Mapping[Transport, Callable[[Topology], tuple[Phase, ...]]] = {
    TORUS_2D: torus_2d_phases,
    TREE: tree_phases,
    HITOPK: partial(shard_phases, "all_gather"),
}
"""Registry of those that a thread of ours carries (`runtime.comm.phased_communicator`): several phases, or sends and
receives. Each gives its phases in order; other buckets' phases may come between them."""


def is_known(transport: Transport) -> bool:
    """Return whether a transport can be executed."""
    return transport in COLLECTIVES or transport in PHASED


def collective_of(bucket: PlanBucket) -> Collective:
    """Return the collective of a bucket whose transport is not `PHASED`; encoded messages know their all-reduce."""
    encoded = bucket.transport == LIBRARY and not bucket.dense
    return by_message if encoded else COLLECTIVES[bucket.transport]


def is_narrow_between(bucket: PlanBucket) -> bool:
    """Return whether a bucket is in a narrow format, and on the links between nodes alone."""
    return not bucket.dense and bucket.transport.hierarchical and not bucket.transport.sparse


def phases_in(bucket: PlanBucket, topology: Topology) -> tuple[Phase, ...] | None:
    """Return the phases of a bucket of a collective that is `PHASED`; None of another one."""
    phases = partial(shard_phases, "all_reduce") if is_narrow_between(bucket) else PHASED.get(bucket.transport)
    return None if phases is None else phases(topology)


def asks_for_nodes(plan: Plan) -> bool:
    """Return whether the plan, or its fallback, has collectives inside of nodes."""
    operator = plan.updates.operator if plan.updates else None
    return (
        any(bucket.transport.hierarchical for bucket in plan.buckets)
        or (operator is not None and operator.inside is not None)
        or (plan.fallback is not None and asks_for_nodes(plan.fallback))
    )


def has_phases(plan: Plan) -> bool:
    """Return whether a thread of ours carries the plan's buckets."""
    return any(bucket.transport in PHASED for bucket in plan.buckets)
