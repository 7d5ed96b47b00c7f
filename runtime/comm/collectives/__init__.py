"""Collectives that a bucket can be sent by. `COLLECTIVES`, `PHASED` and `NARROW_PHASED` are the only lists of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from runtime.comm.collectives.direct import (
    factored_all_reduce,
    library_all_reduce,
    naive_all_gather,
    narrowed_all_reduce,
    sparse_flat,
)
from runtime.comm.collectives.phases import Phase, Works
from runtime.comm.collectives.shards import hitopk_phases, narrow_torus_phases
from runtime.comm.collectives.torus_2d import torus_2d_phases
from runtime.comm.collectives.tree import tree_phases
from runtime.comm.topology import Topology
from runtime.plan import Plan, PlanBucket

Collective = Callable[[Any, dist.ProcessGroup], Works]
"""(message, ranks) → what it starts, one phase after the other, to carry one message of a bucket to all ranks.

A message is of the same size and dtype on every rank: `runtime.core.buckets.Message` (its `flat`, 1-D, becomes the sum
over ranks), `runtime.comm.collectives.direct.Packed` (its `gathered` becomes every rank's `flat`), `Narrowed` there
(its `gathered` becomes the sum) or `Factored` there (its `left` and `right` become sums)."""

LIBRARY, TWO_SHOT, NATIVE = ("all_reduce", "library"), ("all_reduce", "two_shot"), ("all_reduce", "native")
DENSE_FORMS: Mapping[str, frozenset[tuple[str, str]]] = {
    "wire": frozenset({LIBRARY, TWO_SHOT, NATIVE}), "powersgd": frozenset({LIBRARY})
}  # fmt: skip
"""Compressor → how buckets may be sent of which it sends every element in another form; of `wire`, on
all links."""

COLLECTIVES: Mapping[tuple[str, str], Collective] = {
    LIBRARY: library_all_reduce,
    NATIVE: library_all_reduce,
    TWO_SHOT: narrowed_all_reduce,
    ("sparse", "flat"): sparse_flat,
    ("sparse", "naive_all_gather"): naive_all_gather,
}
"""Registry: (collective, algorithm) → implementation. Add one here and the contract test covers it."""

BY_COMPRESSOR: Mapping[str, Collective] = {"wire": narrowed_all_reduce, "powersgd": factored_all_reduce}
"""Compressor → what the library's all-reduce means for its buckets."""

PHASED: Mapping[tuple[str, str], Callable[[Topology], tuple[Phase, ...]]] = {
    ("all_reduce", "torus_2d"): torus_2d_phases,
    ("all_reduce", "tree"): tree_phases,
    ("sparse", "hitopk"): hitopk_phases,
}
"""Registry of those that a thread of ours carries (`runtime.comm.phased_communicator`): several phases, or sends and
receives. Each gives its phases in order; other buckets' phases may come between them."""

TORUS, HITOPK = ("all_reduce", "torus_2d"), ("sparse", "hitopk")
NARROW_PHASED: Mapping[tuple[str, str], Callable[[Topology], tuple[Phase, ...]]] = {TORUS: narrow_torus_phases}
"""Those of `PHASED` that also send a bucket in a narrow format between nodes alone, and what carries it then."""
HIERARCHICAL = frozenset({TORUS, HITOPK})
"""Those that ask on which node a rank is."""


POINT_TO_POINT = frozenset({("all_reduce", "tree")})
"""Those that send from one rank to another, which gloo does from the host's memory alone."""


def form_of(bucket: PlanBucket) -> tuple[str, str]:
    """Return how a bucket is sent, as the registries call it."""
    return bucket.collective, bucket.algorithm


def collective_of(bucket: PlanBucket) -> Collective:
    """Return what carries a bucket of a collective that is not `PHASED`."""
    form = form_of(bucket)
    own = BY_COMPRESSOR.get(bucket.compressor.name) if form == LIBRARY else None
    return own or COLLECTIVES[form]


def is_narrow_between(bucket: PlanBucket) -> bool:
    """Whether a bucket is in a narrow format, and on the links between nodes alone."""
    return bucket.compressor.name == "wire" and form_of(bucket) in NARROW_PHASED


def phases_in(bucket: PlanBucket, topology: Topology) -> tuple[Phase, ...] | None:
    """Return the phases of a bucket of a collective that is `PHASED`; None of another one."""
    form = form_of(bucket)
    if form not in PHASED:
        return None
    return (NARROW_PHASED if is_narrow_between(bucket) else PHASED)[form](topology)


def asks_for_nodes(plan: Plan) -> bool:
    """Whether the plan, or the one that it falls back to, has collectives on two kinds of link."""
    return any(form_of(bucket) in HIERARCHICAL for bucket in plan.buckets) or (
        plan.fallback is not None and asks_for_nodes(plan.fallback)
    )


def has_phases(plan: Plan) -> bool:
    """Whether a thread of ours carries the plan's buckets."""
    return any(form_of(bucket) in PHASED for bucket in plan.buckets)
