"""What a step costs whose ranks share the optimizer's update (ZeRO-1), and what it takes of their memory.

Gradients are reduce-scattered in place of all-reduced, each rank updates its part of the weights, then weights are
all-gathered; a small message behind the last bucket says which gradients came. Nothing of that runs beside the next
forward. Costs are measured alone; where all-reduces were also measured in a queue, as steps have them, both messages
are taken to be later than alone by as much as those are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cost.curve import CostCurve
from planner.ir import Bucket, Schedule
from planner.problem import Problem

Sizes = NDArray[np.float64]


def can_share(problem: Problem) -> bool:
    """Whether the optimizer is known to treat every element by itself, and there are ranks to share its step."""
    optimizer = problem.profile.compute.optimizer
    return problem.ranks > 1 and optimizer is not None and optimizer.elementwise is True


def costs_known(problem: Problem) -> bool:
    """Whether somebody has said what a reduce-scatter and an all-gather take."""
    return not (problem.reduce_scatter.implied or problem.all_gather.implied)


def push_us(problem: Problem, sizes: Sizes) -> Sizes:
    """A reduce-scatter in a step, by the size of the message."""
    return np.asarray(problem.reduce_scatter.curve(sizes) + _late_us(problem, sizes))


def pull_us(problem: Problem, sizes: Sizes) -> Sizes:
    """An all-gather behind the update."""
    return np.asarray(problem.all_gather.curve(sizes) + _late_us(problem, sizes))


def _late_us(problem: Problem, sizes: Sizes) -> Sizes:
    cluster = problem.cost.cluster
    alone, queued = ((curves or {}).get("all_reduce") for curves in (cluster.samples, cluster.back_to_back))
    if alone is None or queued is None:
        return np.zeros_like(sizes)
    return np.maximum(0.0, problem.cost.all_reduce(sizes) - CostCurve.from_samples(alone)(sizes))


def message_costs_us(problem: Problem, schedule: Schedule) -> list[float]:
    """What each bucket's messages beside backward take."""
    members = [bucket.gradients for bucket in schedule.buckets]
    if not schedule.sharded:
        return problem.bucket_cost_us(members)
    costs_us = pushed_us(problem, members)
    told_bytes = np.array([float(problem.ranks * problem.count)])
    costs_us[-1] += float(problem.all_gather.curve(told_bytes)[0])
    return costs_us


def pushed_us(problem: Problem, buckets: Sequence[Sequence[int]]) -> list[float]:
    """The reduce-scatter of each bucket, given as its gradients."""
    return problem.bucket_cost_us(buckets, lambda sizes: push_us(problem, sizes))


def gathers_us(problem: Problem, buckets: Sequence[Bucket]) -> list[float]:
    """The all-gather of each bucket's weights."""
    return problem.bucket_cost_us([bucket.gradients for bucket in buckets], lambda sizes: pull_us(problem, sizes))


def own_update_us(problem: Problem) -> float:
    """The update of a rank's part."""
    return problem.update_us / problem.ranks


def replicated_bytes(problem: Problem) -> int | None:
    """What weights, gradients, the optimizer's state and known activations take on each rank; None where the state's
    size is not known.
    """
    optimizer = problem.profile.compute.optimizer
    if optimizer is None or optimizer.state_bytes is None:
        return None
    return 2 * int(problem.size_bytes.sum()) + optimizer.state_bytes + _activation_bytes(problem)


def sharded_bytes(problem: Problem, schedule: Schedule) -> int | None:
    """The same where ranks share the step: a part of the state, and memory that the largest message comes in."""
    optimizer = problem.profile.compute.optimizer
    if optimizer is None or optimizer.state_bytes is None:
        return None
    largest = max(problem.bucket_bytes([bucket.gradients for bucket in schedule.buckets]))
    state_bytes = -(-optimizer.state_bytes // problem.ranks)
    return 2 * int(problem.size_bytes.sum()) + state_bytes + int(largest) + _activation_bytes(problem)


def _activation_bytes(problem: Problem) -> int:
    return int(sum(layer.activation_bytes for layer in problem.profile.layers or ()))


def memory_bytes(problem: Problem, given_mib: float = 0.0) -> int | None:
    """What a rank has: as given, or as the profile says; None where nobody says."""
    return int(given_mib * 2**20) or problem.profile.world.memory_bytes
