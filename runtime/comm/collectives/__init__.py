"""Collectives that a bucket can be sent by. `COLLECTIVES` and `PHASED` are the only lists of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch.distributed as dist

from runtime.comm.collectives.direct import LibraryAllReduce, NaiveAllGather, SparseFlat
from runtime.comm.collectives.hitopk import hitopk_phases
from runtime.comm.collectives.narrowed import NarrowedAllReduce
from runtime.comm.collectives.phases import Phase
from runtime.comm.collectives.torus_2d import torus_2d_phases
from runtime.comm.collectives.tree import tree_phases
from runtime.comm.topology import Topology
from runtime.plan import Plan, PlanBucket


class Collective(Protocol):
    """Carries one message of a bucket to all ranks."""

    def run(self, message: Any, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """Starts one phase after the other: the generator goes on when the work that it has given has ended.

        Args:
            message: what a bucket gives to its communicator, of the same size and dtype on every rank:
                `runtime.core.buckets.Message` (its `flat`, 1-D, becomes the sum over ranks),
                `runtime.comm.collectives.direct.Packed` (its `gathered` becomes every rank's `flat`) or
                `runtime.comm.collectives.narrowed.Narrowed` (its `gathered` becomes the sum).
            group: the ranks.
        """
        ...


COLLECTIVES: Mapping[tuple[str, str], Collective] = {
    ("all_reduce", "library"): LibraryAllReduce(),
    ("sparse", "flat"): SparseFlat(),
    ("sparse", "naive_all_gather"): NaiveAllGather(),
}
"""Registry: (collective, algorithm) → implementation. Add one here and the contract test covers it."""

PHASED: Mapping[tuple[str, str], Callable[[Topology], tuple[Phase, ...]]] = {
    ("all_reduce", "torus_2d"): torus_2d_phases,
    ("all_reduce", "tree"): tree_phases,
    ("sparse", "hitopk"): hitopk_phases,
}
"""Registry of those that a thread of ours carries (`runtime.comm.phased_communicator`): several phases, or sends and
receives. Each gives its phases in order; other buckets' phases may come between them."""

TORUS, HITOPK = ("all_reduce", "torus_2d"), ("sparse", "hitopk")
HIERARCHICAL = frozenset({TORUS, HITOPK})
"""Those that ask on which node a rank is."""

NARROWED = NarrowedAllReduce()
"""What takes the place of the library's all-reduce for buckets with the compressor `wire`."""


def form_of(bucket: PlanBucket) -> tuple[str, str]:
    """How a bucket is sent, as the registries call it."""
    return bucket.collective, bucket.algorithm


def collective_of(bucket: PlanBucket) -> Collective:
    """The implementation that carries a bucket, one of those without phases."""
    return NARROWED if bucket.compressor.name == "wire" else COLLECTIVES[form_of(bucket)]


def asks_for_nodes(plan: Plan) -> bool:
    """Whether the plan, or the one that it falls back to, has collectives on two kinds of link."""
    return any(form_of(bucket) in HIERARCHICAL for bucket in plan.buckets) or (
        plan.fallback is not None and asks_for_nodes(plan.fallback)
    )


def has_phases(plan: Plan) -> bool:
    """Whether a thread of ours carries the plan's buckets."""
    return any(form_of(bucket) in PHASED for bucket in plan.buckets)
