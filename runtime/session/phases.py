"""Plans in phases: each takes the place of the one before at a step, or when the script says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
        self._plans, self._step, self._begin = [phase.plan for phase in phases], step, begin
        self._borders = [phase.until_step for phase in phases[:-1]]
        self.index = 0

    def step_done(self) -> Plan | None:
        """Return the plan of the next phase where the present one ends with this step."""
        before = self.index
        for until_step in self._borders[before:]:
            if until_step is None or self._step() < until_step:
                break
            self.index += 1
        if self.index == before:
            return None
        plan = self[self.index]
        self._begin(plan)
        return plan

    def __getitem__(self, index: int) -> Plan:
        """Return the plan of a phase. Raises InputError behind the last one."""
        if index >= len(self._plans):
            raise InputError(
                f"session.next_phase: found the last of {len(self._plans)} phases, expected one after it; call it "
                f"once for each border, or give the plan more phases"
            )
        return self._plans[index]

    def saved_in(self, state: Any) -> int:
        """Return the phase of `Session.state_dict()`, or of a list of them; the present one if it names none."""
        one = state[0] if isinstance(state, list | tuple) and state else state
        index = one.get("phase", self.index) if isinstance(one, dict) else self.index  # no state is refused later
        if index not in range(len(self._plans)):
            raise InputError(
                f"load_state_dict: found the state of phase {index!r}, expected one from 0 to "
                f"{len(self._plans) - 1}; attach the plan that the run began with"
            )
        return int(index)
