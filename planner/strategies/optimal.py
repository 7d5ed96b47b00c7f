"""The best exact schedule that this planner knows: what `planner optimize` decides without options, and with
`--allow sharded-step` for `optimal:sharded-step`.

`merge`, begun with the best of the baselines, then `topology`, which only two kinds of link give something to choose,
and what ranks share of the update. Strategies are predicted in some hundredths of a second: where gradients are many,
all buckets go flat or all by a torus, and `planner optimize`, which mixes them, may find better.
"""

from __future__ import annotations

from planner.ir import Schedule
from planner.model.problem import Problem
from planner.passes.merge import Merge, best_of
from planner.passes.shard_updates import ShardUpdates
from planner.passes.topology import Topology
from planner.search.link_forms import has_two_links
from planner.strategies.ddp import ddp
from planner.strategies.mg_wfbp import mg_wfbp
from planner.strategies.single import single
from planner.strategies.torus_2d import torus_2d
from planner.strategies.wfbp import wfbp
from runtime.errors import InputError
from runtime.plan.interfaces import SHARDED_STEP

MIXED = 200
"""Gradients up to which each bucket has a choice of its own on two kinds of link."""


def optimal(problem: Problem, argument: str | None = None) -> Schedule:
    """What `planner optimize` chooses among exact plans."""
    if argument not in (None, SHARDED_STEP):
        raise InputError(f"found the strategy optimal:{argument}, expected optimal or optimal:{SHARDED_STEP}")
    merged = Merge().apply(best_baseline(problem), problem)
    if problem.count <= MIXED or not has_two_links(problem):
        chosen = Topology().apply(merged, problem)
    else:
        chosen = best_of(problem, [merged, torus_2d(problem)])
    step = "auto" if argument == SHARDED_STEP else "never"
    return ShardUpdates(method="lpt", step=step).apply(chosen, problem)


def best_baseline(problem: Problem) -> Schedule:
    """The shortest of what users could have instead and a plan can hold: with several dtypes DDP's may interleave."""
    candidates = [wfbp(problem), wfbp(problem, "layer"), single(problem), mg_wfbp(problem)]
    return best_of(problem, candidates if problem.dtype_count > 1 else [*candidates, ddp(problem)])
