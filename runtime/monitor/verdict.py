"""What is concluded from the steps of a run, and why they are not what was predicted. Torch-free."""

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
    noise_us: float = 0.0
    """Of two measured times: the standard error of their difference, times `Z_SCORE`."""
    cause: Cause = "none"
    """Of steps that are longer than predicted."""


def faster(step_us: float, other_us: float, noise_us: float, steps: str, others: str, following: str) -> Verdict:
    """Return whether steps (called `steps`) are shorter than `others` beyond the noise (see `Verdict`); if not, the
    text says that the run continues with `following`.
    """
    good = other_us - step_us > noise_us
    taken = f"{step_us / 1e3:.2f} ms, {others} {other_us / 1e3:.2f} ms (noise ± {noise_us / 1e3:.2f} ms)"
    text = f"{steps} take {taken}" + ("" if good else f": they are not faster, and the run goes on with {following}")
    return Verdict(good=good, step_us=step_us, other_us=other_us, noise_us=noise_us, text=text)


EXPLAINED_ERROR = 0.2
"""A step further than this from its prediction is explained."""


def cause_of_error(
    *, computed_us: float, predicted_computed_us: float, step_us: float, predicted_step_us: float
) -> str | None:
    """Return what most of the difference between a step and its prediction comes from; None where that is small.
    Computed times are of forward, backward and update.
    """
    away_us = step_us - predicted_step_us
    if min(computed_us, predicted_computed_us, step_us, predicted_step_us) <= 0.0 or (
        abs(away_us) <= EXPLAINED_ERROR * min(step_us, predicted_step_us)
    ):
        return None
    computed_away_us = computed_us - predicted_computed_us
    if computed_away_us * away_us > 0.0 and 2.0 * abs(computed_away_us) >= abs(away_us):
        seen = f"{_ms(computed_us)} a step, predicted {_ms(predicted_computed_us)}"
        ratio = predicted_computed_us / computed_us
        if ratio > 1.0:
            return f"compute is {_times(ratio)} as fast as in the profile ({seen}): profile again"
        return f"compute takes {_times(1.0 / ratio)} as long as in the profile ({seen}): profile again"
    waited_us, predicted_us = max(0.0, step_us - computed_us), max(0.0, predicted_step_us - predicted_computed_us)
    more = "more" if away_us > 0.0 else "less"
    return (
        f"communication holds steps up {more} than predicted ({_ms(waited_us)} a step, predicted {_ms(predicted_us)}), "
        f"while compute is as profiled: the network is not what it was, or a rank is a straggler; profile again"
    )


def _times(ratio: float) -> str:
    return "twice" if 1.95 <= ratio < 2.05 else f"{ratio:.1f} times"


def _ms(time_us: float) -> str:
    return f"{time_us / 1e3:.1f} ms"
