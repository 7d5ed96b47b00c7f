"""Time marks that cost next to nothing where they are taken: wall clock on a CPU, events on a CUDA stream."""

from __future__ import annotations

import time
from typing import Any

import torch


class WallClock:
    """Marks are `time.perf_counter()` readings in seconds."""

    cheap = True
    """Whether a mark costs so little that every gradient may have one."""
    mark = staticmethod(time.perf_counter)

    def between_us(self, start: Any, end: Any) -> float:
        """Return the microseconds from one mark to another."""
        return float(end - start) * 1e6

    def reached(self, mark: Any) -> bool:
        """Return True: the host has got to every mark."""
        return True


class CudaClock:
    """Marks are events recorded on the device's current stream; no host synchronization where they are taken."""

    cheap = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """Return a mark at this moment of the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between_us(self, start: Any, end: Any) -> float:
        """Return the microseconds from one mark to another; waits for a device that has not reached both."""
        for event in (start, end):  # of two streams either may be the later one
            event.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def reached(self, mark: Any) -> bool:
        """Return whether the device has got to the mark; never waits for it."""
        return bool(mark.query())


Clock = WallClock | CudaClock
"""Takes marks now, and turns them into times later."""


def make_clock(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else WallClock()
