"""Sends what lies on a device over a backend that takes it through the host's memory (gloo), beside backward.

Such a backend copies a tensor to the host, sends it there and copies the sum back, and whoever waits for it stands
still meanwhile. So a thread of ours waits, one message after the other: backward goes on to queue its work, and waits
for the thread, and then on the device, only at its end. Ranks may share a device so, which NCCL refuses.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch

from runtime.comm.collectives import Collective
from runtime.comm.communicator import (
    EXIT_S,
    GRACE_S,
    CommTiming,
    Payload,
    describe_failure,
    failure_of,
    mark_on,
    nothing,
    to_settle,
)
from runtime.comm.world import World
from runtime.torch_compat import wait_for


class Lane(Protocol):
    """An order of work of its own, beside the calling thread's."""

    def mark(self) -> Any:
        """Return a mark behind all that the calling thread has queued so far, where it is now."""
        ...

    def after(self, mark: Any) -> AbstractContextManager[None]:
        """Inside, the calling thread works in the lane, behind the mark and what the lane had before."""
        ...

    def join(self, mark: Any) -> None:
        """Let what the calling thread queues from now on come behind the mark."""
        ...


class DeviceLane:
    """A CUDA stream; marks are events."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        return mark_on(torch.cuda.current_stream(self._device))

    @contextmanager
    def after(self, mark: torch.cuda.Event) -> Iterator[None]:
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield

    def join(self, mark: Any) -> None:
        if isinstance(mark, torch.cuda.Event):
            torch.cuda.current_stream(self._device).wait_event(mark)


class HostLane:
    """A CPU has none: what is called is done when the call returns. For tests, and to see what a device would do."""

    mark = staticmethod(time.perf_counter)

    def after(self, mark: float) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self, mark: float) -> None: ...


class StagedCommunicator:
    """One message at a time, in the order of launches, carried by a thread. See `Communicator`."""

    def __init__(
        self, world: World, collectives: list[Collective], filling: Lane, carrying: Lane, whole: World | None = None
    ) -> None:
        """`filling`: where messages are filled, by the calling thread; `carrying`: where they are carried and added
        up.
        """
        self._world, self._collectives, self._whole = world, collectives, whole or world
        self._filling, self._carrying = filling, carrying
        self._changed = threading.Condition()
        self._queue: deque[tuple[Payload, CommTiming, Any]] = deque()
        self._on_its_way = 0
        """Buckets that have been launched and have not come."""
        self._last: Any = None
        """Mark behind the last bucket that has come."""
        self._failure: Exception | None = None
        self._moved_at, self._closing = time.monotonic(), False
        self._thread: threading.Thread | None = None
        to_settle.add(self)

    def launch(self, bucket: Payload, sent: CommTiming, prepare: Callable[[], None] = nothing) -> None:
        """See `Communicator.launch`; what the current stream has queued so far is waited for on the device."""
        launched = self._filling.mark()
        with self._filling.after(launched):
            prepare()
            filled = self._filling.mark()
        sent.launch, sent.start, sent.end = launched, None, None
        with self._changed:
            if self._failure is not None:
                return  # the next wait raises it
            if self._thread is None:  # on a rank that never sends there is none to end
                self._thread = threading.Thread(target=self._carry, name="planner staged", daemon=True)
                self._thread.start()
            self._queue.append((bucket, sent, filled))
            self._on_its_way += 1
            self._changed.notify_all()

    def wait(self, until: CommTiming | None = None) -> None:
        """See `Communicator.wait`: the host waits until messages have come to this machine, and the current stream
        until they are on the device. After a failure every later wait fails alike: the group is broken.
        """
        with self._changed:
            self._drain(until)
            if self._failure is not None:
                raise self._failure
            mark = self._last if until is None else until.end
        if mark is not None:
            self._carrying.join(mark)

    def _drain(self, until: CommTiming | None = None) -> None:
        """Wait, and keep what fails; the lock is held."""
        limit_s = self._world.timeout_s + 2 * GRACE_S  # the thread's own wait ends first, and says what it was for
        self._moved_at = time.monotonic()
        while self._failure is None and (self._on_its_way > 0 if until is None else until.end is None):
            if until is not None and not self._on_its_way:
                return  # it has not been launched
            self._changed.wait(limit_s)
            if time.monotonic() > self._moved_at + limit_s:
                nothing_moved = TimeoutError("nothing has moved")
                self._fail(describe_failure(self._whole, "what was launched", nothing_moved))

    def close(self) -> None:
        """Wait for what a backward that raised left on its way, then end the thread."""
        with self._changed:
            self._drain()  # whoever waited for it first has told what failed
        self.settle(time.monotonic() + EXIT_S)

    def settle(self, deadline: float) -> None:
        """Start nothing more, and give the thread until `deadline` (monotonic) for what is on its way."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))

    # What the thread does.

    def _carry(self) -> None:
        limit, group = timedelta(seconds=self._world.timeout_s + GRACE_S), self._world.group
        assert group is not None
        while (entry := self._take()) is not None:
            bucket, sent, filled = entry
            try:
                with self._carrying.after(filled):
                    sent.start = self._carrying.mark()
                    for message in bucket.messages:
                        for work in self._collectives[bucket.index](message, group):
                            wait_for(work, limit)
                            self._moved_at = time.monotonic()
                    end = self._carrying.mark()
            except Exception as error:  # nobody else hears of it on this thread
                with self._changed:
                    self._fail(failure_of(self._whole, bucket.label, error))
                return
            with self._changed:
                sent.end = self._last = end
                self._on_its_way -= 1
                self._changed.notify_all()

    def _take(self) -> tuple[Payload, CommTiming, Any] | None:
        """The next bucket; None at the end."""
        with self._changed:
            while not self._closing and self._failure is None:
                if self._queue:
                    return self._queue.popleft()
                self._changed.wait()
        return None

    def _fail(self, error: Exception) -> None:
        """The lock is held."""
        self._failure = self._failure or error
        self._queue.clear()
        self._on_its_way = 0
        self._changed.notify_all()
