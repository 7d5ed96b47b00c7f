"""Messages of buckets, and compute time before and after them."""

from __future__ import annotations

from collections.abc import Sequence

from planner.ir import Bucket
from planner.model.codecs import Spending, codec_of
from planner.model.problem import Problem


def spending(problem: Problem, bucket: Bucket) -> Spending:
    """Return what a bucket asks of networks and compute, each alone on the machine."""
    found = codec_of(bucket).spend(problem, bucket)
    return found._replace(before_us=0.0, after_us=0.0) if problem.ranks == 1 else found


def slowdowns(problem: Problem, buckets: Sequence[Bucket], spent: Sequence[Spending]) -> list[tuple[float, float]]:
    """Return the slow-down of compute and of the network while each bucket is in flight; compressed buckets count by
    what is sent of them, which `spent` has.
    """
    factors, slowdown = problem.bucket_factors([bucket.gradients for bucket in buckets]), problem.cost.slowdown
    if slowdown is None:
        return factors
    gathers = problem.cost.slowdown_of_gathers or slowdown
    for index, (bucket, of_bucket) in enumerate(zip(buckets, spent, strict=True)):
        messages = () if bucket.whole else of_bucket.messages
        if messages and all(message.resource == "network" for message in messages):
            of = gathers if bucket.transport.sparse else slowdown
            compute, network = of(sum(message.sent_bytes for message in messages))
            factors[index] = float(compute), float(network)
    return factors
