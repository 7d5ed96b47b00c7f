"""Sends buckets whose collectives have several phases, on intra-node and inter-node links concurrently.

While one bucket is between nodes, another one is inside them. Links take their phases in the plan's order,
which is the same on all ranks, so that no two groups of ranks wait for each other. A phase begins when the one before
it has ended and its link is free. On CPUs a thread for each of the two does that, which also adds up and selects, so
that backward continues; on CUDA there is a stream for each, and the host waits for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from runtime.comm.collectives import collective_of, phases_in
from runtime.comm.collectives.phases import Phase, Works
from runtime.comm.communicator import CommTiming, Communicator, Payload, StreamWorks, mark_on, nothing
from runtime.comm.threaded_communicator import ThreadedCommunicator
from runtime.comm.topology import LinkName, Topology
from runtime.comm.traced import traced
from runtime.comm.world import Grid
from runtime.plan import Plan, PlanBucket

LINKS: tuple[LinkName, ...] = ("intra", "inter")
Entry = tuple[int, int]
"""(bucket, phase)."""


def phases_of(bucket: PlanBucket, topology: Topology) -> tuple[Phase, ...]:
    """Return the phases of a bucket; one for collectives without any, on the links that it keeps busy."""
    phases = phases_in(bucket, topology)
    if phases is not None:
        return phases
    collective = collective_of(bucket)

    def run(message: Any, grid: Grid) -> Works:
        return collective(message, grid.world.process_group)

    return (Phase(bucket.collective, "inter" if topology.num_nodes > 1 else "intra", run),)


def default_order(counts: Sequence[int]) -> list[Entry]:
    """Sort phases by bucket + phase, then bucket, given how many each bucket has."""
    return sorted(
        ((bucket, phase) for bucket, count in enumerate(counts) for phase in range(count)),
        key=lambda entry: (sum(entry), entry[0]),
    )


class PhaseQueues:
    """Phases that intra-node and inter-node links take next. A round is what is launched between two waits for
    everything.
    """

    def __init__(self, links: Sequence[Sequence[LinkName]], order: Sequence[Entry] | None = None) -> None:
        """Queue the phases of buckets. `links`: of each bucket, the links of its phases. `order`: of all phases;
        default: see `default_order`.
        """
        self._counts = [len(of) for of in links]
        order = default_order(self._counts) if order is None else order
        self.order = tuple(order)
        self._queues = {link: [entry for entry in order if links[entry[0]][entry[1]] == link] for link in LINKS}
        self.begin()

    def begin(self) -> None:
        self._places = dict.fromkeys(LINKS, 0)
        self._done: dict[int, int] = {}
        self._flushed = False

    def over(self, bucket: int) -> bool:
        """Return whether a bucket belongs to the next round: it has been launched in this one, or no more come."""
        return bucket in self._done or self._flushed

    def launch(self, bucket: int) -> None:
        self._done[bucket] = 0

    def flush(self) -> None:
        """End the round: buckets that have not been launched are not waited for."""
        self._flushed = True

    def next(self, link: LinkName) -> Entry | None:
        """Return what the link takes now; None where it has to wait, or is through. The same until `done` is called."""
        queue = self._queues[link]
        while self._places[link] < len(queue):
            bucket, phase = queue[self._places[link]]
            if bucket in self._done:
                return (bucket, phase) if self._done[bucket] == phase else None
            if not self._flushed:
                return None
            self._places[link] += 1
        return None

    def done(self, link: LinkName) -> None:
        """Mark the phase that `next` returned as ended."""
        bucket, _ = self._queues[link][self._places[link]]
        self._places[link] += 1
        self._done[bucket] += 1

    def complete(self, bucket: int | None = None) -> bool:
        """Return whether all phases have ended, of one bucket or of all that were launched."""
        buckets = self._done if bucket is None else [bucket]
        return all(self._done.get(one, 0) == self._counts[one] for one in buckets)


class PhasedHostCommunicator(ThreadedCommunicator[LinkName, Entry]):
    """Communicator of CPU tensors: one thread for intra-node and one for inter-node links."""

    def __init__(self, grid: Grid, phases: Sequence[tuple[Phase, ...]], order: Sequence[Entry] | None = None) -> None:
        super().__init__(grid.world, LINKS)
        self._grid, self._phases = grid, phases
        self._queues = PhaseQueues([[phase.link for phase in of] for of in phases], order)
        self._buckets: dict[int, tuple[Payload, CommTiming]] = {}

    def launch(self, bucket: Payload, sent: CommTiming, prepare: Callable[[], None] = nothing) -> None:
        if self._queues.over(bucket.index):
            self.wait()
        prepare()
        sent.launch, sent.start, sent.end = time.perf_counter(), None, None
        sent.phases.clear()
        with self._changed:
            self._start()
            self._buckets[bucket.index] = bucket, sent
            self._queues.launch(bucket.index)
            self._changed.notify_all()

    def wait(self, until: CommTiming | None = None) -> None:
        """See `Communicator.wait`. After a failure every later wait fails alike: the groups are broken."""
        with self._changed:
            self._wait_until(until)
            if self._queues.complete():
                self._queues.begin()
                self._buckets.clear()

    def _drain(self, until: CommTiming | None = None) -> None:
        self._queues.flush()
        self._changed.notify_all()
        super()._drain(until)

    def _is_pending(self, until: CommTiming | None) -> bool:
        return not self._queues.complete() if until is None else until.end is None

    def _next(self, lane: LinkName) -> Entry | None:
        return self._queues.next(lane)

    def _label(self, lane: LinkName, entry: Entry) -> str:
        return f"{self._phases[entry[0]][entry[1]].name} ({lane}) of {self._buckets[entry[0]][0].label}"

    def _carry(self, lane: LinkName, entry: Entry) -> None:
        bucket, sent = self._buckets[entry[0]]
        phases = self._phases[entry[0]]
        phase = phases[entry[1]]
        begun = time.perf_counter()
        if sent.start is None:
            sent.start = begun
        for work in (work for message in bucket.messages for work in phase.run(message, self._grid)):
            self._wait_for_work(work)
        ended = time.perf_counter()
        with self._changed:
            sent.phases.append((phase.name, lane, begun, ended))
            if entry[1] == len(phases) - 1:
                sent.end = ended
            self._queues.done(lane)
            self._changed.notify_all()


class PhasedStreamCommunicator:
    """Communicator of CUDA tensors: a stream for intra-node and one for inter-node links, phases in the plan's order.

    Over a backend that carries tensors through the host (gloo) the host waits for each phase: sums are right, nothing
    overlaps.
    """

    def __init__(
        self,
        grid: Grid,
        phases: Sequence[tuple[Phase, ...]],
        device: torch.device,
        order: Sequence[Entry] | None = None,
    ) -> None:
        self._grid, self._phases = grid, phases
        self._queues = PhaseQueues([[phase.link for phase in of] for of in phases], order)
        self._device, self._streams = device, {link: torch.cuda.Stream(device) for link in LINKS}
        self._buckets: dict[int, tuple[Payload, CommTiming]] = {}
        self._events: dict[int, torch.cuda.Event] = {}
        self._works = StreamWorks(grid.world)

    def launch(self, bucket: Payload, sent: CommTiming, prepare: Callable[[], None] = nothing) -> None:
        """See `Communicator.launch`; what the current stream has queued so far is waited for on the device."""
        if self._queues.over(bucket.index):
            self.wait()
        prepare()
        self._works.forget_completed()
        sent.launch = sent.start = sent.end = mark_on(torch.cuda.current_stream(self._device))
        sent.phases.clear()
        self._buckets[bucket.index], self._events[bucket.index] = (bucket, sent), sent.launch
        self._queues.launch(bucket.index)
        self._queue()

    def _queue(self) -> None:
        """Hand the backend every phase that may be queued now, in an order that is the same on all ranks."""
        queued = True
        while queued:
            queued = False
            for link in LINKS:
                entry = self._queues.next(link)
                if entry is not None:
                    self._queue_phase(link, entry)
                    self._queues.done(link)
                    queued = True

    def _queue_phase(self, link: LinkName, entry: Entry) -> None:
        (bucket, sent), phase, stream = self._buckets[entry[0]], self._phases[entry[0]][entry[1]], self._streams[link]
        stream.wait_event(self._events[entry[0]])
        begun = mark_on(stream)
        with torch.cuda.stream(stream):
            for message in bucket.messages:
                self._works.start(phase.run(message, self._grid), bucket.label)
        sent.end = self._events[entry[0]] = mark_on(stream)
        sent.phases.append((phase.name, link, begun, sent.end))
        sent.start = sent.phases[0][2]

    def wait(self, until: CommTiming | None = None) -> None:
        """See `Communicator.wait`: makes the current stream wait, for all that was launched or for that bucket."""
        self._queues.flush()
        self._queue()
        if until is not None and isinstance(until.end, torch.cuda.Event):
            torch.cuda.current_stream(self._device).wait_event(until.end)
            return
        for stream in self._streams.values():
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._works.wait()
        self._queues.begin()
        self._buckets.clear()
        self._events.clear()

    def close(self) -> None:
        self._works.clear()


def make_phased_communicator(grid: Grid, plan: Plan, device: torch.device) -> Communicator:
    """Make the communicator of a plan with collectives of several phases."""
    phases = [phases_of(bucket, grid.topology) for bucket in plan.buckets]
    if device.type == "cuda":
        return traced(PhasedStreamCommunicator(grid, phases, device, plan.phase_order), grid.world.rank)
    return traced(PhasedHostCommunicator(grid, phases, plan.phase_order), grid.world.rank)
