"""Buckets of one algorithm, merged for its own cost: a 2D-torus (Mikami et al., 2018; CommLib's dense rival), or two
binary trees (Sanders, Speck, Träff, 2009; NCCL 2.4).
"""

from __future__ import annotations

from functools import lru_cache, partial

from planner.ir import Schedule
from planner.model.problem import Problem
from planner.search.merge import MergeProblem, merge_exact
from planner.search.merge_phased import PhasedProblem, merge_phased
from planner.strategies.baselines import mg_wfbp, single, wfbp
from planner.strategies.strategy import strategy
from runtime.plan.transports import TORUS_2D, TREE


@strategy()
@lru_cache(maxsize=4)  # a pass asks twice, for its start and for what it must not be worse than
def torus_2d(problem: Problem) -> Schedule:
    """Return buckets that are each reduce-scattered inside nodes, all-reduced between them, all-gathered inside.

    Raises:
        InputError: the cluster has no cost of intra-node or inter-node links.
    """
    arrays = phased_problem(problem)
    if arrays is None:
        return Schedule.from_boundaries([problem.count], TORUS_2D)
    usual = [single(problem), wfbp(problem, "layer"), mg_wfbp(problem)]
    return Schedule.from_boundaries(merge_phased(arrays, [schedule.stops for schedule in usual]), TORUS_2D)


def phased_problem(problem: Problem) -> PhasedProblem | None:
    """Return the arrays that the merge works on; None for a single rank, which sends nothing."""
    phases = problem.phases(TORUS_2D)
    if not phases:
        return None
    return PhasedProblem(
        ready_us=problem.ready_us,
        links=tuple(phase.link for phase in phases),
        cost_us=tuple(partial(problem.range_time_us, phase.times_us) for phase in phases),
        non_decreasing=all(phase.curve.non_decreasing for phase in phases),
    )


@strategy()
def tree(problem: Problem) -> Schedule:
    """Return buckets that are each sent up and down two trees through all ranks.

    Raises:
        InputError: the cluster has no cost of intra-node or inter-node links.
    """
    phases = problem.phases(TREE)
    if not phases:
        return Schedule.from_boundaries([problem.count], TREE)
    [phase] = phases
    arrays = MergeProblem.of(problem, phase.times_us, phase.curve.non_decreasing)
    return Schedule.from_boundaries(merge_exact(arrays).stops, TREE)
