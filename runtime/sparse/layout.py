"""A plan's buckets laid out in memory, with what makes some of them lossy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from runtime.comm.collectives.phases import share_of
from runtime.comm.topology import Topology
from runtime.core.buckets import BucketBuffer, Message, make_plain_buckets
from runtime.core.usage import UsageFlags
from runtime.plan import CompressorSpec, Plan, PlanBucket
from runtime.plan.transports import NATIVE
from runtime.sparse.compressed import (
    BucketResidual,
    CompressedBucket,
    NarrowedBucket,
    NativeBucket,
    NoResidual,
    SelectedBucket,
    layer_runs,
)
from runtime.sparse.compressors import make_compressor
from runtime.sparse.compressors.powersgd import LowRankCompressor
from runtime.sparse.compressors.sparse import SparseCompressor
from runtime.sparse.compressors.wire import WIRE_DTYPES, WireCompressor
from runtime.sparse.hitopk import HitopkBucket
from runtime.sparse.low_rank import LowRankBucket, WarmResidual
from runtime.sparse.narrow_torus import NarrowTorusBucket
from runtime.sparse.shards import ShardResidual


def make_lossy_between(
    bucket: BucketBuffer, spec: CompressorSpec, topology: Topology, rank: int, tail: Tensor | None = None
) -> CompressedBucket:
    """Make a bucket lossy between nodes alone; as `make_lossy`, which begins with each rank's own gradients."""
    parts, part = topology.ranks_per_node, topology.local_rank(rank)
    share = share_of(sum(slot.parameter.numel() for slot in bucket.slots), parts)
    compressor = make_compressor(spec, [("shard", share)], ranks=topology.num_nodes)
    if isinstance(compressor, WireCompressor):
        feedback = ShardResidual(bucket, parts, part) if compressor.error_feedback else NoResidual(bucket)
        return NarrowTorusBucket(feedback, compressor, topology, rank, tail)
    assert isinstance(compressor, SparseCompressor)
    return HitopkBucket(ShardResidual(bucket, parts, part), compressor, topology, rank, tail)


def make_lossy(
    bucket: BucketBuffer, spec: CompressorSpec, ranks: int, tail: Tensor | None = None, *, rank: int = 0,
    native: bool = False,
) -> CompressedBucket:  # fmt: skip
    """Make a bucket lossy, with nothing behind its gradients; `tail` (1-D) becomes its sum over ranks. `native`: the
    backend adds up in the dtype of `wire`. Raises InputError.
    """
    layers = layer_runs((slot.name, slot.parameter.numel()) for slot in bucket.slots)
    compressor = make_compressor(spec, layers, ranks=ranks, native=native)
    if isinstance(compressor, LowRankCompressor):
        return LowRankBucket(WarmResidual(bucket, compressor), tail)
    if isinstance(compressor, WireCompressor):
        feedback = BucketResidual(bucket) if compressor.error_feedback else NoResidual(bucket)
        if native:
            return NativeBucket(feedback, compressor, rank, tail)
        return NarrowedBucket(feedback, compressor, ranks, rank, tail)
    assert isinstance(compressor, SparseCompressor)
    return SelectedBucket(BucketResidual(bucket), compressor, ranks, tail)


def flags_dtype(last: PlanBucket, parameters: Mapping[str, nn.Parameter]) -> torch.dtype:
    """Return the dtype of the usage flags, which are sent behind the last bucket."""
    if last.dense:
        return parameters[last.gradients[0]].dtype
    return WIRE_DTYPES[last.compressor.dtype or ""] if last.transport == NATIVE else torch.float32


def make_buckets(
    plan: Plan, parameters: Mapping[str, nn.Parameter], ranks: int, topology: Topology | None = None, rank: int = 0
) -> tuple[list[BucketBuffer], UsageFlags, dict[int, CompressedBucket]]:
    """Make the plan's buckets, the flags behind the last one, and by index what makes some lossy. Raises InputError
    where a compressor's options are wrong, or do not fit its bucket.
    """
    last = plan.buckets[-1]
    dtype = flags_dtype(last, parameters)
    flags = UsageFlags(len(plan.gradients), ranks, dtype)
    buckets = make_plain_buckets(plan, parameters, tail_elements=flags.elements if last.dense else 0)
    tail = buckets[-1].messages[0]
    if not last.dense:
        tail = Message(torch.zeros(flags.elements, dtype=dtype, device=tail.flat.device), [])
    lossy: dict[int, CompressedBucket] = {}
    for bucket, planned in zip(buckets, plan.buckets, strict=True):
        if not planned.dense:
            behind = tail.flat if planned is last else None
            if planned.transport.hierarchical:
                assert topology is not None
                lossy[bucket.index] = make_lossy_between(bucket, planned.compressor, topology, rank, behind)
            else:
                native = planned.transport == NATIVE
                lossy[bucket.index] = make_lossy(bucket, planned.compressor, ranks, behind, rank=rank, native=native)
    flags.lie_in(tail)
    return buckets, flags, lossy
