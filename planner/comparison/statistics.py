"""Medians, intervals and verdicts of steps that were measured in interleaved blocks. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000
SEED = 0


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def step_values(step_us: NDArray[np.float64], *, together: bool) -> NDArray[np.float64]:
    """Return what a step took, from what each rank saw of it. Shape (ranks, rounds, steps) → (rounds, steps).

    Where ranks wait for one another in each step (`together`), each sees the same step, cut at another place: the mean
    counts. Otherwise the slowest one does, as it would if they waited.
    """
    seen: NDArray[np.float64] = step_us.mean(axis=0) if together else step_us.max(axis=0)
    return seen


def median_interval(values: NDArray[np.float64]) -> Interval:
    """Return the median of all steps; rounds are drawn again, and steps within them, which are alike in a round."""
    medians = np.median(values.reshape(-1)[_draws(values.shape)], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return Interval(float(np.median(values)), float(low), float(high))


def ratio_interval(values: NDArray[np.float64], reference: NDArray[np.float64]) -> Interval:
    """Return the ratio of two medians; the same rounds are drawn for both, which were interleaved within each.

    Rounds of which one has a block alone are left out.
    """
    both = min(len(values), len(reference))
    values, reference = values[:both], reference[:both]
    rounds = np.random.default_rng(SEED).integers(len(values), size=(RESAMPLES, len(values)))
    above = np.median(values.reshape(-1)[_draws(values.shape, rounds, 1)], axis=1)
    below = np.median(reference.reshape(-1)[_draws(reference.shape, rounds, 2)], axis=1)
    low, high = np.quantile(above / below, [0.025, 0.975])
    return Interval(float(np.median(values) / np.median(reference)), float(low), float(high))


def verdict(ratio: Interval, what: str, reference: str) -> str:
    """Say it in words; a difference inside the noise is not called one."""
    around = f"(95 % interval {ratio.low:.3f} to {ratio.high:.3f})"
    if ratio.low <= 1.0 <= ratio.high:
        return f"no difference beyond the noise between {what} and {reference}: {ratio.value:.3f} {around}"
    word = "faster" if ratio.high < 1.0 else "slower"
    return f"{what} is {word} than {reference}: {ratio.value:.3f} of its step {around}"


def hidden_share(exposed_us: float, alone_us: float, backward_us: float) -> float | None:
    """Return the hidden share of what could be hidden: the smaller of communication alone and backward."""
    could_us = min(alone_us, backward_us)
    return None if could_us <= 0.0 else float(np.clip((alone_us - exposed_us) / could_us, 0.0, 1.0))


def _draws(shape: tuple[int, ...], rounds: NDArray[np.int64] | None = None, stream: int = 0) -> NDArray[np.int64]:
    """Return flat indices of resampled steps. Shape (RESAMPLES, rounds · steps)."""
    count, steps = shape
    # A fixed seed: the same measurements always give the same verdict.
    generator = np.random.default_rng((SEED, stream))
    drawn = generator.integers(count, size=(RESAMPLES, count)) if rounds is None else rounds
    within = generator.integers(steps, size=(RESAMPLES, count, steps))
    return (drawn[:, :, None] * steps + within).reshape(RESAMPLES, -1)
