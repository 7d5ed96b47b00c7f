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
from runtime.sparse.compressed import BucketResidual, CompressedBucket, Encoding, NoResidual, layer_runs
from runtime.sparse.compressors import make_compressor
from runtime.sparse.compressors.powersgd import LowRankCompressor
from runtime.sparse.compressors.sparse import SparseCompressor
from runtime.sparse.compressors.wire import WIRE_DTYPES, WireCompressor
from runtime.sparse.low_rank import LowRankEncoding, WarmResidual
from runtime.sparse.narrowing import NativeSum, Peers, TwoShots
from runtime.sparse.selection import Selection
from runtime.sparse.shards import SelectedShardBucket, ShardBucket, ShardResidual


def make_lossy_between(
    bucket: BucketBuffer, spec: CompressorSpec, topology: Topology, rank: int, tail: Tensor | None = None
) -> CompressedBucket:
    """Compress a bucket between nodes alone; as `make_lossy`, which compresses each rank's own gradients."""
    parts, place = topology.ranks_per_node, topology.local_rank(rank)
    share = share_of(sum(slot.parameter.numel() for slot in bucket.slots), parts)
    compressor = make_compressor(spec, [("shard", share)], ranks=topology.num_nodes)
    tail_elements = 0 if tail is None else tail.numel()
    encoding: Encoding
    if isinstance(compressor, WireCompressor):
        feedback = ShardResidual(bucket, parts, place) if compressor.error_feedback else NoResidual(bucket)
        group = topology.cross_node_groups[place]
        peers = Peers(len(group), group.index(rank), seed=rank)
        encoding = TwoShots(feedback, compressor, share, peers, tail_elements)
    else:
        assert isinstance(compressor, SparseCompressor)
        feedback = ShardResidual(bucket, parts, place)
        encoding = Selection(feedback, compressor, topology.num_nodes, tail_elements)
    kind = SelectedShardBucket if SelectedShardBucket.pays(encoding, feedback, topology.num_nodes) else ShardBucket
    return kind(feedback, encoding, topology, rank, tail)


def make_lossy(
    bucket: BucketBuffer, spec: CompressorSpec, ranks: int, tail: Tensor | None = None, *, rank: int = 0,
    native: bool = False,
) -> CompressedBucket:  # fmt: skip
    """Compress a bucket that has nothing behind its gradients.

    Args:
        bucket: where the gradients lie.
        spec: the compressor, as the plan has it.
        ranks: number of ranks that sum the bucket.
        tail: 1-D, small integers; becomes its sum over ranks.
        rank: this rank.
        native: whether the backend adds up in the dtype of `wire`.

    Raises:
        InputError: options of the compressor are wrong, or do not fit the bucket.
    """
    layers = layer_runs((slot.name, slot.parameter.numel()) for slot in bucket.slots)
    compressor = make_compressor(spec, layers, ranks=ranks, native=native)
    tail_elements = 0 if tail is None else tail.numel()
    if isinstance(compressor, LowRankCompressor):
        warm = WarmResidual(bucket, compressor)
        return CompressedBucket(warm, LowRankEncoding(warm, tail_elements), tail)
    if isinstance(compressor, WireCompressor):
        feedback = BucketResidual(bucket) if compressor.error_feedback else NoResidual(bucket)
        if native:
            return CompressedBucket(feedback, NativeSum(feedback, compressor, rank, tail_elements), tail)
        shots = TwoShots(feedback, compressor, sum(feedback.sizes), Peers(ranks, rank, seed=rank), tail_elements)
        return CompressedBucket(feedback, shots, tail)
    assert isinstance(compressor, SparseCompressor)
    feedback = BucketResidual(bucket)
    return CompressedBucket(feedback, Selection(feedback, compressor, ranks, tail_elements), tail)


def flags_dtype(last: PlanBucket, parameters: Mapping[str, nn.Parameter]) -> torch.dtype:
    """Return the dtype of the usage flags, which are sent behind the last bucket."""
    if last.dense:
        return parameters[last.gradients[0]].dtype
    return WIRE_DTYPES[last.compressor.dtype or ""] if last.transport.native else torch.float32


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
                lossy[bucket.index] = make_lossy(
                    bucket, planned.compressor, ranks, behind, rank=rank, native=planned.transport.native
                )
    flags.lie_in(tail)
    return buckets, flags, lossy
