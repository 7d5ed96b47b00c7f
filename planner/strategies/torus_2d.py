"""2D-torus all-reduce (Mikami et al., 2018; CommLib's dense rival), merged for its own cost."""

from __future__ import annotations

from functools import partial

from planner.ir import Schedule
from planner.model.problem import Problem
from planner.search.merge_phased import PhasedProblem, merge_phased
from planner.strategies.arguments import refuse_argument
from planner.strategies.mg_wfbp import mg_wfbp
from planner.strategies.single import single
from planner.strategies.wfbp import wfbp

ALGORITHM = "torus_2d"


def torus_2d(problem: Problem, argument: str | None = None) -> Schedule:
    """Every bucket reduce-scattered inside the node, all-reduced between nodes, all-gathered inside the node.

    Raises:
        InputError: the cluster has no cost for one of its two kinds of link.
    """
    refuse_argument(ALGORITHM, argument)
    arrays = phased_problem(problem)
    if arrays is None:
        return Schedule.from_boundaries([problem.count], ALGORITHM)
    usual = [single(problem), wfbp(problem, "layer"), mg_wfbp(problem)]
    starts = [tuple(bucket.gradients[-1] + 1 for bucket in schedule.buckets) for schedule in usual]
    return Schedule.from_boundaries(merge_phased(arrays, starts), ALGORITHM)


def phased_problem(problem: Problem) -> PhasedProblem | None:
    """The arrays that the merge works on; None for a single rank, which sends nothing."""
    phases = problem.phases("all_reduce", ALGORITHM)
    if not phases:
        return None
    return PhasedProblem(
        ready_us=problem.ready_us,
        links=tuple(phase.link for phase in phases),
        cost_us=tuple(partial(problem.range_time_us, phase.times_us) for phase in phases),
        non_decreasing=all(phase.curve.non_decreasing for phase in phases),
    )
