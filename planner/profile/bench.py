"""Timing on all ranks at once with progress on standard error, and lines through what was timed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from planner.documents.profile import Line, Sample
from runtime.comm.world import World

T = TypeVar("T")
Run = Callable[[], object]
"""One piece of work, until its result is there."""
EVERY_S = 15.0
"""Usual least seconds between two lines: short commands have none, and logs of long ones stay short."""


def memory_bytes(device: torch.device) -> int | None:
    """Return the memory of an accelerator; None of a CPU."""
    return None if device.type == "cpu" else torch.cuda.get_device_properties(device).total_memory


@dataclass
class Progress:
    """Shows one bar per loop, gone when it is over, or lines if standard error is no terminal; nothing by default."""

    show: bool = False
    every_s: float = EVERY_S
    """Least seconds between two lines."""
    _said_s: float = field(default_factory=lambda: time.monotonic())

    def track(self, items: Sequence[T], what: str) -> Iterable[T]:
        """Return the same items, shown as a bar called `what`."""
        if not self.show:
            return items
        if not sys.stderr.isatty():
            return self._said(items, what)
        from rich import console, progress

        return progress.track(items, description=f"{what:<26}", console=console.Console(stderr=True), transient=True)

    def say(self, text: str) -> None:
        """Write a line if there are no bars, unless there was one just now; for parts of what a bar counts."""
        if self.show and time.monotonic() - self._said_s >= self.every_s and not sys.stderr.isatty():
            self._said_s = time.monotonic()
            print(f"planner: {text}", file=sys.stderr, flush=True)

    def announce(self, text: str) -> None:
        """Write a line, if progress is shown."""
        if self.show:
            print(f"planner: {text}", file=sys.stderr, flush=True)

    def _said(self, items: Sequence[T], what: str) -> Iterator[T]:
        for number, item in enumerate(items):
            self.say(f"{what}, {number} of {len(items)} done")
            yield item


@dataclass(frozen=True)
class Bench:
    """The ranks that measure at once, the device of this one, and how progress is shown."""

    world: World
    device: torch.device
    progress: Progress = field(default_factory=Progress)

    def meet(self) -> None:
        """Wait for all ranks, so that they continue as nearly at once as a barrier allows."""
        if self.world.group is not None:
            dist.barrier(group=self.world.group)

    def timed_us(self, run: Run) -> float:
        """Return the microseconds of one run on this rank, until the device has completed it."""
        synchronize(self.device)
        start = time.perf_counter()
        run()
        synchronize(self.device)
        return (time.perf_counter() - start) * 1e6

    def times_us(self, runs: Sequence[Run], repeats: int, what: str, warm_up: int = 0) -> NDArray[np.float64]:
        """Time some runs several times in turn; all ranks begin each of them together.

        Args:
            runs: timed one after the other in each repeat.
            repeats: the repeats that count.
            what: names the runs in errors and progress.
            warm_up: repeats before those.

        Returns:
            Microseconds, the same on all ranks. Shape (ranks, repeats, runs).
        """
        mine: list[list[float]] = []
        for _ in self.progress.track(range(warm_up + repeats), what):
            mine.append([])
            for run in runs:
                with self.world.error_context(f"beginning to time {what}"):
                    self.meet()
                mine[-1].append(self.timed_us(run))
        return np.array(self.world.gather(mine[warm_up:], f"comparing times of {what}"))


def synchronize(device: torch.device) -> None:
    """Block until the device has completed its work, before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_of_slowest(times_us: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median over repeats of the slowest rank's time. Shape (ranks, repeats, …) → (…)."""
    medians_us: NDArray[np.float64] = np.median(np.max(times_us, axis=0), axis=0)
    return medians_us


def sizes_up_to(sizes: Sequence[int], model_bytes: int) -> list[int]:
    """Return the sizes below the model's, and that size, or the largest of them if it is less."""
    return sorted({*(size for size in sizes if size < model_bytes), min(max(model_bytes, 4), sizes[-1])})


def fit(curve: Sequence[Sample]) -> Line:
    """Fit α and β by Theil-Sen (the median of all slopes, then of all intercepts), with the quality of the fit."""
    from scipy import stats  # half a second, which ranks that measure nothing do not spend

    size, time_us = np.array(curve, dtype=np.float64).T
    if len(curve) < 2:
        return Line(alpha_us=float(time_us[0]), beta_us_per_byte=0.0)
    beta = max(0.0, float(stats.theilslopes(time_us, size).slope))
    alpha = max(0.0, float(np.median(time_us - beta * size)))
    residual = time_us - (alpha + beta * size)
    variance = float(((time_us - time_us.mean()) ** 2).sum())
    return Line(
        alpha_us=round(alpha, 3),
        beta_us_per_byte=float(f"{beta:.6g}"),
        r_squared=round(1.0 - float((residual**2).sum()) / variance, 6) if variance > 0.0 else None,
        mean_error=round(float(np.mean(np.abs(residual) / time_us)), 6),
    )
