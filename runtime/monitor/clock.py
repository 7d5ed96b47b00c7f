"""Time marks that cost next to nothing where they are taken: wall clock on a CPU, events on a CUDA stream."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes marks now, turns them into times later."""

    cheap: bool
    """Whether a mark costs so little that every gradient may have one."""

    def mark(self) -> Any:
        """Return a mark at this moment (of the current stream)."""
        ...

    def between_us(self, start: Any, end: Any) -> float:
        """Microseconds from one mark to another; on CUDA the device must have reached both."""
        ...

    def reached(self, mark: Any) -> bool:
        """Return whether the device has got to the mark; never waits for it."""
        ...


class WallClock:
    """Marks are `time.perf_counter()` readings in seconds."""

    cheap = True
    mark = staticmethod(time.perf_counter)

    def between_us(self, start: float, end: float) -> float:
        return (end - start) * 1e6

    def reached(self, mark: float) -> bool:
        return True


class CudaClock:
    """Marks are events recorded on the device's current stream; no host synchronization where they are taken."""

    cheap = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """See `Clock.between_us`; waits for the device where it has not got so far."""
        for event in (start, end):  # of two streams either may be the later one
            event.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def reached(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())


def make_clock(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else WallClock()
