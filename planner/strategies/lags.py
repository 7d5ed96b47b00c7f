"""LAGS-SGD (Shi et al., ECAI 2020): one bucket per layer, its ratio by Eq. 19: as little compression as hides.

A layer's message has to hide behind the backward of the layer that comes next, selection included; the last layer in
backward has nothing to hide behind. A layer whose dense all-reduce hides stays dense. Otherwise the most elements whose
gather hides are sent, but never fewer than 1/c_u of them.
"""

from __future__ import annotations

import math

from planner.ir import Bucket, Schedule
from planner.problem import Problem
from planner.strategies.arguments import positive_number

DEFAULT_MAX_RATIO = 1000.0
MAX_RATIO = 1e12


def lags(problem: Problem, argument: str | None = None) -> Schedule:
    """Every layer by Eq. 19; `lags:CU` sets the largest ratio c_u, by default 1000."""
    max_ratio = DEFAULT_MAX_RATIO
    if argument is not None:
        max_ratio = positive_number("lags", argument, "times of compression", at_most=MAX_RATIO, at_least=1.0)
    runs = problem.layer_runs
    budgets_us = [_backward_us(problem, run) for run in runs[1:]] + [0.0]
    buckets = [_bucket(problem, run, us, max_ratio) for run, us in zip(runs, budgets_us, strict=True)]
    return Schedule(buckets=tuple(buckets))


def ratios(problem: Problem, schedule: Schedule) -> dict[str, float]:
    """Layer → c, its elements over those that travel. A name that comes back later is numbered: `conv`, `conv#2`."""
    result: dict[str, float] = {}
    seen: dict[str, int] = {}
    for bucket in schedule.buckets:
        layer = problem.profile.compute.gradients[bucket.gradients[0]].layer
        seen[layer] = seen.get(layer, 0) + 1
        name = layer if seen[layer] == 1 else f"{layer}#{seen[layer]}"
        result[name] = 1.0 if bucket.k is None else int(problem.numel[list(bucket.gradients)].sum()) / bucket.k
    return result


def _backward_us(problem: Problem, run: tuple[int, int]) -> float:
    gradients = problem.profile.compute.gradients[slice(*run)]
    return math.fsum(gradient.backward_us for gradient in gradients)


def _bucket(problem: Problem, run: tuple[int, int], budget_us: float, max_ratio: float) -> Bucket:
    """The bucket of one layer, with `budget_us` to hide behind."""
    members, numel = tuple(range(*run)), int(problem.numel[slice(*run)].sum())
    if numel == 0 or float(problem.range_cost_us(*run)) <= budget_us:
        return Bucket(gradients=members)
    fewest = math.ceil(numel / max_ratio)
    found = _most_that_hide(problem, members, numel, budget_us)
    return _sparse(members, max(fewest, found))


def _sparse(members: tuple[int, ...], k: int) -> Bucket:
    return Bucket(gradients=members, collective="sparse", algorithm="flat", compressor="topk", k=k)


def _most_that_hide(problem: Problem, members: tuple[int, ...], numel: int, budget_us: float) -> int:
    """The largest k whose gather and selection fit into the budget; 0 if none does."""
    spent_us = sum(problem.selection_us(_sparse(members, 1), field) for field in ("sparsify", "unpack"))

    def fits(k: int) -> bool:
        sent_us = sum(time_us for _, _, time_us in problem.phase_times(_sparse(members, k)))
        return sent_us + spent_us <= budget_us

    low, high = 0, numel
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
