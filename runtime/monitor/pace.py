"""Whether delayed steps are shorter than the synchronous ones of the warm-up before them: if not, delay does only harm.

Steps are timed in groups of k, for one of k takes what was pulled; what counts is the median of some groups, so that a
validation in between does not. Work that changes with the delay's beginning (longer batches, say) is taken for its
doing. Every worker tells the others what it saw behind one push, so that all decide alike, at one step, without a
message of their own.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from runtime.errors import FallbackWarning
from runtime.monitor.clock import Clock
from runtime.monitor.verdict import Z_SCORE, Verdict, faster

TURNS, SKIPPED = 16, 2
"""Turns of k steps that are timed, before and after, and that are left out when the delay begins."""
NO_TIMING = (0.0, 0.0, 0.0)
"""Report of all steps but one: (synchronous step, delayed step, noise of their difference), in microseconds."""


class Pace:
    """Times of one run."""

    def __init__(self, clock: Clock, k: int) -> None:
        """`k` is the delay that the plan asks for."""
        self._clock, self._k, self._over = clock, k, False
        self._before: deque[Any] = deque(maxlen=TURNS * k + 1)
        self._step = 0
        """Number of the last synchronous one."""
        self._synchronous: list[float] = []
        """Times of the warm-up's turns, when the delay has begun."""
        self._after: list[Any] = []
        self.verdict: Verdict | None = None
        """Verdict; None until all ranks have reported, and if the warm-up or the delay is too short for one."""

    def state(self) -> dict[str, Any]:
        """Return what `load` continues from: what the warm-up showed, and whether that is still to be compared."""
        return {"synchronous": self._known(), "over": self._over}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`; delayed steps are timed anew."""
        self._synchronous, self._over = list(state["synchronous"]), state["over"]

    def synchronous_step(self, step: int) -> None:
        """Mark a step of the warm-up, by its number: times of steps that do not follow one another are not known."""
        if step != self._step + 1:
            self._before.clear()
        self._step = step
        self._before.append(self._clock.mark())

    def _known(self) -> list[float]:
        return self._turns_us(self._before) or self._synchronous

    def delayed_step(self, k: int) -> tuple[float, float, float]:
        """Mark a backward with a delay of `k`; return what this rank reports to the others."""
        self._over = self._over or k != self._k
        if self._over:
            return NO_TIMING
        self._after.append(self._clock.mark())
        if len(self._after) <= (SKIPPED + TURNS) * k:
            return NO_TIMING
        before, after = self._known(), self._turns_us(self._after[SKIPPED * k :])
        self._over = True
        self._before.clear()
        self._after.clear()
        if len(before) < TURNS:
            return NO_TIMING
        noise_us = Z_SCORE * math.hypot(_error(before), _error(after))
        return statistics.median(before), statistics.median(after), noise_us

    def _turns_us(self, marks: Sequence[Any]) -> list[float]:
        ends = list(marks)[:: self._k]
        return [self._clock.between_us(start, end) / self._k for start, end in pairwise(ends)]

    def allows(self, reported: Tensor) -> bool:
        """Return whether to continue with the delay, by what ranks reported (shape (ranks, 3)); warn where not."""
        if not bool((reported[:, 0] > 0.0).all()):
            return True
        synchronous_us, delayed_us, noise_us = reported.mean(dim=0).tolist()
        self.verdict = faster(
            delayed_us, synchronous_us, noise_us, "delayed steps", "those of the warm-up", "synchronous ones"
        )
        if not self.verdict.good:
            warnings.warn(self.verdict.text, FallbackWarning, stacklevel=2)
        return self.verdict.good


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the median, by the quartiles: as of normal ones, whatever a few outliers are."""
    low, _, high = statistics.quantiles(values, n=4)
    return 1.2533 * (high - low) / 1.349 / math.sqrt(len(values))
