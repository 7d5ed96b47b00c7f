"""The base of communicators whose messages threads of ours send: one thread for each lane of work.

Threads wait for the backend, the calling thread for them; each wait for other ranks has a deadline, the threads' the
earlier one, for they can say what they waited for. What fails on a thread is kept for the next `wait`, and ends all
lanes.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Generic, TypeVar

import torch.distributed as dist

from runtime.comm.communicator import EXIT_S, CommTiming, describe_failure, failure_of, to_settle
from runtime.comm.waits import GRACE_S, Watch, slice_of
from runtime.comm.world import World
from runtime.errors import CommunicationError
from runtime.torch_compat import wait_for

Entry = TypeVar("Entry")
"""Work that a lane does at a time."""
LaneName = TypeVar("LaneName", bound=str)


class ThreadedCommunicator(ABC, Generic[LaneName, Entry]):
    """Threads, their deadlines, how failures reach the caller, and the end. See `Communicator`.

    The kinds of communicator say what is queued: what a lane takes next, how it is carried, and what is still to come.
    """

    def __init__(self, world: World, lanes: Sequence[LaneName], whole: World | None = None) -> None:
        """Send in `world`, whose deadline counts; errors name this rank by its number in `whole`, of which it may be a
        part.
        """
        self._world, self._whole, self._lanes = world, whole or world, lanes
        self._changed = threading.Condition()
        """Condition whose lock is held to read or change the queue."""
        self._failure: Exception | None = None
        self._moved_at, self._closing = time.monotonic(), False
        self._threads: list[threading.Thread] = []
        to_settle.add(self)

    @abstractmethod
    def _next(self, lane: LaneName) -> Entry | None:
        """Return what the lane carries now; None where it has to wait. The lock is held."""

    @abstractmethod
    def _carry(self, lane: LaneName, entry: Entry) -> None:
        """Send it, wait for it (`_wait_for_work`) and say so (`_changed`); called on the lane's thread."""

    @abstractmethod
    def _label(self, lane: LaneName, entry: Entry) -> str:
        """Return its name for messages to people."""

    @abstractmethod
    def _is_pending(self, until: CommTiming | None) -> bool:
        """Tell whether that bucket, or anything that has been launched, is still to come. The lock is held."""

    def _start(self) -> None:
        """Start the threads, with the first bucket: on a rank that never sends there are none to end. The lock is
        held.
        """
        for lane in self._lanes if not self._threads else ():
            thread = threading.Thread(target=self._work, args=(lane,), name=f"planner {lane}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _wait_until(self, until: CommTiming | None) -> None:
        """Wait for that bucket, or for everything, and raise what has failed; the lock is held."""
        self._drain(until)
        if self._failure is not None:
            raise self._failure

    def _drain(self, until: CommTiming | None = None) -> None:
        """Wait, and keep what fails; the lock is held."""
        limit_s = self._world.timeout_s + 2 * GRACE_S  # a thread's own wait ends first, and says what it was for
        self._moved_at = time.monotonic()
        watch = Watch(self._whole, what := "what was launched")
        while self._failure is None and self._is_pending(until):
            if self._changed.wait(slice_of(self._whole, limit_s)):
                watch = Watch(self._whole, what)
                continue
            if time.monotonic() > self._moved_at + limit_s:
                nothing_moved = TimeoutError("nothing has moved")
                self._fail(describe_failure(self._whole, what, nothing_moved))
                return
            try:
                watch.look()
            except CommunicationError as error:
                self._fail(error)

    def close(self) -> None:
        """Wait for messages that a backward that raised left in flight, then end the threads."""
        with self._changed:
            self._drain()  # the first wait has raised what failed
        self.settle(time.monotonic() + EXIT_S)

    def settle(self, deadline: float) -> None:
        """Start nothing more, and give the threads until `deadline` (monotonic) for messages in flight."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _fail(self, error: Exception) -> None:
        """Keep the first failure, which ends all lanes; the lock is held."""
        self._failure = self._failure or error
        self._changed.notify_all()

    # What the threads do.

    def _work(self, lane: LaneName) -> None:
        while (entry := self._take(lane)) is not None:
            try:
                self._carry(lane, entry)
            except Exception as error:  # no caller sees it on this thread
                with self._changed:
                    self._fail(failure_of(self._whole, self._label(lane, entry), error))
                return

    def _take(self, lane: LaneName) -> Entry | None:
        """Wait for what the lane may carry, which this process launches or ends; None at the end."""
        with self._changed:
            while not self._closing and self._failure is None:
                entry = self._next(lane)
                if entry is not None:
                    return entry
                self._changed.wait()
        return None

    def _wait_for_work(self, work: dist.Work) -> None:
        wait_for(work, timedelta(seconds=self._world.timeout_s + GRACE_S))
        self._moved_at = time.monotonic()
