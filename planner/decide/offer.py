"""What a class of lossy plans has to offer beside the best exact plan, and which offer is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.passes.base import GAIN
from runtime.plan import Accuracy, Plan

ALLOWED = " was allowed, but "
"""In the note that says why no plan of the class was taken."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The best plan found of one class."""

    accuracy: Accuracy
    what: str
    """What it does, in a word or two: compression, delay, local updaters."""
    plan: Plan | None
    """None: nothing of this class makes the step shorter."""
    step_us: float
    """What the plan is judged by; without one, the exact plan's step."""
    batch_prep_us: float = 0.0
    """Of that, what steps of other classes leave out: making the minibatch."""
    why_not: str = ""
    """Why there is no plan, where it is not that none makes the step shorter."""

    @property
    def own_us(self) -> float:
        """What compares with steps of other classes."""
        return self.step_us - self.batch_prep_us


def choose_offer(exact_us: float, offers: Sequence[Offer]) -> tuple[Offer | None, dict[str, str]]:
    """The offer that is taken, or None for the exact plan; and of each that was refused (by `what`) why.

    Args:
        exact_us: the step of the exact plan.
        offers: from the least risky to the riskiest; each has to win by 2 % over the best less risky one.
    """
    chosen: Offer | None = None
    best_us, best = exact_us, ""
    refused: dict[str, str] = {}
    for offer in offers:
        than_us = best_us + offer.batch_prep_us
        gain = 1.0 - offer.step_us / than_us if than_us > 0.0 else 0.0
        if offer.plan is None:
            refused[offer.what] = offer.why_not or f"no {offer.what} would make the step shorter"
            continue
        if offer.step_us <= than_us * (1.0 - GAIN):
            chosen = offer
        elif gain < 0.0:
            refused[offer.what] = f"{offer.what} would gain less than {best}"
        else:
            than = f" than {best} does" if best else ""
            text = f"{offer.what} would make the step {gain:.2%} shorter{than}, and has to win {GAIN:.0%}"
            refused[offer.what] = text
        if offer.step_us < than_us:
            best_us, best = offer.own_us, offer.what
    return chosen, refused
