"""What the norms of layers cost that LARS and LAMB need: where every rank computes all of them, and where ranks share.

Shared, a step waits for the largest share and then for one all-gather of all norms; that this may run beside other work
of the update is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.ir import Schedule
from planner.model.problem import Problem
from planner.model.sharded_step import gathers_us, own_update_us
from runtime.plan.lpt import loads_of


def norm_costs_us(problem: Problem) -> tuple[float, ...]:
    """Of each layer, in the order of `Problem.norm_layers`."""
    return tuple(layer.norm_us for layer in problem.norm_layers)


def replicated_us(problem: Problem) -> float:
    """Every rank computes all of them."""
    return sum(norm_costs_us(problem))


def message_bytes(problem: Problem, owners: Sequence[int]) -> int:
    """What is gathered: from each rank as many norms as the most that one of them has."""
    norms = problem.profile.compute.norms
    most = max((owners.count(rank) for rank in set(owners)), default=0)
    return 0 if norms is None else problem.ranks * most * norms.row_bytes


def gather_us(problem: Problem, owners: Sequence[int]) -> float:
    """The all-gather."""
    size_bytes = np.array([float(message_bytes(problem, owners))])
    return float(problem.all_gather.curve(size_bytes)[0])


def shared_us(problem: Problem, owners: Sequence[int]) -> float:
    """The largest share, and the all-gather."""
    return max(loads_of(norm_costs_us(problem), owners, problem.ranks)) + gather_us(problem, owners)


def update_us(problem: Problem, schedule: Schedule) -> float:
    """The update of a schedule: as measured, where every rank does all of it, but for what sharing changes; with the
    gathers of norms or weights.
    """
    if schedule.sharded:
        return own_update_us(problem) + sum(gathers_us(problem, schedule.buckets))
    if schedule.norms is None:
        return problem.update_us
    return max(0.0, problem.update_us - replicated_us(problem) + shared_us(problem, schedule.norms))
