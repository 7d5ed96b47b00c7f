"""PyTorch DDP's buckets, as `compute_bucket_assignment_by_size` makes them once it knows the order of readiness.

Each dtype fills its own bucket; a bucket closes with the gradient that reaches its limit. The first limit of each
dtype is 1 MiB, later ones 25 MiB; when a user gives `bucket_cap_mb`, that is the limit of all.
"""

from __future__ import annotations

from planner.ir import Bucket, Schedule
from planner.problem import Problem
from planner.strategies.arguments import positive_number

MIB = 1024 * 1024
FIRST_BUCKET_BYTES = 1 * MIB
BUCKET_BYTES = 25 * MIB
MAX_MIB = 2.0**33
"""More bytes than a model can have."""


def ddp(problem: Problem, argument: str | None = None) -> Schedule:
    """DDP's default buckets, or those of `bucket_cap_mb` = argument."""
    if argument is None:
        first_limit, limit = FIRST_BUCKET_BYTES, BUCKET_BYTES
    else:
        first_limit = limit = int(positive_number("ddp", argument, "MiB", at_most=MAX_MIB) * MIB)
    open_buckets: dict[int, list[int]] = {}
    open_bytes: dict[int, int] = {}
    limits: dict[int, int] = {}
    closed: list[list[int]] = []
    sizes, dtypes = problem.size_bytes.tolist(), problem.dtype_ids.tolist()
    for gradient, (size_bytes, dtype) in enumerate(zip(sizes, dtypes, strict=True)):
        open_buckets.setdefault(dtype, []).append(gradient)
        open_bytes[dtype] = open_bytes.get(dtype, 0) + size_bytes
        if open_bytes[dtype] >= limits.get(dtype, first_limit):
            closed.append(open_buckets.pop(dtype))
            open_bytes[dtype], limits[dtype] = 0, limit
    closed.extend(open_buckets.values())
    return Schedule(buckets=tuple(Bucket(gradients=tuple(members)) for members in sorted(closed)))
