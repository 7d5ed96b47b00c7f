"""Training of a job by LAP-SGD, LPP-SGD, local SGD, post-local SGD or plain minibatch SGD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.comm.world import World, agreed
from runtime.errors import CommunicationError, EnvironmentFailure, InputError
from runtime.local_async.averaging import DONE, FAILED, RUNNING, STOPPING, Averager, every
from runtime.local_async.job import LocalJob, Request
from runtime.local_async.preparing import Prepared, agree_on_plan, mps_note, prepare
from runtime.local_async.processes import check_not_imported
from runtime.local_async.races import Races, add_to_probe, count_races, probe_places
from runtime.local_async.report import Averagings, LocalReport, Result, UpdaterReport, make_report
from runtime.local_async.shared import SharedModel, make_memory
from runtime.local_async.synchronous import train_by_session, train_locally
from runtime.local_async.updater import DONE as UPDATED
from runtime.local_async.updater import OUTDATED, PARTIAL, SAMPLES, Shared, Task
from runtime.local_async.updaters import LONGEST_WATCH_S, Updaters
from runtime.plan import Plan

START_TIMEOUT_S = 300.0
"""Deadline of each wait before a minibatch was measured, and for updaters to import torch and make their job."""


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """The result of a run, on one rank."""

    model: nn.Module
    """The trained model, the same on every rank."""
    report: LocalReport
    numbers: tuple[int, ...]
    """Numbers of this rank's minibatches, in order; those of lost updaters are missing."""
    losses: tuple[float, ...]
    """Losses of these minibatches, in the same order."""
    ends_s: tuple[float, ...]
    """Ends of this rank's updates, in order, in seconds of the machine's monotonic clock."""


def run_local_async(
    job: Callable[[], LocalJob],
    plan: Plan | str | Path,
    steps: int,
    process_group: dist.ProcessGroup | None = None,
    *,
    seed: int = 0,
    timeout_s: float | None = None,
    start_method: str = "spawn",
    on_lost: str = "continue",
) -> LocalRun:
    """Train a job as the plan's `local_async` says; every rank calls it.

    With updaters: each rank starts `updaters` processes, which share its model without locks, while this process
    averages the models of all ranks (Algorithm 1). With `synchronous`: local SGD in this process. Without
    `local_async`: minibatch SGD by the plan's buckets in this process.

    Args:
        job: makes the task; called once in this process and once in every updater, so it has to be importable by name:
            a module's function, or functools.partial of one.
        plan: a plan, or the path of plan.json; the same on every rank.
        steps: number of minibatches of this rank, over all of its updaters.
        process_group: the ranks that train together; default: all of torch.distributed, or this process alone.
        seed: seed of the partition of data and its order, where the job has a `loader`.
        timeout_s: deadline of every wait for other ranks; an updater that makes no update for half of it is taken for
            hung. Default: 20 times what the minibatches between two averagings (at least one of each updater) take one
            after the other, at least 120 s.
        start_method: how updaters are started: `spawn`, or `forkserver`.
        on_lost: when an updater was killed or hung, let the others `continue` and do what is left, or `stop` all ranks
            after the minibatches that have begun.

    Returns:
        The trained model, the same on all ranks, and what this rank saw.

    Raises:
        InputError: what was asked for cannot be done: on all ranks alike, before an updater is started.
        EnvironmentFailure: a rank has no shared memory left (on all ranks alike), an updater raised, all of a rank were
            lost, or a rank died or missed the deadline.
    """
    check_not_imported()
    request = Request(job, steps, seed, timeout_s, start_method, on_lost)
    world = World.join(process_group, max(START_TIMEOUT_S, timeout_s or 0.0))
    try:
        loaded = agree_on_plan(plan, world)
        trained = None if loaded.local_async is None else _train(prepare(request, loaded, world), world, process_group)
    finally:
        world.leave()
    model, report, results = trained or train_by_session(request, loaded, process_group)
    numbered = sorted(pair for one in results for pair in zip(one.numbers, one.losses, strict=True))
    return LocalRun(
        model=model,
        report=report,
        numbers=tuple(number for number, _ in numbered),
        losses=tuple(loss for _, loss in numbered),
        ends_s=tuple(sorted(end_s for one in results for end_s in one.ends_s)),
    )


Trained = tuple[nn.Module, LocalReport, list[Result]]


def _train(prepared: Prepared, starting: World, group: dist.ProcessGroup | None) -> Trained:
    """Train with models that ranks average now and then, beginning with rank 0's."""
    job, layout, spec, request = prepared.job, prepared.layout, prepared.spec, prepared.request
    starting.broadcast([*job.model.parameters(), *job.model.buffers()])
    if spec.synchronous:
        world = World.join(group, prepared.timeout_s)
        trained = train_locally(prepared, world)  # after an error a message may be on its way, and leaving would wait
        world.leave()
        return trained

    def share() -> tuple[Tensor, Updaters]:
        handle, memory = make_memory(job.model, layout)
        task = Task(
            request=request,
            spec=spec,
            layout=layout,
            memory=handle,
            shared=Shared.make(spec.updaters),
            rank=starting.rank,
            ranks=starting.ranks,
            threads=max(1, torch.get_num_threads() // spec.updaters),
        )
        return memory, Updaters(task)

    memory, updaters = agreed(starting, "sharing memory", share, "sharing memory")
    shared = SharedModel(job.model, layout, memory)
    try:
        _start(updaters, starting)
        world = World.join(group, prepared.timeout_s)
        model, report, results = _Parent(prepared, shared, updaters, world).train()
        world.leave()
        return model, report, results
    finally:
        updaters.end()
        shared.release()


def _start(updaters: Updaters, world: World) -> None:
    """Start the updaters, and wait until those of all ranks are ready. Raises on all ranks if those of one are not."""
    error: Exception | None = None
    try:
        updaters.start()
        problem = updaters.await_ready(START_TIMEOUT_S)
    except (InputError, OSError) as raised:
        error = raised if isinstance(raised, InputError) else None
        problem = str(raised) if error else f"updaters cannot be started: {raised}; use fewer, or allow more processes"
    found: list[str | None] = world.gather(problem, "starting updaters")
    if problem is not None:
        raise error or updaters.error or EnvironmentFailure(f"rank {world.rank}: {problem}")
    other = next((rank for rank, theirs in enumerate(found) if theirs is not None), None)
    if other is not None:
        raise CommunicationError(f"rank {world.rank}: the updaters of rank {other} did not start: {found[other]}")


class _Parent:
    """The parent process of one rank while updaters train."""

    def __init__(self, prepared: Prepared, shared: SharedModel, updaters: Updaters, world: World) -> None:
        self._prepared, self._shared, self._updaters, self._world = prepared, shared, updaters, world
        self._steps, self._spec = prepared.request.steps, prepared.spec
        self._averager = Averager(world, shared.flats) if world.ranks > 1 else None
        self._averaged = 0
        """Updates of this rank at its last averaging."""

    def train(self) -> Trained:
        """Train until all ranks' updaters have ended and all ranks have the same model."""
        updaters = self._updaters
        updaters.go(self._prepared.timeout_s / 2)  # well before other ranks give this one up
        over = False
        while not over:
            if not updaters.over or self._averager is None:  # else nothing is left to wait for but averagings
                updaters.watch(LONGEST_WATCH_S)
            if self._status == STOPPING:
                updaters.stop()
            if self._averager is not None:
                since = updaters.done - self._averaged
                due = self._status != RUNNING or since >= every(self._spec, updaters.begun, self._steps)
                over = due and self._average(self._averager)
            elif self._status in (DONE, FAILED):
                over = True
                self._raise_own()
        self._world.broadcast(self._shared.kept)
        return self._shared.model, self._report(), updaters.results

    def _report(self) -> LocalReport:
        updaters, averager = self._updaters, self._averager
        results, reports = {one.updater: one for one in updaters.results}, []
        for number in range(self._spec.updaters):
            counts, result = updaters.counts(number), results.get(number, Result(number))
            reports.append(
                UpdaterReport(
                    updater=number,
                    minibatches=counts[UPDATED],
                    partial=counts[PARTIAL],
                    samples=counts[SAMPLES],
                    seconds=result.seconds,
                    peak_bytes=result.peak_bytes,
                    lost=updaters.lost.get(number),
                )
            )
        record = averager.record if averager is not None else Averagings()
        report = make_report(self._world, self._steps, reports, list(results.values()), record)
        return replace(
            report,
            races=self._races(record.rounds),
            outdated=sum(updaters.counts(number)[OUTDATED] for number in range(self._spec.updaters)),
            notes=mps_note(self._shared.model, self._spec.updaters) + report.notes,
        )

    def _races(self, averagings: int) -> Races:
        layout, updates = self._prepared.layout, [(probe_places(self._prepared.layout), averagings)]
        for number in range(self._spec.updaters):
            counts = self._updaters.counts(number)
            block = replace(self._updaters.task, updater=number).block
            updates.append((probe_places(layout), counts[UPDATED] - counts[PARTIAL]))
            updates.append((probe_places(layout, block), counts[PARTIAL]))
        return count_races(self._shared.probe, updates)

    @property
    def _status(self) -> int:
        """Status of this rank, for the others."""
        updaters, lost = self._updaters, self._updaters.lost
        if updaters.error is not None or (updaters.over and len(lost) == self._spec.updaters):
            return FAILED
        if updaters.over:
            return DONE
        return STOPPING if lost and self._prepared.request.on_lost == "stop" else RUNNING

    def _average(self, averager: Averager) -> bool:
        status, done = self._status, self._updaters.done
        statuses = averager.average(status, done - self._averaged, lambda s: self._updaters.watch(s, bell=False))
        add_to_probe(self._shared.probe, [slice(None)])
        self._updaters.shared.averaged.take()
        self._averaged = done
        if status == FAILED:
            self._raise_own()
        if FAILED in statuses:
            raise CommunicationError(
                f"rank {self._world.rank}: the updaters of rank {statuses.index(FAILED)} failed (found out at "
                f"averaging {averager.record.rounds - 1}); look at its error"
            )
        if STOPPING in statuses:
            self._updaters.stop()
        return all(one == DONE for one in statuses)

    def _raise_own(self) -> None:
        if self._updaters.error is not None:
            raise self._updaters.error
        if self._status == FAILED:
            lost = "; ".join(f"updater {number} {why}" for number, why in self._updaters.lost.items())
            raise EnvironmentFailure(f"rank {self._world.rank}: no updater is left: {lost}")
