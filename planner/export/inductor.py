"""`--to inductor`: how long all-reduces take, in the form that torch.compile's overlap scheduler reads.

With `torch._inductor.config.aten_distributed_optimizations.profile_guided_estimations_profile_path` it takes a Chrome
trace, looks collectives up in it by ranks and dtype, and interpolates over the number of elements. The file holds
nothing but such observations: the profile's all-reduce where that is given, else the plan's own messages.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import numpy as np

from planner.documents.profile import DTYPE_BYTES
from planner.export.base import Export, bucket_sizes
from planner.model.problem import Problem
from runtime.errors import InputError
from runtime.plan import Plan

SCALAR_TYPES = {"float32": "Float", "bfloat16": "BFloat16", "float16": "Half", "float64": "Double"}
"""Name of each dtype in traces."""
SMALLEST_BYTES = 1024

NOTES = (
    "config.aten_distributed_optimizations.profile_guided_estimations_profile_path = FILE, on every rank; computation "
    "is estimated by torch itself",
    "buckets and their order cannot be expressed: the scheduler makes its own, by these times; what that costs is not "
    "predicted, for the compiler moves computation, too",
)


def to_inductor(plan: Plan, problem: Problem | None) -> Export:
    """Return the times of all-reduces. Raises InputError where neither plan nor profile has any."""
    ranks = plan.world.ranks
    if problem is not None:
        total = max(SMALLEST_BYTES, int(problem.size_bytes.sum()))
        sizes = [SMALLEST_BYTES * 2**power for power in range((total // SMALLEST_BYTES).bit_length())]
        sizes = sorted({*sizes, total})
        times_us = problem.cost.all_reduce(np.array(sizes, dtype=np.float64)).tolist()
        points = list(zip(sizes, times_us, strict=True))
    else:
        points = _planned_points(plan)
    known = [f"{size:,} bytes {time_us / 1e3:.3g} ms" for size, time_us in (points[0], points[-1])]
    notes = (f"all-reduce over {ranks} ranks: {len(points)} sizes, {' to '.join(known)}", *NOTES)
    events = [_event(size, time_us, dtype, ranks) for dtype in SCALAR_TYPES for size, time_us in points]
    document = {
        "schemaVersion": 1,
        "distributedInfo": {"pg_config": [{"pg_name": "0", "ranks": list(range(ranks))}]},
        "traceEvents": [{**event, "ts": at} for at, event in enumerate(events)],
        "notes": list(notes),
    }
    return Export(text=json.dumps(document) + "\n", document=document, notes=notes)


def _planned_points(plan: Plan) -> list[tuple[int, float]]:
    tasks = (plan.predicted.timeline if plan.predicted else None) or ()
    took = {task.bucket: task.end_us - task.start_us for task in tasks if task.resource == "network"}
    plain = [at for at, b in enumerate(plan.buckets) if b.transport.stock and b.dense and took.get(at, 0.0) > 0.0]
    if not plain:
        raise InputError(
            "found no bucket that is sent whole by the library's all-reduce and has a predicted time, so nothing to "
            "estimate from; give the profile that the plan was made from with --profile"
        )
    sizes = bucket_sizes(plan, None)
    observed = sorted((sizes[at], took[at]) for at in plain if sizes[at] > 0)
    return [(size, min(time_us for _, time_us in same)) for size, same in groupby(observed, key=lambda of: of[0])]


def _event(size_bytes: int, time_us: float, dtype: str, ranks: int) -> dict[str, Any]:
    elements = max(1, size_bytes // DTYPE_BYTES[dtype])
    return {
        "ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "pid": 0, "tid": 0, "dur": time_us,
        "args": {
            "Collective name": "allreduce", "Process Group Name": "0", "Process Group Ranks": str(list(range(ranks))),
            "Group size": ranks, "In msg nelems": elements, "Out msg nelems": elements, "dtype": SCALAR_TYPES[dtype],
        },
    }  # fmt: skip
