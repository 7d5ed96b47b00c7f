"""All-reduces split into their halves, the second during the next forward, in buckets of one size, as DeAR and
Megatron do.

Every bucket is reduce-scattered and gathered whole: groups of gathers are buckets. They are predicted as this
runtime would train with such buckets, owners updating their parts; DeAR itself gathers gradients, and every rank
updates all weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from planner.ir import Bucket, Schedule
from planner.model.modes import best_of
from planner.model.modes.late_gather import LateGather
from planner.model.problem import Problem
from planner.strategies.baselines import MAX_MIB, ddp_buckets
from planner.strategies.strategy import number, strategy

THRESHOLDS_MIB = tuple(2.0 ** (power / 2.0) for power in range(-6, 25))
"""1/8 MiB to 4 GiB, two for each doubling."""
MEGATRON_ELEMENTS, MEGATRON_ELEMENTS_PER_RANK = 40_000_000, 1_000_000
"""Least number of elements of a bucket, in all or for each rank (Megatron-LM's `DistributedDataParallel`)."""


@strategy(number("MIB", "MiB", at_most=MAX_MIB))
def dear(problem: Problem, threshold_mib: float | None = None) -> Schedule:
    """Return tensor fusion with one threshold (DeAR, Zhang et al., ICDCS 2023), by default the best of a sweep, which
    DeAR looks for by trial.
    """
    if threshold_mib is not None:
        return _cut(problem, threshold_mib)
    return best_of(problem, [_cut(problem, threshold) for threshold in THRESHOLDS_MIB])


@strategy(number("MIB", "MiB", at_most=MAX_MIB))
def megatron(problem: Problem, size_mib: float | None = None) -> Schedule:
    """Return buckets of one size, all gathers in the order of forward (`--overlap-param-gather`), by default with as
    many elements as Megatron-LM takes.
    """
    if size_mib is not None:
        return _cut(problem, size_mib)
    least = max(MEGATRON_ELEMENTS, MEGATRON_ELEMENTS_PER_RANK * problem.ranks)
    return _late(_filled(problem.numel.tolist(), least))


def _cut(problem: Problem, threshold_mib: float) -> Schedule:
    """Return buckets that close with the gradient that reaches the threshold, whatever the dtypes."""
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
