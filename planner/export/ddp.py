"""`--to ddp`: arguments for `torch.nn.parallel.DistributedDataParallel` that give the plan's buckets.

DDP rebuilds its buckets after the first step: in the order in which gradients became ready, each dtype by itself, a
bucket closing with the gradient that reaches its limit. With `bucket_cap_mb_list` (in MiB; torch 2.13 has it) each
bucket has a limit of its own, and the last one holds for all that follow; so a limit that is what the plan's bucket
holds closes it where the plan does. A MiB is a power of two, so the quotient and torch's product are exact.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from planner.export.base import NO_PRICE, Export, bucket_sizes, cost, members_of, stock_plan, stock_us
from planner.model.problem import Problem
from planner.strategies.baselines import BUCKET_BYTES, MIB, ddp_buckets
from runtime.plan import Plan

HOW = (
    "DistributedDataParallel(model, bucket_cap_mb_list=...); where only one size can be passed, bucket_cap_mb; "
    "with find_unused_parameters=True DDP does not rebuild its buckets, and these arguments give others"
)


def to_ddp(plan: Plan, problem: Problem | None) -> Export:
    """Return DDP's arguments; with a problem the buckets that DDP will make are checked against the plan's."""
    stand_in, notes = stock_plan(plan)
    sizes = bucket_sizes(stand_in, problem)
    caps_mib = [size / MIB for size in sizes if size > 0]
    odd = sorted({b.algorithm for b in stand_in.buckets if not b.transport.stock})
    if odd:
        notes.append(f"{', '.join(odd)}: DDP sends every bucket by the library's all-reduce")
    planned_us = stand_in.predicted.iteration_us if stand_in.predicted else None
    if problem is None:
        one_mib = (sorted(sizes)[len(sizes) // 2] or 1) / MIB
        notes.append("not checked against the model's gradients, whose dtypes and sizes --profile gives")
        notes.append(f"bucket_cap_mb is the median of the plan's buckets; {NO_PRICE}")
        if odd:
            notes.append(f"{', '.join(odd)}: {NO_PRICE}")
    else:
        planned = members_of(stand_in, problem)
        size_bytes, dtypes = problem.size_bytes.tolist(), problem.dtype_ids.tolist()
        made = ddp_buckets(size_bytes, dtypes, caps_mib) if caps_mib else planned
        made_us = stock_us(problem, made)
        if made != planned:
            why = "DDP keeps dtypes apart" if problem.dtype_count > 1 else "gradients without elements end a bucket"
            notes.append(f"DDP will make {len(made)} buckets where the plan has {len(planned)}: {why}")
        if (made != planned or odd) and planned_us is not None:
            notes.append(f"with bucket_cap_mb_list {cost(made_us - planned_us)}")
        one_mib, one_us = _best_size(problem, sizes)
        notes.append(f"with bucket_cap_mb alone {cost(one_us - (made_us if planned_us is None else planned_us))}")
    document = {"bucket_cap_mb": one_mib, "bucket_cap_mb_list": caps_mib, "notes": [*notes, HOW]}
    return Export(text=json.dumps(document, indent=1) + "\n", document=document, notes=(*notes, HOW))


def _best_size(problem: Problem, sizes: Sequence[int]) -> tuple[float, float]:
    """Return (MiB, simulated step) of the one bucket size that is best among the plan's own sizes and usual ones."""
    usual = [BUCKET_BYTES * 2**power // 16 for power in range(7)]
    shares = [sum(sizes) // parts for parts in range(1, 9)]
    candidates = sorted(size for size in {*usual, *shares, *sizes} if size > 0)
    size_bytes, dtypes = problem.size_bytes.tolist(), problem.dtype_ids.tolist()
    found = [(stock_us(problem, ddp_buckets(size_bytes, dtypes, size / MIB)), -size) for size in candidates]
    best_us, size = min(found)
    return -size / MIB, best_us
