"""Counters and a doorbell that the processes of one rank share."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from runtime.comm.shared_memory import SharedMemory

_BEYOND_ALL = 2**40


class AtomicCounter(SharedMemory):
    """A count over processes: `take` gives each number, from 0 on, to exactly one of them."""

    def __init__(self, descriptor: int | None = None) -> None:
        super().__init__(8, descriptor=descriptor)
        self._count = memoryview(self._map).cast("q")

    @property
    def value(self) -> int:
        """Count of numbers that were taken."""
        return self._count[0]

    def take(self, numbers: int = 1) -> int:
        """Take the next `numbers` numbers, and return the first of them."""
        with self.locked():
            self._count[0] += numbers
            return self._count[0] - numbers

    def exhaust(self) -> None:
        """Give only numbers beyond every limit from now on."""
        self.take(_BEYOND_ALL)


class Doorbell:
    """Wakes the process that waits for it with `multiprocessing.connection.wait`; `ring` never blocks."""

    def __init__(self, ringing_end: Connection | None = None) -> None:
        if ringing_end is None:
            self._waiting_end, ringing_end = Pipe(duplex=False)
        os.set_blocking(ringing_end.fileno(), False)
        self._ringing_end = ringing_end

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Doorbell, (self._ringing_end,)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._waiting_end.fileno()

    def ring(self) -> None:
        """Wake the waiting process."""
        # A full pipe has rung thousands of times: once more changes nothing.
        with suppress(BlockingIOError, BrokenPipeError):
            self._ringing_end.send_bytes(b"!")

    def silence(self) -> None:
        """Forget all rings so far."""
        while self._waiting_end.poll():
            self._waiting_end.recv_bytes()
