"""What a pass is, and by how much a riskier choice has to win."""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

from planner.ir import Schedule
from planner.model.problem import Problem

GAIN = 0.02
"""Share of the step that a riskier class has to save."""


class Pass(Protocol):
    """A frozen dataclass whose fields are its options on the command line."""

    name: ClassVar[str]
    accuracy: ClassVar[Literal["exact", "bounded", "relaxed"]]
    """The class of its results."""

    def apply(self, schedule: Schedule, problem: Problem) -> Schedule:
        """A new schedule; never worse in predicted step time than the one given."""
        ...
