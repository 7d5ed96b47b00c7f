"""Quantized buckets: bfloat16 and float16, as DDP's hooks have them, and 8 bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.cost.wire import DTYPES
from planner.ir import Bucket, Places, Schedule
from planner.model.codecs import Wire
from planner.model.compression import NARROWED
from planner.model.problem import Problem
from planner.search.merge import MergeProblem, merge_exact
from planner.strategies.strategy import check_dtypes, strategy, word
from runtime.plan.transports import NATIVE, TWO_SHOT

USUAL = "bfloat16"
KNOWN = (*DTYPES, NATIVE.algorithm)


@strategy(word(KNOWN, f"one of {', '.join(KNOWN)}, such as wire:int8"), accuracy="bounded")
def wire(problem: Problem, dtype: str = USUAL) -> Schedule:
    """Return every bucket in one dtype, by default bfloat16, merged for the cost of its messages; with `native` the
    backend adds up in bfloat16, as DDP's hook does.
    """
    native = dtype == NATIVE.algorithm
    transport, dtype = (NATIVE, USUAL) if native else (TWO_SHOT, dtype)
    check_dtypes(problem, f"wire:{dtype}", NARROWED)
    if problem.ranks == 1:
        return Schedule.from_boundaries([problem.count])
    [phase] = problem.wire_cost(dtype, transport).phases
    before = np.concatenate([[0], np.cumsum(problem.numel)])

    def time_us(starts: Places, stops: Places) -> NDArray[np.float64]:
        return phase.time_us(before[stops] - before[starts])

    stops = merge_exact(MergeProblem(problem.ready_us, time_us, phase.non_decreasing)).stops
    return Schedule.cut(stops, lambda members: Bucket(tuple(members), transport, Wire(dtype)))
