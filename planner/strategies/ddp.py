"""PyTorch DDP's buckets, as `compute_bucket_assignment_by_size` makes them once it knows the order of readiness.

Each dtype fills its own bucket; a bucket closes with the gradient that reaches its limit. The first limit of each
dtype is 1 MiB, later ones 25 MiB; when a user gives `bucket_cap_mb`, that is the limit of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.ir import Bucket, Schedule
from planner.model.problem import Problem
from planner.strategies.arguments import positive_number

MIB = 1024 * 1024
FIRST_BUCKET_BYTES = 1 * MIB
BUCKET_BYTES = 25 * MIB
MAX_MIB = 2.0**33
"""More bytes than a model can have."""


def ddp(problem: Problem, argument: str | None = None) -> Schedule:
    """DDP's default buckets, or those of `bucket_cap_mb` = argument."""
    cap_mib = None if argument is None else positive_number("ddp", argument, "MiB", at_most=MAX_MIB)
    members = ddp_buckets(problem.size_bytes.tolist(), problem.dtype_ids.tolist(), cap_mib)
    return Schedule(buckets=tuple(Bucket(gradients=tuple(bucket)) for bucket in members))


def ddp_buckets(sizes_bytes: Sequence[int], dtypes: Sequence[int], cap_mib: float | None = None) -> list[list[int]]:
    """Indices of the gradients in each bucket.

    Args:
        sizes_bytes: of each gradient, in readiness order.
        dtypes: a number for each; equal for equal dtypes.
        cap_mib: `bucket_cap_mb`; None where the user gives none.
    """
    first_limit, limit = (
        (FIRST_BUCKET_BYTES, BUCKET_BYTES) if cap_mib is None else (int(cap_mib * MIB), int(cap_mib * MIB))
    )
    open_buckets: dict[int, list[int]] = {}
    open_bytes: dict[int, int] = {}
    limits: dict[int, int] = {}
    closed: list[list[int]] = []
    for gradient, (size_bytes, dtype) in enumerate(zip(sizes_bytes, dtypes, strict=True)):
        open_buckets.setdefault(dtype, []).append(gradient)
        open_bytes[dtype] = open_bytes.get(dtype, 0) + size_bytes
        if open_bytes[dtype] >= limits.get(dtype, first_limit):
            closed.append(open_buckets.pop(dtype))
            open_bytes[dtype], limits[dtype] = 0, limit
    closed.extend(open_buckets.values())
    return sorted(closed)
