"""A cost curve: time of one message as a piecewise linear function of its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.collectives import Coefficients
from planner.documents.profile import merge_duplicates

MAX_SLOPE = 1e30
"""Microseconds per byte: steeper is absurd, and sums of it would leave the range of numbers."""


class CostCurve:
    """Message bytes → time in microseconds; a line, or measured samples joined by lines.

    Beyond the first and last sample the nearest segment continues with slope ≥ 0; nothing is ever below 0.
    """

    def __init__(self, knots_bytes: NDArray[np.float64], knots_us: NDArray[np.float64], line: Coefficients) -> None:
        self._bytes, self._us, self.line = knots_bytes, knots_us, line
        self._below_slope, self._above_slope = _end_slopes(knots_bytes, knots_us)

    @classmethod
    def from_line(cls, line: Coefficients) -> CostCurve:
        """Return start_up_us + per_byte_us · bytes."""
        return cls(np.empty(0), np.empty(0), line)

    @classmethod
    def from_samples(cls, samples: Iterable[Sequence[float]], line: Coefficients | None = None) -> CostCurve:
        """Join measured (bytes, time_us), at least one, in any order; duplicates count by their median.

        `line` was fitted to them; by default it is that of least squares.
        """
        merged = merge_duplicates(samples)
        knots = np.array(sorted(merged.items()), dtype=np.float64)
        return cls(knots[:, 0].copy(), knots[:, 1].copy(), line or fit_line(list(merged.items())))

    def scaled(self, factor: float) -> CostCurve:
        """Return the curve of messages that take `factor` times as long."""
        line = Coefficients(factor * self.line.start_up_us, factor * self.line.per_byte_us)
        return CostCurve(self._bytes, factor * self._us, line)

    def repeated(self, times: int) -> CostCurve:
        """Return the curve of messages that are sent in this number of equal parts, one after the other."""
        line = Coefficients(times * self.line.start_up_us, self.line.per_byte_us)
        return CostCurve(times * self._bytes, times * self._us, line)

    def of_share(self, share: float) -> CostCurve:
        """Return the curve of messages if only this share of their bytes is sent.

        >>> float(CostCurve.from_line(Coefficients(5.0, 0.1)).of_share(0.5).at(100.0))
        10.0
        """
        line = Coefficients(self.line.start_up_us, share * self.line.per_byte_us)
        return CostCurve(self._bytes / share, self._us, line)

    @property
    def start_up_us(self) -> float:
        """Return the a of MG-WFBP: the intercept of the line (of the fitted line, for samples)."""
        return self.line.start_up_us

    @property
    def non_decreasing(self) -> bool:
        """Return whether a larger message never takes less time."""
        return bool(np.all(np.diff(self._us) >= 0.0))

    @property
    def bends_bytes(self) -> NDArray[np.float64]:
        """Return the sizes in bytes at which the curve bends: between neighbours, and beyond them, it is a line."""
        if not self._below_slope:
            return self._bytes
        with np.errstate(over="ignore"):
            reaches_0 = self._bytes[:1] - self._us[:1] / self._below_slope
        return np.concatenate([reaches_0, self._bytes])

    def __call__(self, message_bytes: ArrayLike) -> NDArray[np.float64]:
        """Return times of messages, elementwise."""
        x = np.asarray(message_bytes, dtype=np.float64)
        if self._bytes.size == 0:
            return np.asarray(self.line.start_up_us + self.line.per_byte_us * x)
        y = np.interp(x, self._bytes, self._us)
        first, last = self._bytes[0], self._bytes[-1]
        # np.interp keeps the first and the last value beyond the ends.
        if self._below_slope > 0.0 and (x < first).any():
            y = np.where(x < first, np.maximum(0.0, self._us[0] - self._below_slope * (first - x)), y)
        if self._above_slope > 0.0 and (x > last).any():
            y = np.where(x > last, self._us[-1] + self._above_slope * (x - last), y)
        return np.asarray(y)

    def at(self, message_bytes: float) -> float:
        """Return the time of one message."""
        return float(self(message_bytes))


def _end_slopes(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    if x.size < 2:
        return 0.0, 0.0
    with np.errstate(over="ignore"):  # sizes may lie as close together as numbers can
        slopes = np.minimum(np.diff(y) / np.diff(x), MAX_SLOPE)
    return max(0.0, float(slopes[0])), max(0.0, float(slopes[-1]))


def fit_line(samples: Sequence[Sequence[float]]) -> Coefficients:
    """Fit a least-squares line through (bytes, time_us), with intercept and slope ≥ 0; a constant for one sample."""
    x, y = (np.array(column, dtype=np.float64) for column in zip(*samples, strict=True))
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = min(max(0.0, float(centred @ (y - y.mean())) / spread), MAX_SLOPE) if spread > 0.0 else 0.0
    return Coefficients(max(0.0, float(y.mean()) - slope * float(x.mean())), slope)
