"""What is concluded from the steps of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Cause = Literal["none", "compute", "network", "rank"]
"""What made steps longer: nothing; this rank's computation; messages; the first message, which waits for another rank.
"""

Z_SCORE = 2.0
"""Standard errors that a difference has to exceed before it counts."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Steps as they are, held against what they should be: predicted, the exact plan's, those before a delay."""

    good: bool
    """Whether the run may go on as it does."""
    step_us: float
    other_us: float
    """What it is held against."""
    text: str
    """The finding in words."""
    noise_us: float = 0.0
    """Of two measured times: the standard error of their difference, times `Z_SCORE`."""
    cause: Cause = "none"
    """Of steps that are longer than predicted."""


def faster(step_us: float, other_us: float, noise_us: float, steps: str, others: str, following: str) -> Verdict:
    """Whether steps are shorter than others beyond the noise.

    Args:
        step_us: what they take.
        other_us: what the others take.
        noise_us: see `Verdict`.
        steps: what both are called.
        others: likewise.
        following: what the run goes on with if they are not.
    """
    good = other_us - step_us > noise_us
    taken = f"{step_us / 1e3:.2f} ms, {others} {other_us / 1e3:.2f} ms (noise ± {noise_us / 1e3:.2f} ms)"
    text = f"{steps} take {taken}" + ("" if good else f": they are not faster, and the run goes on with {following}")
    return Verdict(good=good, step_us=step_us, other_us=other_us, noise_us=noise_us, text=text)
