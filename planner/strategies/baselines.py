"""Baselines, which users could have instead of a plan: WFBP, one message, MG-WFBP, DDP's buckets; random buckets.

MG-WFBP (Shi, Chu, Li, INFOCOM 2019, Algorithm 1) walks from the last layer L down to 2 and merges layer l into layer
l−1 when the gradient of layer l−1 is ready before the communication of layer l has passed its start-up:
τ_b(l−1) + t_b(l−1) < τ_c(l) + a. After each merge it recomputes all starts τ_c. Merging l changes no start before that
of l−1, so one pass that carries the start of the open bucket along does the same.

DDP's buckets are as `compute_bucket_assignment_by_size` makes them once it knows the order of readiness. Each dtype
fills its own bucket; a bucket closes with the gradient that reaches its limit. The first limit of each dtype is 1 MiB,
later ones 25 MiB; when a user gives `bucket_cap_mb`, that is the limit of all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

from planner.ir import Bucket, Schedule
from planner.model.problem import Problem
from planner.strategies.strategy import number, strategy, whole, word

MIB = 1024 * 1024
FIRST_BUCKET_BYTES = 1 * MIB
BUCKET_BYTES = 25 * MIB
MAX_MIB = 2.0**33
"""More bytes than a model can have."""
MAX_SEED = 999_999


@strategy(word(["layer"], "wfbp or wfbp:layer"))
def wfbp(problem: Problem, unit: str = "") -> Schedule:
    """Return one bucket per gradient, or per layer with the argument `layer`."""
    stops = [stop for _, stop in problem.layer_runs] if unit else range(1, problem.count + 1)
    return Schedule.from_boundaries(stops)


@strategy()
def single(problem: Problem) -> Schedule:
    """Return one bucket."""
    return Schedule.from_boundaries([problem.count])


@strategy()
def mg_wfbp(problem: Problem) -> Schedule:
    """Return the buckets of Algorithm 1 on layers, in order of readiness; its a is the all-reduce's start-up time."""
    runs, ready_us = problem.layer_runs, problem.ready_us.tolist()
    start_up_us = problem.cost.all_reduce.start_up_us
    stops: list[int] = []
    end_us, first = 0.0, 0
    for (_, stop), (_, next_stop) in pairwise(runs):
        start_us = max(end_us, ready_us[stop - 1])
        if ready_us[next_stop - 1] >= start_us + start_up_us:
            end_us = start_us + float(problem.range_cost_us(first, stop))
            stops.append(stop)
            first = stop
    return Schedule.from_boundaries([*stops, problem.count])


@strategy(number("SIZE_MIB", "MiB", at_most=MAX_MIB))
def ddp(problem: Problem, cap_mib: float | None = None) -> Schedule:
    """Return DDP's default buckets, or those of a `bucket_cap_mb`."""
    members = ddp_buckets(problem.size_bytes.tolist(), problem.dtype_ids.tolist(), cap_mib)
    return Schedule(buckets=tuple(Bucket(tuple(bucket)) for bucket in members))


@strategy(whole("SEED", "seed", at_most=MAX_SEED), name="random")
def by_chance(problem: Problem, seed: int = 1) -> Schedule:
    """Return random runs of gradients, the same for the same seed, on which predictions are tested.

    Few buckets are as likely as many: the logarithm of their number is drawn.
    """
    draw = random.Random(seed)
    buckets = min(problem.count, int(problem.count ** draw.random()) + 1)
    return Schedule.from_boundaries([*sorted(draw.sample(range(1, problem.count), buckets - 1)), problem.count])


CAPS_MIB = (0.25, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 1024.0)
"""Values of `bucket_cap_mb` that DDP is tuned over."""


def ddp_buckets(
    sizes_bytes: Sequence[int], dtypes: Sequence[int], cap_mib: float | Sequence[float] | None = None
) -> list[list[int]]:
    """Return indices of the gradients in each bucket; sizes are in readiness order, equal dtypes have equal numbers.

    `cap_mib` is DDP's `bucket_cap_mb`, or its `bucket_cap_mb_list`, of which each dtype takes one after the other and
    keeps the last; None: its defaults.
    """
    caps = [cap_mib] if isinstance(cap_mib, int | float) else cap_mib
    limits = [FIRST_BUCKET_BYTES, BUCKET_BYTES] if caps is None else [int(cap * MIB) for cap in caps]
    open_buckets: dict[int, list[int]] = {}
    open_bytes: dict[int, int] = {}
    place: dict[int, int] = {}
    closed: list[list[int]] = []
    for gradient, (size_bytes, dtype) in enumerate(zip(sizes_bytes, dtypes, strict=True)):
        open_buckets.setdefault(dtype, []).append(gradient)
        open_bytes[dtype] = open_bytes.get(dtype, 0) + size_bytes
        at = place.setdefault(dtype, 0)
        if open_bytes[dtype] >= limits[at]:
            closed.append(open_buckets.pop(dtype))
            open_bytes[dtype], place[dtype] = 0, min(at + 1, len(limits) - 1)
    closed.extend(open_buckets.values())
    return sorted(closed)
