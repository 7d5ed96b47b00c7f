"""Sends buckets in plan order, one at a time, beside backward; every wait has a deadline."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from runtime.buckets import BucketBuffer
from runtime.collectives import Collective
from runtime.errors import CommunicationError
from runtime.world import World, first_line

GRACE_S = 5.0
"""How much longer than the backend's own deadline the waiting thread gives it."""


@dataclass(slots=True)
class Sent:
    """When one bucket was sent; marks of the session's clock, None where unknown."""

    launch: Any = None
    start: Any = None
    end: Any = None


class Communicator(Protocol):
    """Launches buckets in the order of the calls and waits for all of them."""

    def launch(self, bucket: BucketBuffer, sent: Sent) -> None:
        """Hands the bucket over; returns at once. Fills `sent`."""
        ...

    def wait(self) -> None:
        """Returns when every bucket launched so far has its sums. Raises CommunicationError."""
        ...

    def close(self) -> None:
        """Ends what the communicator started."""
        ...


class NullCommunicator:
    """Sends nothing: for one rank, and for measuring computation without communication."""

    def launch(self, bucket: BucketBuffer, sent: Sent) -> None:
        """Does nothing."""

    def wait(self) -> None:
        """Returns at once."""

    def close(self) -> None:
        """Does nothing."""


def describe_failure(world: World, label: str, error: BaseException) -> CommunicationError:
    """One message for a collective that failed: rank, bucket, collective, cause and cure."""
    return CommunicationError(
        f"rank {world.rank}: {label} did not complete: another rank died, stalled or left the step, or the network "
        f"failed (deadline {world.timeout_s:.0f} s; {first_line(error)}); look at the other ranks' first error"
    )


class ThreadCommunicator:
    """CPU tensors: one thread sends the buckets, so that they never share the link with each other."""

    def __init__(self, world: World, collectives: list[Collective]) -> None:
        self._world, self._collectives = world, collectives
        self._todo: queue.SimpleQueue[tuple[BucketBuffer, Sent] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[CommunicationError | None] = queue.SimpleQueue()
        self._in_flight = 0
        self._failure: CommunicationError | None = None
        self._thread = threading.Thread(target=self._work, name="planner-communicator", daemon=True)
        self._thread.start()

    def launch(self, bucket: BucketBuffer, sent: Sent) -> None:
        """See `Communicator.launch`."""
        sent.launch = time.perf_counter()
        self._in_flight += 1
        self._todo.put((bucket, sent))

    def wait(self) -> None:
        """See `Communicator.wait`. After a failure every later wait fails alike: the group is broken."""
        while self._in_flight:
            try:
                failure = self._done.get(timeout=self._world.timeout_s + GRACE_S)
            except queue.Empty:
                failure = describe_failure(self._world, "a bucket", TimeoutError("no answer from the backend"))
            self._in_flight -= 1
            self._failure = self._failure or failure
            if self._failure is not None:
                self._in_flight = 0
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """See `Communicator.close`."""
        self._todo.put(None)
        self._thread.join(timeout=GRACE_S)

    def _work(self) -> None:
        failure: CommunicationError | None = None
        while (task := self._todo.get()) is not None:
            bucket, sent = task
            if failure is None:
                failure = self._send(bucket, sent)
            self._done.put(failure)

    def _send(self, bucket: BucketBuffer, sent: Sent) -> CommunicationError | None:
        group = self._world.group
        assert group is not None
        sent.start = time.perf_counter()
        try:
            for message in bucket.messages:
                self._collectives[bucket.index].start(message.flat, group).wait()
        except RuntimeError as error:
            return describe_failure(self._world, bucket.label, error)
        sent.end = time.perf_counter()
        return None


class StreamCommunicator:
    """CUDA tensors: the backend queues the collectives on its own stream; the host never waits for the device."""

    def __init__(self, world: World, collectives: list[Collective], device: torch.device) -> None:
        self._world, self._collectives = world, collectives
        self._side = torch.cuda.Stream(device)
        self._works: list[tuple[torch.distributed.Work, str]] = []

    def launch(self, bucket: BucketBuffer, sent: Sent) -> None:
        """See `Communicator.launch`; what the current stream has queued so far is waited for on the device."""
        group = self._world.group
        assert group is not None
        sent.launch = sent.start = _mark(torch.cuda.current_stream())
        try:
            works = [self._collectives[bucket.index].start(message.flat, group) for message in bucket.messages]
        except RuntimeError as error:
            raise describe_failure(self._world, bucket.label, error) from error
        self._works += [(work, bucket.label) for work in works]
        with torch.cuda.stream(self._side):
            for work in works:
                work.wait()  # makes the side stream wait, not the host
        sent.end = _mark(self._side)

    def wait(self) -> None:
        """See `Communicator.wait`: makes the current stream wait."""
        works, self._works = self._works, []
        for work, label in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise describe_failure(self._world, label, error) from error

    def close(self) -> None:
        """See `Communicator.close`."""
        self._works.clear()


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def make_communicator(world: World, collectives: list[Collective], device: torch.device) -> Communicator:
    """The communicator for the device that the gradients live on."""
    if world.group is None:
        return NullCommunicator()
    if device.type == "cuda":
        return StreamCommunicator(world, collectives, device)
    return ThreadCommunicator(world, collectives)
