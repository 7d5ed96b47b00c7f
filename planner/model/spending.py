"""What a step spends on a bucket: its messages, and compute before and after them. `SPENDING` has an entry for each
compressor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from planner.cost.phases import PHASES
from planner.cost.sparse import FLAT_GATHERS
from planner.cost.wire import WIDE_BYTES
from planner.ir import Bucket
from planner.model.problem import Problem


class Message(NamedTuple):
    """One phase of a bucket's collective."""

    resource: str
    """`network`, which passes through all ranks, or one of its two kinds of link, `intra` and `inter`."""
    name: str
    sent_bytes: float
    time_us: float


class Spending(NamedTuple):
    messages: tuple[Message, ...]
    before_us: float = 0.0
    """Compute time, once its last gradient is ready, for selecting or encoding."""
    after_us: float = 0.0
    """Compute time, after backward and once it has arrived, for unpacking or decoding."""


def spending(problem: Problem, bucket: Bucket) -> Spending:
    """Return what a bucket asks of networks and compute, each alone on the machine."""
    found = SPENDING[bucket.compressor](problem, bucket)
    return found._replace(before_us=0.0, after_us=0.0) if problem.ranks == 1 else found


def _whole(problem: Problem, bucket: Bucket) -> Spending:
    """One message per dtype and phase."""
    sizes: dict[int, int] = {}
    for gradient in bucket.gradients:
        dtype = int(problem.dtype_ids[gradient])
        sizes[dtype] = sizes.get(dtype, 0) + int(problem.size_bytes[gradient])
    total_bytes, key = float(sum(sizes.values())), (bucket.collective, bucket.algorithm)
    if key not in PHASES:
        time_us = problem.bucket_cost_us([bucket.gradients])[0]
        return Spending((Message("network", bucket.collective, total_bytes, time_us),))
    return Spending(
        tuple(
            Message(phase.link, phase.name, phase.share * total_bytes, sum(map(phase.time_us, sizes.values())))
            for phase in problem.phases(*key)
        )
    )


def _selected(problem: Problem, bucket: Bucket) -> Spending:
    """One message per phase, whatever the dtypes. A flat gather passes through all ranks: one network."""
    algorithm, k = bucket.algorithm, bucket.k or 0
    dense_bytes, elements = int(problem.size_bytes[list(bucket.gradients)].sum()), problem.elements(bucket)
    messages = tuple(
        Message(
            "network" if algorithm in FLAT_GATHERS else phase.link,
            phase.name,
            float(phase.message_bytes(k, dense_bytes)),
            phase.time_us(k, dense_bytes),
        )
        for phase in problem.sparse_phases(algorithm)
    )
    density = k * problem.shards(algorithm) / max(1, elements)
    select, unpack = problem.selection_cost(algorithm), problem.selection_cost(algorithm, "unpack")
    return Spending(messages, float(select(dense_bytes, density)), float(unpack(dense_bytes, density)))


def _narrow(problem: Problem, bucket: Bucket) -> Spending:
    """All elements in fewer bytes; owners' work between the two shots keeps the network waiting."""
    assert bucket.dtype is not None
    cost = problem.wire_cost(bucket.dtype, bucket.algorithm)
    elements = problem.elements(bucket)
    messages = tuple(
        Message(phase.link, phase.name, float(phase.sent_bytes(elements)), float(phase.time_us(elements)))
        for phase in cost.phases
    )
    return Spending(messages, float(cost.encode_us(elements)), float(cost.decode_us(elements)))


def _factored(problem: Problem, bucket: Bucket) -> Spending:
    """Left factors, and what needs their sums: one task of the network, for nothing comes between."""
    assert bucket.rank is not None
    cost, thin, members = problem.low_rank_cost(bucket.rank), problem.thin(bucket.rank), list(bucket.gradients)
    left, right, elements = int(thin.left[members].sum()), int(thin.right[members].sum()), problem.elements(bucket)
    sent_bytes, time_us = float(WIDE_BYTES * (left + right)), float(cost.network_us(left, right, elements))
    message = Message("network", bucket.collective, sent_bytes, time_us)
    return Spending((message,), float(cost.pack_us(elements)), float(cost.unpack_us(elements)))


SPENDING: Mapping[str, Callable[[Problem, Bucket], Spending]] = {
    "none": _whole, "topk": _selected, "wire": _narrow, "powersgd": _factored
}  # fmt: skip
"""Registry: compressor → what its buckets ask for."""


def slowdowns(problem: Problem, buckets: Sequence[Bucket], spent: Sequence[Spending]) -> list[tuple[float, float]]:
    """Return by how much compute and the network slow down while each bucket is on its way; what is compressed counts
    by what is sent of it, which `spent` has.
    """
    factors, slowdown = problem.bucket_factors([bucket.gradients for bucket in buckets]), problem.cost.slowdown
    if slowdown is None:
        return factors
    gathers = problem.cost.slowdown_of_gathers or slowdown
    for index, (bucket, of_bucket) in enumerate(zip(buckets, spent, strict=True)):
        messages = () if bucket.whole else of_bucket.messages
        if messages and all(message.resource == "network" for message in messages):
            of = gathers if bucket.collective == "sparse" else slowdown
            compute, network = of(sum(message.sent_bytes for message in messages))
            factors[index] = float(compute), float(network)
    return factors
