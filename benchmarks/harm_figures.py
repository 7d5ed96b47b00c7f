"""Candidates for a figure that shows, while training, what compression does to the loss. All are larger for more harm.

S is the mean that was sent, G the exact mean of the ranks' gradients, V the variance of G as an estimate: the variance
over ranks, summed over elements, over the number of ranks. A window is `WINDOW` steps with error feedback.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WINDOW = 10
"""Steps over which differences are added up; at the last one of each, figures of one step are taken, too."""
TINY = 1e-30

FIGURES = {
    "error / noise": "‖S − G‖² / V",
    "error / noise, scaled": "the same after Adam's scaling: elements over √v (SGD: as they are)",
    "error / noise, window": "‖Σ(S − G)‖² / ΣV over a window",
    "error / noise, window, scaled": "the same after Adam's scaling",
    "update": "‖ΣuS − ΣuG‖ / ‖ΣuG‖ over a window: u is the optimizer's step, with G from moments of its own",
    "GraVAC's gain": "1 − ‖sent‖² / ‖residual + gradient‖², of the sums over ranks",
    "cosine": "1 − cos(S, G)",
    "cosine, window": "1 − cos(ΣS, ΣG) over a window",
    "relative error": "‖S − G‖ / ‖G‖",
    "steps late": "‖residual‖ / ‖G‖",
    "δ": "‖residual‖² / ((1 − k/n) ‖residual + gradient‖²); k/n: bits sent over 32, where all elements are sent",
    "lost / gradient": "median over elements of |residual| / |G|",
    "bits": "−bits sent for each element",
}


def energy(values: Tensor) -> float:
    """Return ‖values‖²."""
    return float(torch.dot(values, values))


def one_minus_cosine(one: Tensor, other: Tensor) -> float:
    """Return 1 − the cosine of the angle between two vectors."""
    return 1.0 - float(torch.dot(one, other)) / max(TINY, math.sqrt(energy(one) * energy(other)))


@dataclass
class Moments:
    """An optimizer's moments of a gradient, of which the step is made; 1-D."""

    first: Tensor
    second: Tensor | None
    """None: SGD with momentum."""
    steps: int
    decay: tuple[float, float]
    """Of the first and the second moment."""
    eps: float = 1e-8

    def add(self, gradient: Tensor) -> None:
        """Take another gradient in."""
        self.steps += 1
        if self.second is None:
            self.first.mul_(self.decay[0]).add_(gradient)
            return
        self.first.lerp_(gradient, 1.0 - self.decay[0])
        self.second.mul_(self.decay[1]).addcmul_(gradient, gradient, value=1.0 - self.decay[1])

    def scale(self) -> Tensor | float:
        """Return by what elements are multiplied."""
        if self.second is None or not self.steps:
            return 1.0
        return 1.0 / ((self.second / (1.0 - self.decay[1] ** self.steps)).sqrt() + self.eps)

    def step(self) -> Tensor:
        """Return the step, in units of the learning rate."""
        if self.second is None:
            return self.first
        return self.first / (1.0 - self.decay[0] ** self.steps) * self.scale()


class Candidates:
    """All figures of one run."""

    def __init__(self, exact: Moments, sent_share: float, bits: float) -> None:
        """`exact`: moments that get the exact means; `sent_share`: k/n; `bits`: sent for each element."""
        self._exact, self._share, self._bits = exact, sent_share, bits
        self._found: dict[str, list[float]] = defaultdict(list)
        self._sums: list[Tensor] = []
        self._variance, self._steps = 0.0, 0

    def step(self, ranks: Tensor, sent: Tensor, residual_before: Tensor, residual: Tensor, now: Moments) -> None:
        """Look at a step.

        Args:
            ranks: each rank's gradient over the number of ranks. Shape (ranks, elements).
            sent: the sum of what was sent.
            residual_before: of all ranks, before the step.
            residual: after it.
            now: moments of the run, after the step.
        """
        count, mean = len(ranks), ranks.sum(0)
        variance = max(TINY, (count * energy(ranks.view(-1)) - energy(mean)) / (count - 1))
        self._exact.add(mean)
        scale, error = now.scale(), sent - mean
        parts = (sent, mean, error, now.step(), self._exact.step())
        self._sums = [one + part for one, part in zip(self._sums, parts, strict=True)] if self._sums else [*parts]
        self._variance += variance
        self._steps += 1
        if self._steps % WINDOW:
            return
        centred = (ranks * scale * count - mean * scale).view(-1)
        scaled_variance = max(TINY, energy(centred) / (count * (count - 1)))
        total, exact = mean + residual_before, max(TINY, energy(mean))
        lost, left = max(TINY, energy(total)), energy(residual)
        sent_sum, mean_sum, error_sum, step_sum, exact_sum = self._sums
        found = {
            "error / noise": energy(error) / variance,
            "error / noise, scaled": energy(error * scale) / scaled_variance,
            "error / noise, window": energy(error_sum) / self._variance,
            "error / noise, window, scaled": energy(error_sum * scale) / (WINDOW * scaled_variance),
            "update": (energy(step_sum - exact_sum) / max(TINY, energy(exact_sum))) ** 0.5,
            "GraVAC's gain": 1.0 - energy(sent) / lost,
            "cosine": one_minus_cosine(sent, mean),
            "cosine, window": one_minus_cosine(sent_sum, mean_sum),
            "relative error": (energy(error) / exact) ** 0.5,
            "steps late": (left / exact) ** 0.5,
            "δ": left / max(TINY, (1.0 - self._share) * lost),
            "lost / gradient": float((residual.abs() / mean.abs().clamp_min(TINY))[mean != 0].median()),
            "bits": -self._bits,
        }
        for name, value in found.items():
            self._found[name].append(value)
        self._sums, self._variance = [], 0.0

    def medians(self) -> dict[str, float]:
        """Return each figure's median over the windows."""
        return {name: statistics.median(values) for name, values in self._found.items()}


def threshold(figures: Sequence[float], gaps: Sequence[float], limit: float, share: float) -> float:
    """Return the largest value up to which at least `share` of the runs have a gap within ±`limit`; −∞: none."""
    best, good = float("-inf"), 0
    for count, (value, gap) in enumerate(sorted(zip(figures, gaps, strict=True)), start=1):
        good += abs(gap) <= limit
        if good >= share * count:
            best = value
    return best
