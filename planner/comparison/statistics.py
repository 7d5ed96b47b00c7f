"""Medians, intervals and verdicts of steps that were measured in interleaved blocks. Torch-free."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.monitor.verdict import half_interval, t_quantile

TELLING = 0.02
"""The relative difference of two steps that a comparison should tell from noise."""
MOST_ROUNDS = 10_000
MOST_EXPONENT = 50.0
"""Largest logarithm of a bound, so that it is a finite number."""


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float
    rounds: int = 0
    """Number of rounds in which it was measured."""

    @classmethod
    def of(cls, value: float, logarithms: Sequence[float]) -> Interval:
        """Return the interval of a value of which each round gives one, as its logarithm.

        Only rounds are independent: steps of one round are alike, for any number of them. For few rounds Student's t
        makes the interval as wide as it has to be.
        """
        factor = math.exp(min(half_interval(logarithms), MOST_EXPONENT))
        return cls(value, value / factor, value * factor, len(logarithms))

    @property
    def telling_rounds(self) -> int | None:
        """Estimated number of rounds that would tell a difference of `TELLING`; None: these do."""
        wanted, half = math.log1p(TELLING), math.log(self.high / self.value) if self.value > 0.0 else 0.0
        if half <= wanted or self.rounds < 2:
            return None
        error = half / t_quantile(self.rounds - 1) * self.rounds**0.5
        counts = range(self.rounds + 1, MOST_ROUNDS)
        return next((n for n in counts if t_quantile(n - 1) * error / n**0.5 <= wanted), MOST_ROUNDS)


def step_values(step_us: NDArray[np.float64], *, together: bool) -> NDArray[np.float64]:
    """Return the time of each step from those of each rank. Shape (ranks, rounds, steps) → (rounds, steps).

    If ranks wait for one another in each step (`together`), each sees the same step, cut at another place: the mean
    counts. Otherwise the slowest one does, as it would if they waited.
    """
    seen: NDArray[np.float64] = step_us.mean(axis=0) if together else step_us.max(axis=0)
    return seen


def median_interval(values: NDArray[np.float64]) -> Interval:
    """Return the median of all steps, from those of rounds. Shape (rounds, steps)."""
    return Interval.of(float(np.median(values)), _log_medians(values))


def ratio_interval(values: NDArray[np.float64], reference: NDArray[np.float64]) -> Interval:
    """Return the geometric mean over rounds of the ratio of two medians, which were interleaved within each.

    Rounds with a block of only one of them are left out.
    """
    both = min(len(values), len(reference))
    ratios = [a - b for a, b in zip(_log_medians(values[:both]), _log_medians(reference[:both]), strict=True)]
    return Interval.of(math.exp(statistics.fmean(ratios)), ratios)


def verdict(ratio: Interval, what: str, reference: str, steps: int) -> str:
    """Describe a ratio; a difference inside the noise is not called one.

    Args:
        ratio: of two steps.
        what: the numerator, in words.
        reference: the denominator, in words.
        steps: measured ones of a round.
    """
    around = f"(95 % interval {ratio.low:.3f} to {ratio.high:.3f})"
    if ratio.low <= 1.0 <= ratio.high:
        text = f"no difference beyond the noise between {what} and {reference}: {ratio.value:.3f} {around}"
        if (rounds := ratio.telling_rounds) is not None:
            more = "more than " if rounds == MOST_ROUNDS else "about "
            text += f"; a difference of {TELLING:.0%} takes {more}{rounds * steps} steps in {rounds} rounds to show"
        return text
    word = "faster" if ratio.high < 1.0 else "slower"
    return f"{what} is {word} than {reference}: {ratio.value:.3f} of its step {around}"


def hidden_share(exposed_us: float, alone_us: float, backward_us: float) -> float | None:
    """Return the hidden share of what could be hidden: the smaller of communication alone and backward."""
    could_us = min(alone_us, backward_us)
    return None if could_us <= 0.0 else float(np.clip((alone_us - exposed_us) / could_us, 0.0, 1.0))


def _log_medians(values: NDArray[np.float64]) -> list[float]:
    """Return the logarithm of each round's median step."""
    medians: list[float] = np.log(np.median(values, axis=1)).tolist()
    return medians
