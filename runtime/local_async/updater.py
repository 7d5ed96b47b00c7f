"""One updater: a process that takes minibatches, computes gradients of a snapshot and updates the shared model."""

from __future__ import annotations

import random
import resource
import signal
import sys
import time
import traceback
import warnings
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from runtime.errors import InputError, PlannerError
from runtime.local_async.job import Batches, LocalJob, Part, samples_of
from runtime.local_async.memory import AtomicCounter, Doorbell, SharedMemory
from runtime.local_async.partial import partial_backward
from runtime.local_async.processes import end_with_parent
from runtime.local_async.report import KEPT, STALEST
from runtime.local_async.shared import Layout, SharedModel, Snapshots, open_memory

BEGUN, DONE, PARTIAL, SAMPLES, COUNTS = 0, 1, 2, 3, 4
"""Columns of the table in which each updater counts, in a row of its own, so that the counts of a killed one stay."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the updaters of a rank share beside the model."""

    begun: AtomicCounter
    """Minibatches that were given out: the counter s of Algorithm 1."""
    done: AtomicCounter
    """Updates that are in the shared model."""
    doorbell: Doorbell
    """Rings at each update."""
    counts: SharedMemory
    """`COUNTS` of int64 for each updater."""

    def row(self, updater: int) -> Any:
        """One updater's counts, a numpy array."""
        return self.counts.bytes().numpy().view(np.int64)[updater * COUNTS : (updater + 1) * COUNTS]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one updater is told."""

    make: Callable[[], LocalJob]
    memory: Any
    """See `make_memory`."""
    layout: Layout
    shared: Shared
    steps: int
    rank: int
    ranks: int
    updater: int
    updaters: int
    block: tuple[str, ...] | None
    """Of LPP-SGD; None: every minibatch is for the whole model."""
    full_steps: float
    """So many of the rank's first minibatches are for the whole model in any case."""
    seed: int
    threads: int

    @property
    def part(self) -> Part:
        """Of the data."""
        return Part(self.rank * self.updaters + self.updater, self.ranks * self.updaters, self.seed)


class Times(NamedTuple):
    """One minibatch, by the machine's monotonic clock, in seconds."""

    number: int
    start_s: float
    batch_s: float
    """The minibatch is there."""
    gradient_s: float
    """Its gradient, of a snapshot taken since, is computed."""
    end_s: float
    """The shared model is updated."""
    partial: bool


@dataclass
class Result:
    """What an updater leaves."""

    updater: int
    numbers: array[int] = field(default_factory=lambda: array("q"))
    losses: array[float] = field(default_factory=lambda: array("d"))
    ends_s: array[float] = field(default_factory=lambda: array("d"))
    staleness: list[int] = field(default_factory=lambda: [0] * (STALEST + 1))
    times: deque[Times] = field(default_factory=lambda: deque(maxlen=KEPT))
    start_s: float = 0.0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Failure:
    """What an updater leaves that raised."""

    error: PlannerError | None
    text: str
    trace: str


READY = "ready"
GO = "go"


class Updater:
    """The state of one updater; its momentum, data order and learning rate are its own."""

    def __init__(self, task: Task) -> None:
        """Makes the job anew.

        Raises:
            InputError: it is another one than the rank's.
        """
        self.task = task
        self.job = job = task.make()
        # The first updater goes on with the generators as the job has left them, as a single process would.
        if task.part.index > 0:
            # Random numbers of its own: dropout and augmentation must not be alike in all of them.
            seed = (torch.initial_seed() + task.part.index) % 2**32
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
        self.shared = SharedModel(job.model, _checked(job, task.layout), open_memory(task.memory))
        self.snapshots = Snapshots(self.shared)
        self.optimizer = job.optimizer(p for p in job.model.parameters() if p.requires_grad)
        self.schedule = None if job.schedule is None else job.schedule(self.optimizer)
        self.batches = Batches(job, task.rank, task.part)
        self.block = None if task.block is None else [self.shared.parameters[name] for name in task.block]
        self.result = Result(task.updater)
        self._row = task.shared.row(task.updater)
        self._scheduled = 0
        self._partial_next = True

    def run(self) -> Result:
        """Takes minibatches until all are given out."""
        result, task = self.result, self.task
        result.start_s = time.perf_counter()
        while (number := task.shared.begun.take()) < task.steps:
            self._minibatch(number)
        result.peak_bytes = _peak_bytes()
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
        batch = self.batches.get(number)
        batch_s = time.perf_counter()
        partial = self._choose(number)
        seen = shared.done.value
        self.snapshots.take()
        loss = self._gradient(batch, partial)
        self.snapshots.leave()
        gradient_s = time.perf_counter()
        self.optimizer.step()
        if self.shared.memory.is_cuda:
            torch.cuda.current_stream().synchronize()
        self.optimizer.zero_grad(set_to_none=True)
        row[DONE] += 1
        row[PARTIAL] += partial
        row[SAMPLES] += samples_of(batch)
        stale = shared.done.take() - seen
        shared.doorbell.ring()
        end_s = time.perf_counter()
        result = self.result
        result.numbers.append(number)
        result.losses.append(loss)
        result.ends_s.append(end_s)
        result.staleness[min(stale, STALEST)] += 1
        result.times.append(Times(number, start_s, batch_s, gradient_s, end_s, partial))

    def _choose(self, number: int) -> bool:
        """Whether this minibatch is for the block alone: every other one, after the first part of the run."""
        if self.block is None or number < self.task.full_steps:
            return False
        partial, self._partial_next = self._partial_next, not self._partial_next
        return partial

    def _gradient(self, batch: Any, partial: bool) -> float:
        """Fills `.grad` of the whole model, or of the block; the loss."""
        loss = self.job.loss(self.job.model, batch)
        self.shared.follow_buffers()
        if partial:
            assert self.block is not None
            for parameter, gradient in zip(self.block, partial_backward(loss, self.block), strict=True):
                parameter.grad = gradient
        else:
            loss.backward()
        return float(loss.detach())


def _checked(job: object, layout: Layout) -> Layout:
    if not isinstance(job, LocalJob):
        raise InputError(f"the job's function returned {type(job).__name__} in an updater, expected a LocalJob")
    found = layout.difference(Layout.of(job.model))
    if found is not None:
        raise InputError(
            f"the job's function made another model in an updater than in its rank: {found}; expected the same at "
            f"every call"
        )
    return layout


def _peak_bytes() -> int:
    """The most memory that this process has had at once."""
    with suppress(OSError):  # Linux; getrusage would tell the parent's there, which a new program inherits
        for line in Path("/proc/self/status").read_text("ascii", "replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _told_to_go(connection: Connection) -> bool:
    """Waits for the rank's word; False where it wants no updaters any more. No deadline: the rank has them."""
    try:
        connection.recv()
    except EOFError:
        return False
    return True


def main(task: Task, connection: Connection) -> None:
    """An updater's process: says that it is ready, waits to be told to go, and leaves a `Result` or a `Failure`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, which ends its updaters
    end_with_parent()
    word: Any
    try:
        torch.set_num_threads(task.threads)
        updater = Updater(task)
        connection.send(READY)
        if not _told_to_go(connection):
            return
        word = updater.run()
    except BaseException as error:
        ours = error if isinstance(error, PlannerError) else None
        word = Failure(ours, f"{type(error).__name__}: {error}", traceback.format_exc())
    with suppress(BrokenPipeError):
        connection.send(word)
