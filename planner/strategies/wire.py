"""All elements in fewer bytes, as users have it from DDP's hooks for bfloat16 and float16; 8 bits beside them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.cost.wire import DTYPES
from planner.ir import Bucket, Places, Schedule
from planner.model.codecs import Wire
from planner.model.compression import NARROWED
from planner.model.problem import Problem
from planner.search.merge import MergeProblem, merge_exact
from runtime.errors import InputError
from runtime.plan.transports import NATIVE, TWO_SHOT

USUAL = "bfloat16"


def wire(problem: Problem, argument: str | None = None) -> Schedule:
    """Every bucket in one dtype, merged as suits its messages: `wire:DTYPE`, by default bfloat16; `wire:native` has the
    backend add up in bfloat16, as DDP's hook does.
    """
    native = argument == NATIVE.algorithm
    transport = NATIVE if native else TWO_SHOT
    dtype = USUAL if native or argument is None else argument
    if dtype not in DTYPES:
        known = ", ".join((*DTYPES, NATIVE.algorithm))
        raise InputError(f"found the strategy wire:{argument}, expected one of {known}, such as wire:int8")
    odd = next((one for one in problem.profile.compute.gradients if one.dtype not in NARROWED), None)
    if odd is not None:
        raise InputError(
            f"the strategy wire:{dtype}: found the gradient {odd.name} in {odd.dtype}, expected "
            f"{', '.join(sorted(NARROWED))}: choose another strategy"
        )
    if problem.ranks == 1:
        return Schedule.from_boundaries([problem.count])
    [phase] = problem.wire_cost(dtype, transport).phases
    before = np.concatenate([[0], np.cumsum(problem.numel)])

    def time_us(starts: Places, stops: Places) -> NDArray[np.float64]:
        return phase.time_us(before[stops] - before[starts])

    stops = merge_exact(MergeProblem(problem.ready_us, time_us, phase.non_decreasing)).stops
    return Schedule.cut(stops, lambda members: Bucket(tuple(members), transport, Wire(dtype)))
