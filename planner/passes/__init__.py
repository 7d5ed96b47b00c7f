"""Passes: small pure functions from schedule to schedule, one file each. `PASSES` is the only list of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from planner.ir import Schedule
from planner.passes.merge import Merge
from planner.problem import Problem


class Pass(Protocol):
    """A frozen dataclass whose fields are its options on the command line."""

    name: ClassVar[str]

    def apply(self, schedule: Schedule, problem: Problem) -> Schedule:
        """A new schedule; never worse in predicted step time than the one given."""
        ...


PASSES: Mapping[str, type[Pass]] = {Merge.name: Merge}
"""Registry: name → pass. Add a pass here and the contract test covers it."""
