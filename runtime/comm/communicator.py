"""Sends buckets in plan order during backward, one after the other; every wait has a deadline."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from runtime.comm.collectives import Collective
from runtime.comm.collectives.direct import library_all_reduce
from runtime.comm.waits import wait_watched, work_is_over
from runtime.comm.world import World, first_line, note
from runtime.errors import CommunicationError
from runtime.torch_compat import is_of_backend, result_of, unprofiled, wait_for

THROUGH_HOST = "gloo"
"""The backend that carries a device's tensors through the host's memory, where waiting for a message stops the host."""

AT_ONCE = 2
"""Number of all-reduces that the host's backend runs concurrently: gloo has two threads for each group. A ring waits
for its neighbour in every phase; meanwhile another one uses the link.
"""

EXIT_S, SETTLING_S = 5.0, 0.01
"""Seconds for which the end of a script waits for messages in flight, and between two looks at them."""


@dataclass(eq=False)
class Payload:
    """One bucket in flight."""

    index: int
    """Index of the bucket, by which its collective is found."""
    label: str
    messages: Sequence[Any]
    """Messages of its collective, one after the other; see `runtime.comm.collectives.Collective`."""


@dataclass(slots=True)
class CommTiming:
    """Marks of the session's clock when one bucket was sent; None: unknown."""

    launch: Any = None
    start: Any = None
    end: Any = None
    phases: list[tuple[str, str, Any, Any]] = field(default_factory=list)
    """(name, link, start, end) of each phase, of collectives that have several."""


@dataclass(slots=True, eq=False)
class _Task:
    """One message in flight."""

    bucket: Payload
    message: Any
    sent: CommTiming
    last: bool
    """Whether it is its bucket's last."""
    alone: bool
    """Whether it shares the link with no other one: several phases have to be called in one order everywhere."""
    phases: Iterator[dist.Work] | None = None
    """None until it is started."""
    work: dist.Work | None = None
    done: bool = False


def nothing() -> None:
    """Do nothing: the messages of the bucket are filled already."""


class Communicator(Protocol):
    """Launches buckets in the order of the calls and waits for all of them."""

    def launch(self, bucket: Payload, sent: CommTiming, prepare: Callable[[], None] = nothing) -> None:
        """Launch a bucket and return at once; fills `sent`. `prepare` fills the messages, on a device concurrently with
        computation.
        """
        ...

    def wait(self, until: CommTiming | None = None) -> None:
        """Block until the given bucket, or every bucket launched so far, is complete. Raises CommunicationError."""
        ...

    def close(self) -> None:
        """End what the communicator started."""
        ...


class NullCommunicator:
    """Sends nothing: for one rank, and for measuring computation without communication."""

    def launch(self, bucket: Payload, sent: CommTiming, prepare: Callable[[], None] = nothing) -> None:
        prepare()

    def wait(self, until: CommTiming | None = None) -> None: ...

    def close(self) -> None: ...


def failure_of(world: World, label: str, error: Exception) -> Exception:
    """Return the error to raise for a failed collective: one that names other ranks as a possible cause, or this
    process's.
    """
    if isinstance(error, CommunicationError):
        return error
    if is_of_backend(error):
        failure = describe_failure(world, label, error)
        failure.__cause__ = error
        return failure
    note(error, world, label)
    return error


def raise_failure(world: World, label: str, error: Exception) -> NoReturn:
    """Raise what a failed collective raises; see `failure_of`."""
    raise failure_of(world, label, error)


def describe_failure(world: World, label: str, error: BaseException) -> CommunicationError:
    """Describe a collective that failed: rank, bucket, collective, cause and what to do."""
    return CommunicationError(
        f"rank {world.rank}: {label} did not complete: another rank died, stalled, left the step or had a backward "
        f"that reached no parameter, or the network failed (deadline {world.timeout_s:.0f} s; {first_line(error)}); "
        f"look at the other ranks' first error"
    )


class HostCommunicator:
    """CPU tensors: messages follow one another, and of the backend's own all-reduces the next one begins when the one
    before the last has ended.

    A message that finds the link busy waits in a queue; whoever notices first that one has ended, the backend's own
    thread or the waiting main thread, starts the next. No thread of ours stands between them, which would cost two
    wake-ups per message. A message counts as started when all before it have ended, so that times of messages add up to
    how long the link was busy.
    """

    def __init__(
        self, world: World, collectives: list[Collective], whole: World | None = None, *, across_steps: bool = False
    ) -> None:
        """Send buckets in a world; see `make_communicator`. `across_steps`: whether messages may be in flight when a
        step ends, and with it a profiler's record.
        """
        self._world, self._collectives, self._whole = world, collectives, whole or world
        self._recorded: Callable[[], AbstractContextManager[None]] = unprofiled if across_steps else nullcontext
        # Reentrant: the callback of a message that has ended already runs at once, inside `_start`.
        self._lock = threading.RLock()
        self._queue: deque[_Task] = deque()
        self._on_way: deque[_Task] = deque()
        """Messages in flight, in the order in which they were started and leave the queue."""
        self._failure: Exception | None = None
        self._callbacks = 0
        """Number of callbacks that the backend's thread has yet to call."""
        to_settle.add(self)

    def launch(self, bucket: Payload, sent: CommTiming, prepare: Callable[[], None] = nothing) -> None:
        prepare()
        # A step that was given up may have marked it.
        sent.launch, sent.start, sent.end = time.perf_counter(), None, None
        alone = self._collectives[bucket.index] is not library_all_reduce
        with self._lock:
            for message in bucket.messages:
                self._queue.append(_Task(bucket, message, sent, last=message is bucket.messages[-1], alone=alone))
            self._start()

    def wait(self, until: CommTiming | None = None) -> None:
        """See `Communicator.wait`. After a failure every later wait fails alike: the group is broken."""
        self._drain(until)
        if self._failure is not None:
            raise self._failure

    def _drain(self, until: CommTiming | None = None) -> None:
        while until is None or until.end is None:
            with self._lock:  # not between one message's end and the next one's start
                task = self._on_way[0] if self._on_way else None
                work = None if task is None else task.work
            if task is None or work is None:
                return
            try:
                wait_watched(partial(work_is_over, work), self._whole, task.bucket.label)
            except RuntimeError as error:
                self._fail(task, error)
                break
            self._ended(task, work)

    def close(self) -> None:
        """Wait for messages that a backward that raised left in flight, then release the group."""
        self._drain()  # the first wait has raised what failed
        # The backend's thread may still hold this object, and a group that is taken down by its own thread ends the
        # process.
        self._world = self._whole = World()

    def settle(self, deadline: float) -> None:
        """Start nothing more, and give the backend's thread until `deadline` (monotonic) for messages in flight."""
        with self._lock:
            self._queue.clear()
        while self._callbacks > 0 and time.monotonic() < deadline:
            time.sleep(SETTLING_S)

    def _start(self) -> None:
        """Start the messages that may be in flight now; the lock is held."""
        while self._queue and self._failure is None:
            others = [task for task in self._on_way if not task.done]
            task = self._queue[0]
            if others and (len(others) == AT_ONCE or task.alone or others[-1].alone):
                return
            self._queue.popleft()
            self._on_way.append(task)
            self._mark()
            self._advance(task)

    def _advance(self, task: _Task) -> None:
        """Start the message's next phase, if there is one; the lock is held."""
        try:
            if task.phases is None:
                task.phases = self._collectives[task.bucket.index](task.message, self._world.process_group)
            with self._recorded():
                task.work = next(task.phases, None)
            if task.work is None:
                task.done = True
                self._mark()
                return
            self._callbacks += 1
            task.work.get_future().add_done_callback(partial(self._on_done, task, task.work))
        except Exception as error:  # kept for the next `wait`: no caller sees it on the backend's thread
            self._fail(task, error)

    def _mark(self) -> None:
        """Note which messages have ended, and which one has begun; the lock is held."""
        now = time.perf_counter()
        while self._on_way and self._on_way[0].done:
            task = self._on_way.popleft()
            if task.sent.start is None:  # it ended behind one that took longer
                task.sent.start = now
            if task.last:
                task.sent.end = now
        if self._on_way and self._on_way[0].sent.start is None:
            self._on_way[0].sent.start = now

    def _on_done(self, task: _Task, work: dist.Work, future: torch.futures.Future[Any]) -> None:
        """Called on the backend's thread."""
        try:
            result_of(future)
        except RuntimeError as error:
            self._fail(task, error)
        else:
            self._ended(task, work)
        finally:
            with self._lock:
                self._callbacks -= 1

    def _ended(self, task: _Task, work: dist.Work) -> None:
        with self._lock:
            if task.work is not work or task not in self._on_way:
                return  # the other thread was first
            self._advance(task)
            self._start()

    def _fail(self, task: _Task, error: Exception) -> None:
        with self._lock:
            # Of several in flight any may fail first if a rank is lost.
            first = self._on_way[0] if self._on_way and is_of_backend(error) else task
            if self._failure is None or isinstance(error, CommunicationError):  # which says more than what follows
                self._failure = failure_of(self._whole, first.bucket.label, error)
            self._queue.clear()
            self._on_way.clear()


to_settle: weakref.WeakSet[Any] = weakref.WeakSet()
"""Communicators in use, whose `settle` the end of a script has to call."""


@atexit.register
def _settle_all() -> None:
    # A script may end while messages are in flight, by an exception in backward, say: neither threads of ours nor
    # the backend's may run in an interpreter that is being taken down, which would abort the process.
    deadline = time.monotonic() + EXIT_S
    running = list(to_settle)
    for communicator in running:
        communicator.settle(deadline)
    if running:
        time.sleep(SETTLING_S)  # the thread lets go of what it has called


class StreamWorks:
    """Works of the backend on a device's streams, until they have been waited for."""

    def __init__(self, world: World) -> None:
        """Name this rank by its number in `world` in errors."""
        self._world, self._works = world, list[tuple[dist.Work, str]]()

    def forget_completed(self) -> None:
        """Keep the works that have not ended."""
        self._works = [(work, label) for work, label in self._works if not work.is_completed()]

    def start(self, works: Iterator[dist.Work], label: str) -> None:
        """Start works one after the other on the current stream, which waits for each, not the host."""
        try:
            for work in works:
                wait_for(work)
                self._works.append((work, label))
        except RuntimeError as error:
            raise_failure(self._world, label, error)

    def wait(self) -> None:
        """Let the current stream wait for all of them. Raises CommunicationError."""
        works, self._works = self._works, []
        for work, label in works:
            self.start(iter((work,)), label)
        self._works.clear()  # waited for, now

    def clear(self) -> None:
        """Forget all of them."""
        self._works.clear()


class StreamCommunicator:
    """CUDA tensors over a backend that queues collectives on a stream (NCCL): the host never waits for the device."""

    def __init__(
        self, world: World, collectives: list[Collective], device: torch.device, whole: World | None = None
    ) -> None:
        self._world, self._collectives, self._whole = world, collectives, whole or world
        self._device, self._side = device, torch.cuda.Stream(device)
        self._works = StreamWorks(self._whole)

    def launch(self, bucket: Payload, sent: CommTiming, prepare: Callable[[], None] = nothing) -> None:
        """See `Communicator.launch`; what the current stream has queued so far is waited for on the device."""
        self._works.forget_completed()
        sent.launch = sent.start = mark_on(torch.cuda.current_stream(self._device))
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            prepare()
            for message in bucket.messages:
                self._works.start(self._collectives[bucket.index](message, self._world.process_group), bucket.label)
        sent.end = mark_on(self._side)

    def wait(self, until: CommTiming | None = None) -> None:
        """See `Communicator.wait`: makes the current stream wait, for all that was launched or for that bucket."""
        if until is not None and isinstance(until.end, torch.cuda.Event):
            torch.cuda.current_stream(self._device).wait_event(until.end)
            return
        torch.cuda.current_stream(self._device).wait_stream(self._side)
        self._works.wait()

    def close(self) -> None:
        self._works.clear()


def mark_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Mark what the stream has queued so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
