"""Collectives that a bucket can travel by, one file each. `COLLECTIVES` is the only list of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch.distributed as dist

from runtime.collectives.library import LibraryAllReduce
from runtime.collectives.narrowed import NarrowedAllReduce
from runtime.collectives.sparse_flat import SparseFlat
from runtime.plan import PlanBucket


class Collective(Protocol):
    """Carries one message of a bucket to all ranks."""

    def run(self, message: Any, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """Starts one phase after the other: the generator goes on when the work that it has given has ended.

        Args:
            message: what a bucket gives to its communicator, of the same size and dtype on every rank:
                `runtime.buckets.Message` (its `flat`, 1-D, becomes the sum over ranks), `runtime.selected.Packed` (its
                `gathered` becomes every rank's `flat`) or `runtime.narrowed.Narrowed` (its `gathered` becomes the sum).
            group: the ranks.
        """
        ...


COLLECTIVES: Mapping[tuple[str, str], Collective] = {
    ("all_reduce", "library"): LibraryAllReduce(),
    ("sparse", "flat"): SparseFlat(),
}
"""Registry: (collective, algorithm) → implementation. Add one here and the contract test covers it."""

NARROWED = NarrowedAllReduce()
"""What takes the place of the library's all-reduce for buckets with the compressor `wire`."""


def collective_of(bucket: PlanBucket) -> Collective:
    """The implementation that carries a bucket."""
    return NARROWED if bucket.compressor.name == "wire" else COLLECTIVES[(bucket.collective, bucket.algorithm)]
