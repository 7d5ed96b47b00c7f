"""Both halves of the all-reduce apart, the second beside the next forward, cut by size alone, as DeAR and Megatron do.

Of both every bucket is reduce-scattered and gathered whole: groups of gathers are buckets. They are predicted as this
runtime would train with such buckets, owners updating their parts; DeAR itself gathers gradients, and every rank
updates all weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from planner.ir import TIE, Bucket, Schedule
from planner.model.modes import step_us
from planner.model.modes.late_gather import LateGather
from planner.model.problem import Problem
from planner.strategies.arguments import positive_number
from planner.strategies.baselines import MAX_MIB, ddp_buckets

THRESHOLDS_MIB = tuple(2.0 ** (power / 2.0) for power in range(-6, 25))
"""1/8 MiB to 4 GiB, two for each doubling."""
MEGATRON_ELEMENTS, MEGATRON_ELEMENTS_PER_RANK = 40_000_000, 1_000_000
"""A bucket has so many elements at the least, or so many for each rank (Megatron-LM's `DistributedDataParallel`)."""


def dear(problem: Problem, argument: str | None = None) -> Schedule:
    """Tensor fusion with one threshold (DeAR, Zhang et al., INFOCOM 2023): `dear:MIB`, by default the best of a sweep,
    which DeAR looks for by trial.
    """
    if argument is not None:
        return _cut(problem, positive_number("dear", argument, "MiB", at_most=MAX_MIB))
    tried = dict.fromkeys(_cut(problem, threshold) for threshold in THRESHOLDS_MIB)
    times_us = {schedule: step_us(problem, schedule) for schedule in tried}
    limit_us = min(times_us.values()) * (1.0 + TIE)
    return min((one for one in tried if times_us[one] <= limit_us), key=lambda one: len(one.buckets))


def megatron(problem: Problem, argument: str | None = None) -> Schedule:
    """Buckets of one size, all gathers in the order of forward (`--overlap-param-gather`): `megatron:MIB`, by default
    as many elements as Megatron-LM takes.
    """
    if argument is not None:
        return _cut(problem, positive_number("megatron", argument, "MiB", at_most=MAX_MIB))
    least = max(MEGATRON_ELEMENTS, MEGATRON_ELEMENTS_PER_RANK * problem.ranks)
    return _late(_filled(problem.numel.tolist(), least))


def _cut(problem: Problem, threshold_mib: float) -> Schedule:
    """Buckets that close with the gradient that reaches the threshold, whatever the dtypes."""
    return _late(ddp_buckets(problem.size_bytes.tolist(), [0] * problem.count, threshold_mib))


def _filled(sizes: Iterable[int], least: int) -> list[list[int]]:
    buckets: list[list[int]] = [[]]
    held = 0
    for gradient, size in enumerate(sizes):
        if held >= least:
            buckets.append([])
            held = 0
        buckets[-1].append(gradient)
        held += size
    return buckets


def _late(members: Iterable[Iterable[int]]) -> Schedule:
    buckets = tuple(Bucket(tuple(bucket)) for bucket in members)
    return replace(Schedule(buckets=buckets), mode=LateGather())
