"""MG-WFBP (Shi, Chu, Li, INFOCOM 2019), Algorithm 1: a greedy merge of layers. A baseline; not optimal.

The paper walks from the last layer L down to 2 and merges layer l into layer l−1 when the gradient of layer l−1 is
ready before the communication of layer l has passed its start-up: τ_b(l−1) + t_b(l−1) < τ_c(l) + a. After each merge it
recomputes all starts τ_c. Merging l changes no start before l−1's, so one pass that carries the start of the open
bucket along does the same: a merged layer's communication starts at max(end of the bucket before, its ready time).
"""

from __future__ import annotations

from itertools import pairwise

from planner.ir import Schedule
from planner.model.problem import Problem
from planner.strategies.arguments import refuse_argument


def mg_wfbp(problem: Problem, argument: str | None = None) -> Schedule:
    """Algorithm 1 on layers, in order of readiness; its a is the start-up time of the all-reduce."""
    refuse_argument("mg_wfbp", argument)
    runs, ready_us = problem.layer_runs, problem.ready_us.tolist()
    start_up_us = problem.cost.all_reduce.start_up_us
    stops: list[int] = []
    end_us, first = 0.0, 0
    for (_, stop), (_, next_stop) in pairwise(runs):
        start_us = max(end_us, ready_us[stop - 1])
        if ready_us[next_stop - 1] >= start_us + start_up_us:
            end_us = start_us + float(problem.range_cost_us(first, stop))
            stops.append(stop)
            first = stop
    return Schedule.from_boundaries([*stops, problem.count])
