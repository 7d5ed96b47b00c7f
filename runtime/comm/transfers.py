"""What every rank sends every other one, as one work: all receives are posted before any send.

gloo's own all-to-all sends first. It asks for what it receives over the connection on which it sends, so that behind a
large part the question waits until that part is through, and the two directions of a link take turns: between two hosts
an exchange takes twice as long as a link of its rate allows, between four a fifth to a third longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.torch_compat import receive, send, wait_for


class Transfers(dist.Work):
    """Part r of `gives` on its way to rank r, and part r of `gets` from there; this rank's own is copied.

    Tensors are 1-D, contiguous, of bytes on the CPU. Both sides know how long a part is; an empty one is not sent.
    """

    def __init__(self, gets: Sequence[Tensor], gives: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] | None = None
        self._over = threading.Event()
        self._error: RuntimeError | None = None
        rank, ranks = group.rank(), len(gets)
        # Each rank begins with another one, so that not all send to the same.
        before, behind = ([(rank + way * step) % ranks for step in range(1, ranks)] for way in (-1, 1))
        self._works = [receive(group, gets[peer], peer) for peer in before if gets[peer].numel()]
        self._works += [send(group, gives[peer], peer) for peer in behind if gives[peer].numel()]
        gets[rank].copy_(gives[rank])

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when all parts have come and gone. Raises what the backend raised, or DistNetworkError."""
        if self._future is None:  # a thread that waits anyway: another one between would cost a wake-up
            self._finish(timeout)
        elif not self._over.wait(None if timeout is None else timeout.total_seconds()):
            raise dist.DistNetworkError(f"sends and receives did not end within {timeout}")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return what is done when `wait` would return; from now on another thread waits."""
        if self._future is None:
            self._future = torch.futures.Future()
            _waiters.call(self._finish)
        return self._future

    def _finish(self, timeout: timedelta | None = None) -> None:
        try:
            for work in self._works:
                wait_for(work, timeout)
        except RuntimeError as error:
            self._error = error
        self._works.clear()
        self._over.set()  # before callbacks, so that who waits goes on beside them
        if self._future is None:
            return
        if self._error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(self._error)


class _Waiters:
    """Threads that wait for transfers, as many as there are of these at once. The end of a script waits for none."""

    def __init__(self) -> None:
        self._lock, self._idle = threading.Lock(), 0
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def call(self, function: Callable[[], None]) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._work, name="planner transfers", daemon=True).start()
        self._calls.put(function)

    def _work(self) -> None:
        while True:
            function = self._calls.get()
            function()
            del function  # and with it tensors and the group, before the next one comes
            with self._lock:
                self._idle += 1


_waiters = _Waiters()
