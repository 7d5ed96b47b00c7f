"""Layer-wise sparsification (LAGS-SGD, Shi et al., ECAI 2020): one bucket per layer, its ratio by Eq. 19.

Legal for bounded plans: what is left out of a step stays in a residual and is sent later. Asks the cost model for the
all-reduce of each layer, and for selection, gather and unpacking of its elements. Biases and normalization layers
travel whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from planner.ir import TIE, Schedule
from planner.model.compression import ratio_limits
from planner.model.problem import Problem
from planner.model.simulator import step_us
from planner.search.lags import layer_wise


@dataclass(frozen=True, kw_only=True)
class Sparsify:
    """The pass `sparsify`."""

    name: ClassVar[str] = "sparsify"
    accuracy: ClassVar[Literal["exact", "bounded", "relaxed"]] = "bounded"

    max_ratio: float = 0.0
    """The largest ratio of a layer's elements to those that travel; 0: 1000, and 250 for recurrent and embedding ones.
    """
    protect: str = ""
    """Names that travel whole, as patterns separated by `|`; with `none`, biases and norms need not."""

    def apply(self, schedule: Schedule, problem: Problem) -> Schedule:
        """Eq. 19's buckets where they make the step shorter, else the schedule as it was."""
        limits = ratio_limits(problem, self.max_ratio or None, self.protect)
        found = layer_wise(problem, limits, by_layer=True)
        return found if step_us(problem, found) < step_us(problem, schedule) * (1.0 - TIE) else schedule
