"""Parallel tensor operator (CommLib, Shi et al., MLSys 2021, Sec. 4.2): ranks share the norms that LARS and LAMB need.

Legal for exact plans: a layer's norms are the same bits whoever computes them. Asks for the measured time of each
layer's norms, and the cost model for an all-gather. Norms are shared where that is predicted to make the update
shorter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from planner.ir import Schedule
from planner.norms import partition_of, replicated_us, shared_us
from planner.problem import Problem
from runtime.errors import InputError

METHODS = ("cpsat", "lpt")


@dataclass(frozen=True, kw_only=True)
class ShardUpdates:
    """The pass `shard_updates`."""

    name: ClassVar[str] = "shard_updates"
    accuracy: ClassVar[Literal["exact", "bounded", "relaxed"]] = "exact"

    method: str = "cpsat"
    """How layers are split over ranks: `cpsat` looks on where `lpt`, the longest first, may not be best."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(
                f"--passes: shard_updates{{method={self.method}}}: expected one of: {', '.join(METHODS)}; correct it"
            )

    def apply(self, schedule: Schedule, problem: Problem) -> Schedule:
        """The schedule with norms shared, where that pays; without, where it does not."""
        alone = schedule.delay is not None or schedule.updaters is not None  # ranks update by themselves
        if not problem.norm_layers or problem.ranks == 1 or alone:
            return replace(schedule, norms=None)
        owners = partition_of(problem, self.method).owners
        pays = shared_us(problem, owners) < replicated_us(problem)
        return replace(schedule, norms=owners if pays else None)
