"""Conclusions from the steps of a run, and the causes of differences from predictions. Torch-free."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Cause = Literal["none", "compute", "network", "rank"]
"""Cause of longer steps: none; this rank's computation; messages; the first message, which waits for another rank."""

BLOCK_STEPS = 5
"""Steps of a plan in a row, where two are tried; the first one, which has come from the other plan, is not counted."""

Z_SCORE = 2.0
"""Standard errors that a difference has to exceed before it counts."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Comparison of steps with a reference: the prediction, the exact plan's steps or those before a delay."""

    good: bool
    """Whether training may continue as it is."""
    step_us: float
    other_us: float
    """Reference step time: of the prediction or of the other plan."""
    text: str
    noise_us: float = 0.0
    """Half the interval in which the difference of two measured times lies (`half_interval`, or `Z_SCORE`)."""
    cause: Cause = "none"
    """Cause of steps that are longer than predicted."""


_T_QUANTILES = (12.706, 4.303, 3.182)
"""Quantiles of Student's t at 97.5 % with 1, 2 and 3 degrees of freedom."""


def t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, to three digits.

    Beyond the first three by the series of Abramowitz and Stegun, 26.7.5.
    """
    if freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[freedom - 1]
    z, v = 1.959964, freedom
    series = (z**3 + z) / (4 * v), (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    return z + sum(series) + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)


def half_interval(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean of independent values, by Student's t, which holds for few of them;
    of one value infinity.
    """
    count = len(values)
    return t_quantile(count - 1) * statistics.stdev(values) / count**0.5 if count > 1 else math.inf


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
    *, computed_us: float, predicted_computed_us: float, step_us: float, predicted_step_us: float, in_run: bool = False
) -> str | None:
    """Return what most of the difference between a step and its prediction comes from; None where that is small.
    Computed times are of forward, backward and update. `in_run`: the plan was made in the run, without a profile.
    """
    source, again = "the profile", "profile again"
    if in_run:
        source, again = "the steps that the plan was made from", "the run plans again where that lasts"
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
            return f"compute is {_times(ratio)} as fast as in {source} ({seen}): {again}"
        return f"compute takes {_times(1.0 / ratio)} as long as in {source} ({seen}): {again}"
    waited_us, predicted_us = max(0.0, step_us - computed_us), max(0.0, predicted_step_us - predicted_computed_us)
    more = "more" if away_us > 0.0 else "less"
    return (
        f"communication holds steps up {more} than predicted ({_ms(waited_us)} a step, predicted {_ms(predicted_us)}), "
        f"while compute is as in {source}: the network is not what it was, or a rank is a straggler; {again}"
    )


def _times(ratio: float) -> str:
    return "twice" if 1.95 <= ratio < 2.05 else f"{ratio:.1f} times"


def _ms(time_us: float) -> str:
    return f"{time_us / 1e3:.1f} ms"
