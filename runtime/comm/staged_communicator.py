"""Sends a device's tensors over a backend that copies them through the host's memory (gloo), during backward.

Such a backend copies a tensor to the host, sends it there and copies the sum back, and whoever waits for it stands
still meanwhile. So a thread of ours waits, one message after the other: backward continues to queue its work, and waits
for the thread, and then on the device, only at its end. Ranks may share a device so, which NCCL refuses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from runtime.comm.collectives import Collective
from runtime.comm.communicator import CommTiming, Payload, mark_on, nothing
from runtime.comm.threaded_communicator import ThreadedCommunicator
from runtime.comm.world import World


class Lane(Protocol):
    """A sequence of work that is separate from the calling thread's."""

    def mark(self) -> Any:
        """Return a mark behind all that the calling thread has queued so far, where it is now."""
        ...

    def after(self, mark: Any) -> AbstractContextManager[None]:
        """Let the calling thread work in the lane inside, behind the mark and the lane's earlier work."""
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


CARRYING = ("staged",)
"""The one lane of a thread."""
Filled = tuple[Payload, CommTiming, Any]
"""A bucket, its times, and a mark behind what fills its messages."""


class StagedCommunicator(ThreadedCommunicator[str, Filled]):
    """One message at a time, in the order of launches. See `Communicator`."""

    def __init__(
        self, world: World, collectives: list[Collective], filling: Lane, carrying: Lane, whole: World | None = None
    ) -> None:
        """Send in a world. `filling`: lane in which the calling thread fills messages; `carrying`: lane in which they
        are sent and summed.
        """
        super().__init__(world, CARRYING, whole)
        self._collectives, self._filling, self._carrying = collectives, filling, carrying
        self._queue: deque[Filled] = deque()
        self._on_its_way = 0
        """Buckets that have been launched and have not come."""
        self._last: Any = None
        """Mark behind the last bucket that has come."""

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
            self._start()
            self._queue.append((bucket, sent, filled))
            self._on_its_way += 1
            self._changed.notify_all()

    def wait(self, until: CommTiming | None = None) -> None:
        """See `Communicator.wait`: the host waits until messages have come to this machine, and the current stream
        until they are on the device. After a failure every later wait fails alike: the group is broken.
        """
        with self._changed:
            self._wait_until(until)
            mark = self._last if until is None else until.end
        if mark is not None:
            self._carrying.join(mark)

    def _is_pending(self, until: CommTiming | None) -> bool:
        return self._on_its_way > 0 and (until is None or until.end is None)

    def _next(self, _lane: str) -> Filled | None:
        return self._queue.popleft() if self._queue else None

    def _label(self, _lane: str, entry: Filled) -> str:
        return entry[0].label

    def _carry(self, _lane: str, entry: Filled) -> None:
        bucket, sent, filled = entry
        with self._carrying.after(filled):
            sent.start = self._carrying.mark()
            for message in bucket.messages:
                for work in self._collectives[bucket.index](message, self._world.process_group):
                    self._wait_for_work(work)
            end = self._carrying.mark()
        with self._changed:
            sent.end = self._last = end
            self._on_its_way -= 1
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        super()._fail(error)
        self._queue.clear()
        self._on_its_way = 0
