"""Products in place of matrices, as users have it from DDP's PowerSGD hook."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.ir import Bucket, Places, Schedule
from planner.model.codecs import LowRank
from planner.model.codecs.factors import FACTORED
from planner.model.problem import Problem
from planner.search.merge import MergeProblem, merge_exact
from planner.strategies.arguments import whole_number
from runtime.errors import InputError
from runtime.plan.document import LARGEST_RANK

USUAL = 4


def low_rank(problem: Problem, argument: str | None = None) -> Schedule:
    """Every bucket's matrices as products of one rank, merged as suits its messages: `lowrank:RANK`, by default 4."""
    rank = USUAL if argument is None else whole_number("lowrank", argument, "rows of a factor", at_most=LARGEST_RANK)
    gradients = problem.profile.compute.gradients
    odd = next((one for one in gradients if one.dtype != FACTORED), None)
    if odd is not None:
        raise InputError(
            f"the strategy lowrank: found the gradient {odd.name} in {odd.dtype}, expected {FACTORED}: choose another "
            f"strategy"
        )
    if problem.ranks == 1:
        return Schedule.from_boundaries([problem.count])
    thin, cost = problem.thin(rank), problem.low_rank_cost(rank)
    if not thin.factored.any():
        raise InputError(
            f"the strategy lowrank: found no gradient that is a matrix and larger than its factors of rank {rank}, "
            f"expected `matrix` in $.compute.gradients of the profile: `planner profile` writes it"
        )
    before, left, right = (np.concatenate([[0], np.cumsum(of)]) for of in (problem.numel, thin.left, thin.right))

    def time_us(starts: Places, stops: Places) -> NDArray[np.float64]:
        return cost.network_us(*(of[stops] - of[starts] for of in (left, right, before)))

    stops = merge_exact(MergeProblem(problem.ready_us, time_us, problem.cost.all_reduce.non_decreasing)).stops
    return Schedule.cut(stops, lambda members: Bucket(tuple(members), codec=LowRank(rank)))
