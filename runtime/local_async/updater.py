"""One updater: a process that takes minibatches, computes gradients of a snapshot and updates the shared model."""

from __future__ import annotations

import random
import resource
import signal
import sys
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from runtime.comm.shared_memory import SharedMemory
from runtime.errors import EnvironmentFailure, InputError, PlannerError
from runtime.local_async.job import LocalJob, Part, Request, batches_of, samples_of
from runtime.local_async.memory import AtomicCounter, Doorbell
from runtime.local_async.partial import partial_backward
from runtime.local_async.processes import end_with_parent, status_bytes
from runtime.local_async.races import add_to_probe, probe_places
from runtime.local_async.report import Result, Times
from runtime.local_async.shared import Layout, SharedModel, Snapshots
from runtime.plan import LocalAsyncSpec

BEGUN, DONE, PARTIAL, SAMPLES, OUTDATED, COUNTS = 0, 1, 2, 3, 4, 5
"""Columns of the table of counts; each updater has a row of its own, so that the counts of a killed one stay."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Counters that the updaters of a rank share."""

    begun: AtomicCounter
    """Count of minibatches that were given out: the counter s of Algorithm 1."""
    done: AtomicCounter
    averaged: AtomicCounter
    """Count of averagings whose change was added to the rank's model."""
    doorbell: Doorbell
    counts: SharedMemory
    """Table of `COUNTS` columns (int64), with a row for each updater."""

    @classmethod
    def make(cls, updaters: int) -> Shared:
        try:
            counts = SharedMemory(updaters * COUNTS * np.dtype(np.int64).itemsize)
            begun, done, averaged = AtomicCounter(), AtomicCounter(), AtomicCounter()
            return cls(begun=begun, done=done, averaged=averaged, doorbell=Doorbell(), counts=counts)
        except OSError as error:
            raise EnvironmentFailure(f"this system gives updaters no shared memory ({error.strerror})") from error

    def row(self, updater: int) -> Any:
        return self.counts.bytes().numpy().view(np.int64)[updater * COUNTS : (updater + 1) * COUNTS]


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task of an updater: the same for all of a rank but for its number."""

    request: Request
    spec: LocalAsyncSpec
    layout: Layout
    memory: Any
    """Handle of the shared model (see `make_memory`)."""
    shared: Shared
    rank: int
    ranks: int
    threads: int
    updater: int = 0

    @property
    def part(self) -> Part:
        updaters = self.spec.updaters
        return Part(self.rank * updaters + self.updater, self.ranks * updaters, self.request.seed)

    @property
    def block(self) -> tuple[str, ...] | None:
        """Names of the parameters of its block (LPP-SGD); None: every minibatch is for the whole model."""
        blocks = self.spec.blocks
        return None if blocks is None else blocks[self.updater % len(blocks)]


@dataclass(frozen=True)
class Failure:
    """The message of an updater that raised."""

    error: PlannerError | None
    text: str
    trace: str


READY = "ready"
GO = "go"


class Updater:
    """The state of one updater; its momentum, data order and learning rate are its own."""

    def __init__(self, task: Task) -> None:
        """Make the job anew. Raises InputError if it is another one than the rank's."""
        self.task = task
        self.job = job = task.request.make()
        if not isinstance(job, LocalJob):
            raise InputError(f"the job's function returned {type(job).__name__} in an updater, expected a LocalJob")
        found = task.layout.difference(Layout.of(job.model))
        if found is not None:
            raise InputError(
                f"the job's function made another model in an updater than in its rank: {found}; expected the same at "
                f"every call"
            )
        # The first updater continues with the generators as the job has left them, as a single process would.
        if task.part.index > 0:
            # Random numbers of its own: dropout and augmentation must not be alike in all of them.
            seed = (torch.initial_seed() + task.part.index) % 2**32
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
        memory = task.memory.bytes() if isinstance(task.memory, SharedMemory) else task.memory
        self.shared = SharedModel(job.model, task.layout, memory)
        self.snapshots = Snapshots(self.shared)
        self.optimizer = job.optimizer(p for p in job.model.parameters() if p.requires_grad)
        self.schedule = None if job.schedule is None else job.schedule(self.optimizer)
        self.batch = batches_of(job, task.rank, task.part)
        block = task.block
        self.block = None if block is None else [self.shared.parameters[name] for name in block]
        self._probed = probe_places(task.layout), probe_places(task.layout, block)
        self.result = Result(task.updater)
        self._row = task.shared.row(task.updater)
        self._scheduled = 0
        self._partial_next = True

    def run(self) -> Result:
        """Train until all minibatches have begun; return the records."""
        result, task = self.result, self.task
        result.start_s = time.perf_counter()
        while (number := task.shared.begun.take()) < task.request.steps:
            self._minibatch(number)
        # On Linux getrusage would tell the parent's, which a new program inherits.
        unit = 1 if sys.platform == "darwin" else 1024
        result.peak_bytes = status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return result

    def _minibatch(self, number: int) -> None:
        shared, row = self.task.shared, self._row
        start_s = time.perf_counter()
        row[BEGUN] += 1
        # The schedule follows the shared count of minibatches.
        if self.schedule is not None:
            with warnings.catch_warnings():
                if not self.result.numbers:  # torch takes it for a mistake that the rate changes before the first step
                    warnings.simplefilter("ignore")
                while self._scheduled < number:
                    self.schedule.step()
                    self._scheduled += 1
        batch = self.batch(number)
        batch_s = time.perf_counter()
        # Every other minibatch is for the block alone, after the first part of the run.
        task = self.task
        partial = self.block is not None and number >= task.spec.full_fraction * task.request.steps
        if partial:
            partial, self._partial_next = self._partial_next, not self._partial_next
        seen, averaged = shared.done.value, shared.averaged.value
        self.snapshots.take()
        loss = self._gradient(batch, partial)
        self.snapshots.leave()
        gradient_s = time.perf_counter()
        self.optimizer.step()
        add_to_probe(self.shared.probe, self._probed[partial])
        if self.shared.memory.is_cuda:
            torch.cuda.current_stream().synchronize()
        self.optimizer.zero_grad(set_to_none=True)
        row[DONE] += 1
        row[PARTIAL] += partial
        row[SAMPLES] += samples_of(batch)
        row[OUTDATED] += shared.averaged.value > averaged
        stale = shared.done.take() - seen
        shared.doorbell.ring()
        self.result.add(Times(number, start_s, batch_s, gradient_s, time.perf_counter(), partial), loss, stale)

    def _gradient(self, batch: Any, partial: bool) -> float:
        """Fill `.grad` of the whole model, or of the block; returns the loss."""
        loss = self.job.loss(self.job.model, batch)
        self.shared.follow_buffers()
        if partial:
            assert self.block is not None
            for parameter, gradient in zip(self.block, partial_backward(loss, self.block), strict=True):
                parameter.grad = gradient
        else:
            loss.backward()
        return float(loss.detach())


def main(task: Task, connection: Connection) -> None:
    """Run an updater's process: send `READY`, wait for `GO`, and send a `Result` or a `Failure`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, which ends its updaters
    end_with_parent()
    word: Any
    try:
        torch.set_num_threads(task.threads)
        updater = Updater(task)
        connection.send(READY)
        try:
            connection.recv()  # no deadline: the rank has them
        except EOFError:  # it wants no updaters any more
            return
        word = updater.run()
    except BaseException as error:
        ours = error if isinstance(error, PlannerError) else None
        word = Failure(ours, f"{type(error).__name__}: {error}", traceback.format_exc())
    with suppress(BrokenPipeError):
        connection.send(word)
