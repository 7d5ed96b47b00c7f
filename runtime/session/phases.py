"""Plans in phases: each takes the place of the one before at a step, or when the script says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runtime.errors import InputError
from runtime.plan import Plan
from runtime.plan.document import PhasePlan


class Phases:
    """The `runtime.session.session.Director` of a plan in phases; alike on all ranks, as it depends on steps alone."""

    def __init__(self, phases: Sequence[PhasePlan], step: Callable[[], int], begin: Callable[[Plan], None]) -> None:
        """Begin with the first phase.

        Args:
            phases: the phases, in order.
            step: returns the number of steps done.
            begin: called with the plan of a phase before it begins at its step.
        """
        self._phases, self._step, self._begin = tuple(phases), step, begin
        self.index = 0

    def step_done(self) -> Plan | None:
        """Return the plan of the next phase where the present one ends with this step."""
        until_step = self._phases[self.index].until_step
        if until_step is None or self._step() < until_step:
            return None
        plan = self.advance()
        self._begin(plan)
        return plan

    def advance(self) -> Plan:
        """Begin the next phase, and return its plan. Raises InputError in the last one."""
        if self.index == len(self._phases) - 1:
            raise InputError(
                f"session.next_phase: found the last of {len(self._phases)} phases, expected one after it; call it "
                f"once for each border, or give the plan more phases"
            )
        self.index += 1
        return self._phases[self.index].plan
