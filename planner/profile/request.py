"""What is asked of a profile. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from planner.documents.profile import Profile, load_profile
from runtime.errors import InputError
from runtime.plan import Accuracy

BUDGET_S = 60.0
"""What a profile may take beyond its first steps, where nothing is said."""
SHORTEST_S, LONGEST_S = 5.0, 24 * 3600.0
"""What may be asked for."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """See `planner.profile_step`."""

    accuracy: Accuracy = "exact"
    add_to: Profile | None = None
    budget_s: float = BUDGET_S

    def __post_init__(self) -> None:
        """Raise InputError where the class or the budget is none."""
        if self.accuracy not in get_args(Accuracy):
            raise InputError(
                f"found a profile for {self.accuracy!r} plans, expected one of: {', '.join(get_args(Accuracy))}"
            )
        if not SHORTEST_S <= self.budget_s <= LONGEST_S:
            raise InputError(
                f"found a budget of {self.budget_s:g} seconds beyond the first steps, expected {SHORTEST_S:g} to "
                f"{LONGEST_S:.0f}; correct it"
            )


def make_request(
    accuracy: str | None, add_to: str | None, budget_s: float | None, updaters: int | None = None
) -> Request:
    """Make one from the options of `planner profile`. Raises InputError where one is wrong, or they contradict."""
    if updaters is not None and accuracy not in (None, "relaxed"):
        raise InputError(
            f"--for {accuracy}: found --updaters {updaters}, which are for relaxed plans; add --for relaxed, or leave "
            f"--updaters out"
        )
    return Request(
        accuracy=accuracy or ("exact" if updaters is None else "relaxed"),  # type: ignore[arg-type]
        add_to=None if add_to is None else load_profile(add_to),
        budget_s=BUDGET_S if budget_s is None else budget_s,
    )
