"""Layer-wise sparsification (LAGS-SGD, Shi et al., ECAI 2020): each layer's ratio by Eq. 19, layers merged.

Legal for bounded plans: what is left out of a step stays in a residual and is sent later. Asks the cost model for the
all-reduce of each layer, and for selection, gather and unpacking of its elements. Biases and normalization layers
are sent whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from planner.ir import TIE, Schedule
from planner.model.codecs import TopK
from planner.model.modes import step_us
from planner.model.problem import Problem
from planner.passes.base import Candidate, Pass
from planner.passes.joint import Codecs, Joint
from planner.search.lags import layer_wise, merge_layers
from runtime.plan import Accuracy


@dataclass(frozen=True, kw_only=True)
class Sparsify(Pass):
    name: ClassVar[str] = "sparsify"
    accuracy: ClassVar[Accuracy] = "bounded"

    max_ratio: float = 0.0
    """The largest ratio of elements to those that are sent; 0: 1000, and 250 for recurrent and embedding layers."""
    protect: str = ""
    """Names that are sent whole, as patterns separated by `|`; with `none`, biases and norms need not."""
    steps: int = 0
    """Steps of the training, as for `joint`."""

    @property
    def codecs(self) -> Codecs:
        return frozenset({TopK})

    def apply(self, schedule: Schedule, problem: Problem) -> Candidate:
        """Return Eq. 19's layers, merged for the shortest step, where that is shorter than the schedule given."""
        every = Joint(max_ratio=self.max_ratio, protect=self.protect, compress=TopK.option, steps=self.steps)
        frontier = every.frontier(schedule, problem)
        found = merge_layers(problem, layer_wise(problem, frontier.limits, by_layer=True))
        shorter = step_us(problem, found) < step_us(problem, schedule) * (1.0 - TIE)
        return Candidate(schedule=found if shorter else schedule, frontier=frontier)
