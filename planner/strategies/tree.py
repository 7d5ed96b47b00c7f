"""All-reduce over two binary trees (Sanders, Speck, Träff, 2009; NCCL 2.4), merged for its own cost."""

from __future__ import annotations

from planner.ir import Schedule
from planner.model.problem import Problem
from planner.search.merge import MergeProblem, merge_exact
from planner.strategies.arguments import refuse_argument

ALGORITHM = "tree"


def tree(problem: Problem, argument: str | None = None) -> Schedule:
    """Every bucket up and down two trees through all ranks.

    Raises:
        InputError: the cluster has no cost for one of its kinds of link.
    """
    refuse_argument(ALGORITHM, argument)
    phases = problem.phases("all_reduce", ALGORITHM)
    if not phases:
        return Schedule.from_boundaries([problem.count], ALGORITHM)
    [phase] = phases
    arrays = MergeProblem(
        ready_us=problem.ready_us,
        cost_us=lambda starts, stops: problem.range_time_us(phase.times_us, starts, stops),
        non_decreasing=phase.curve.non_decreasing,
    )
    return Schedule.from_boundaries(merge_exact(arrays).stops, ALGORITHM)
