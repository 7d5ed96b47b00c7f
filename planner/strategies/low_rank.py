"""Products in place of matrices, as users have it from DDP's PowerSGD hook."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.ir import Bucket, Places, Schedule
from planner.model.codecs import LowRank
from planner.model.codecs.factors import FACTORED
from planner.model.problem import Problem
from planner.search.merge import MergeProblem, merge_exact
from planner.strategies.strategy import check_dtypes, strategy, whole
from runtime.errors import InputError
from runtime.plan.document import LARGEST_RANK


@strategy(whole("RANK", "rows of a factor", at_most=LARGEST_RANK), accuracy="bounded", name="lowrank")
def low_rank(problem: Problem, rank: int = 4) -> Schedule:
    """Return every bucket's matrices as products of one rank, by default 4, merged for the cost of its messages."""
    check_dtypes(problem, "lowrank", [FACTORED])
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
