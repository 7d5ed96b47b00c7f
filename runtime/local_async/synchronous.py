"""Minibatch SGD, local SGD and post-local SGD in the rank's own process, to compare Algorithm 1 with."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from runtime.comm.world import World, agreed
from runtime.errors import InputError
from runtime.local_async.averaging import DONE, RUNNING, Averager, every
from runtime.local_async.job import LocalJob, Part, Request, batches_of, samples_of
from runtime.local_async.preparing import Prepared, check_request, made
from runtime.local_async.report import Averagings, LocalReport, Result, Times, UpdaterReport, make_report
from runtime.local_async.shared import SharedModel, make_memory
from runtime.plan import Plan
from runtime.session.attaching import attach


class Loop:
    """One process that trains step by step, with the records of an updater."""

    def __init__(self, job: LocalJob, rank: int, ranks: int, seed: int) -> None:
        self.job = job
        self.optimizer = job.optimizer(p for p in job.model.parameters() if p.requires_grad)
        self.result = Result(updater=0)
        self._schedule = None if job.schedule is None else job.schedule(self.optimizer)
        self._batch = batches_of(job, rank, Part(rank, ranks, seed))
        self._samples = 0

    def run(self, steps: int, after: Callable[[int], None] = lambda number: None) -> None:
        """Train; `after` is called with the number of each step."""
        self.result.start_s = time.perf_counter()
        for number in range(steps):
            start_s = time.perf_counter()
            batch = self._batch(number)
            batch_s = time.perf_counter()
            self.optimizer.zero_grad()
            loss = self.job.loss(self.job.model, batch)
            loss.backward()
            value = float(loss.detach())
            gradient_s = time.perf_counter()
            self.optimizer.step()
            if self._schedule is not None:
                self._schedule.step()
            after(number)
            end_s = time.perf_counter()
            self.result.add(Times(number, start_s, batch_s, gradient_s, end_s, partial=False), value)
            self._samples += samples_of(batch)

    def report(self, world: World, averager: Averager | None = None) -> LocalReport:
        """Return the report of all steps."""
        done = len(self.result.numbers)
        mine = UpdaterReport(updater=0, minibatches=done, samples=self._samples, seconds=self.result.seconds)
        return make_report(world, done, [mine], [self.result], averager.record if averager else Averagings())


def train_by_session(
    request: Request, plan: Plan, group: dist.ProcessGroup | None
) -> tuple[nn.Module, LocalReport, list[Result]]:
    """Train by minibatch SGD: gradients are averaged in every step, by the plan's buckets. Raises as `attach` does."""
    problem = check_request(request)
    if problem is not None:
        raise InputError(problem)
    job = made(request.make)
    place = World.over(group)
    loop = Loop(job, place.rank, place.ranks, request.seed)
    session = attach(job.model, loop.optimizer, plan, group, timeout_s=request.timeout_s)
    try:
        loop.run(request.steps)
    finally:
        session.detach()
    place.broadcast(job.model.buffers())  # they follow rank 0 before each forward, and have changed in the last one
    return job.model, loop.report(place), [loop.result]


def train_locally(prepared: Prepared, world: World) -> tuple[nn.Module, LocalReport, list[Result]]:
    """Train by local SGD: each rank alone, waiting for the average of all models after every K-th step."""
    request, job = prepared.request, prepared.job
    _, memory = agreed(world, "sharing memory", lambda: make_memory(job.model, prepared.layout), "sharing memory")
    shared = SharedModel(job.model, prepared.layout, memory)
    loop = Loop(job, world.rank, world.ranks, request.seed)
    averager = Averager(world, shared.flats) if world.ranks > 1 else None
    averaged = 0

    def after(number: int) -> None:
        nonlocal averaged
        shared.follow_buffers()
        last = number + 1 == request.steps
        since = number + 1 - averaged
        if averager is not None and (last or since >= every(prepared.spec, number, request.steps)):
            averager.average(DONE if last else RUNNING, since, time.sleep, alone=True)
            averaged = number + 1

    try:
        loop.run(request.steps, after)
        world.broadcast(shared.kept)
        return job.model, loop.report(world, averager), [loop.result]
    finally:
        shared.release()
