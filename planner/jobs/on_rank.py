"""A rank of `planner profile` and `planner run`: it builds the job, and measures it or trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from planner.cost.halves import LIBRARY_GATHER, LIBRARY_SCATTER
from planner.documents.profile import Profile
from planner.jobs.lr_schedule import CONSTANT, Course, LrSchedule
from planner.jobs.training import (
    KEPT_BATCHES,
    BuiltJob,
    RankRun,
    Trainer,
    build,
    error_context,
    make_optimizer,
    make_scheduler,
    this_rank,
    weights_sha256,
)
from planner.profile.batches import measure_batches
from planner.profile.bench import Bench, Progress
from planner.profile.compute import Step, Training
from planner.profile.links import Limits, measure_links
from planner.profile.loading import LONGEST_S as LOADING_S
from planner.profile.loading import batch_samples, measure_loading
from planner.profile.request import LOGGER, Request, heard
from planner.profile.step import TIMEOUT_S, deadline_s, joined, measure
from planner.profile.units import measure_units
from planner.profile.updaters import expected_s, measure_local_async
from planner.testbed.hosts import emulation_here
from runtime.checks.plan import trainable_parameters
from runtime.errors import EnvironmentFailure, InputError
from runtime.local_async import LocalJob, run_local_async
from runtime.local_async.job import samples_of
from runtime.monitor.preserve import preserved
from runtime.optimizers.kinds import each_of
from runtime.plan import Plan

LIBRARY_S = 8.0
"""Seconds for the curve of each of the two collectives that FSDP2 calls."""
REPEATED_STEPS = 200
"""Number of steps by which a rank may be ahead of another one while both measure local updaters."""


def profile_rank(
    spec: str,
    device: str,
    show_progress: bool,
    timeout_s: float | None = None,
    updaters: int = 0,
    request: Request | None = None,
) -> Profile:
    """Profile a job on this rank; every rank gets the same profile.

    Args:
        spec: the job's name.
        device: `cpu` or `cuda`.
        show_progress: whether the first rank shows bars.
        timeout_s: deadline of every wait, as of `profile_step`.
        updaters: largest number of local updaters that is measured.
        request: what is measured; default: exact plans.

    Raises:
        InputError: the job is wrong, or modules are asked for, and none computes once in a step.
    """
    built = build(spec, device)
    batches = [built.batch(step) for step in range(KEPT_BATCHES)]
    following = cycle([*batches[1:], batches[0]])

    def step(loss_ready: Callable[[], None]) -> None:
        built.forward_backward(next(following), loss_ready)

    progress, name = Progress(show=show_progress and this_rank() == 0), type(built.model).__name__.lower()
    with error_context(spec), heard():
        training = Training(built.model, step, built.optimizer, built.job.compile)
        found = measure(training, request or Request(), name=name, progress=progress, timeout_s=timeout_s)
        if built.job.dataset is not None and found.loading is None:
            if this_rank() == 0:
                LOGGER.info("profile: loading samples: some seconds, up to %.0f s from slow storage", LOADING_S)
            samples = built.job.batch_samples or batch_samples(batches[0])
            with joined(None, timeout_s) as world:
                found = replace(found, loading=measure_loading(built.job.dataset, samples, world))
        if found.compute.by_rank is None:
            found = with_batches(built, batches[0], found, progress, timeout_s)
        if updaters:
            found = measure_updaters(built, batches[0], found, updaters, progress, timeout_s)
        if request is not None and request.units:
            found = _with_units(built, step, found, progress, timeout_s)
        return found


def with_batches(
    built: BuiltJob, batch: Any, found: Profile, progress: Progress, timeout_s: float | None = None
) -> Profile:
    """Return the profile with the samples of its step, and times and memory of each rank by them, the same on all."""
    compute = found.compute
    if timeout_s is None:
        timeout_s = deadline_s(compute.step_us, compute.size_bytes)
    if this_rank() == 0:
        LOGGER.info("profile: steps of a whole and of half a batch, on each rank: some seconds")

    with joined(None, timeout_s) as world:
        bench, step = Bench(world, built.device, progress), built.forward_backward
        training = Training(built.model, partial(step, batch), built.optimizer)
        samples, by_rank = measure_batches(training, step, batch, built.job.batch_samples, compute.step_us, bench)
    if not samples:
        return found
    memory = min((rank.memory_bytes for rank in by_rank if rank.memory_bytes), default=found.world.memory_bytes)
    world_of = replace(found.world, batch_per_rank=samples, memory_bytes=memory)
    return replace(found, compute=replace(compute, by_rank=by_rank), world=world_of)


def _with_units(built: BuiltJob, step: Step, found: Profile, progress: Progress, timeout_s: float | None) -> Profile:
    """Return the profile with the modules that FSDP2 could gather together, and its messages, the same on all ranks.

    The plain model has to fit on one rank.
    """

    def from_zero(loss_ready: Callable[[], None]) -> None:
        built.model.zero_grad()
        step(loss_ready)

    compute, cluster = found.compute, found.cluster
    if timeout_s is None:
        timeout_s = deadline_s(compute.step_us, compute.size_bytes)
    with joined(None, timeout_s) as world:
        if this_rank() == 0:
            LOGGER.info("profile: modules that FSDP2 could gather together, and its messages: some seconds")
        with preserved(built.model):
            units = replace(measure_units(built.model, from_zero, world), update_us=compute.update_us)
        state_bytes = None if compute.optimizer is None else compute.optimizer.state_bytes
        if state_bytes is not None and compute.size_bytes:
            units = replace(units, state_factor=round(state_bytes / compute.size_bytes, 3))
        if cluster is not None and world.ranks > 1:
            names = (LIBRARY_GATHER, LIBRARY_SCATTER)
            bench = Bench(world, built.device, progress)
            times = measure_links(bench, compute.size_bytes, names, Limits(LIBRARY_S))
            cluster = replace(
                cluster, samples={**(cluster.samples or {}), **times.samples},
                notes=(*(cluster.notes or ()), *times.cut) or None,
            )  # fmt: skip
        agreed: Profile = world.gather(replace(found, units=units, cluster=cluster), "agreeing on the profile")[0]
        return agreed


def local_job(
    spec: str, device: str, lr_schedule: LrSchedule = CONSTANT, ranks: int = 1, blocks: bool = False, steps: int = 1
) -> LocalJob:
    """Return a job by its name, for a rank and for each of its updaters. Raises InputError as `build`."""
    built = build(spec, device)
    if len(each_of(built.optimizer)) > 1:
        raise InputError(f"{spec}: found several optimizers, expected one: local updaters take one alone")

    def make(_: Any) -> Optimizer:
        (optimizer,) = each_of(make_optimizer(built.job, spec))
        return optimizer

    schedule = None
    if lr_schedule != CONSTANT:
        schedule = partial(make_scheduler, scaled_by(lr_schedule, built, ranks, blocks=blocks), steps)
    return LocalJob(model=built.model, loss=built.loss, batch=built.batch_of, optimizer=make, schedule=schedule)


def scaled_by(lr_schedule: LrSchedule, built: BuiltJob, ranks: int, *, blocks: bool = False) -> LrSchedule:
    """Return the schedule scaled by the samples of rank 0's first batch, which are the same on all ranks."""
    if lr_schedule.scale_batch is None:
        return lr_schedule
    if built.share is not None:
        return lr_schedule.scaled(sum(built.share.shares.values()), 1, blocks=blocks)
    samples = built.job.batch_samples or batch_samples(built.batch_of(0, 0))
    return lr_schedule.scaled(samples, ranks, blocks=blocks)


def measure_updaters(
    built: BuiltJob, batch: Any, profile: Profile, most: int, progress: Progress, timeout_s: float | None = None
) -> Profile:
    """Return the profile with its section on local updaters, up to `most` of each rank; every rank calls it.

    Raises:
        InputError: the model's tensors cannot be shared.
    """
    step_us = profile.compute.forward_us + profile.compute.backward_us
    if this_rank() == 0:
        LOGGER.info("profile: up to %d local updaters of each rank: about %.0f s", most, expected_s(step_us, most))
    longest_s = max(TIMEOUT_S if timeout_s is None else timeout_s, REPEATED_STEPS * step_us / 1e6)
    with joined(None, longest_s) as world, preserved(built.model):
        section = measure_local_async(
            partial(local_job, built.spec, built.device.type),
            lambda: built.loss(built.model, batch),
            trainable_parameters(built.model),
            profile.compute,
            Bench(world, built.device, progress),
            most,
        )
    samples = profile.world.batch_per_rank or samples_of(batch) or None
    return replace(profile, local_async=section, world=replace(profile.world, batch_per_rank=samples))


def train_rank(
    spec: str,
    plan: Plan | None,
    course: Course,
    device: str,
    show_progress: bool,
    timeout_s: float | None = None,
) -> RankRun:
    """Train a job for some steps on this rank; plain DDP without a plan. `timeout_s` is that of `Trainer`."""
    if plan is not None and plan.local_async is not None:
        return train_rank_locally(spec, plan, course, device, timeout_s)
    steps, lr_schedule = course.steps, course.lr_schedule
    built = build(spec, device).sharing(None if plan is None else plan.first.shares)
    schedules = []
    if lr_schedule != CONSTANT:
        scaled = scaled_by(lr_schedule, built, dist.get_world_size() if dist.is_initialized() else 1)
        schedules = [make_scheduler(scaled, steps, one) for one in each_of(built.optimizer)]
    trainer = Trainer(built, plan, timeout_s)
    for step in Progress(show=show_progress and this_rank() == 0).track(range(steps), "training"):
        trainer.step(trainer.built.batch(step))
        for schedule in schedules:
            schedule.step()
    return trainer.close()


def train_rank_locally(spec: str, plan: Plan, course: Course, device: str, timeout_s: float | None = None) -> RankRun:
    """Train a job with local updaters on this rank: the steps are minibatches, over all of its updaters."""
    assert plan.local_async is not None
    blocks = plan.local_async.blocks is not None
    job = partial(local_job, spec, device, course.lr_schedule, plan.world.ranks, blocks, course.steps)
    run = run_local_async(job, plan, course.steps, timeout_s=timeout_s)
    if not run.losses:
        raise EnvironmentFailure(f"{spec}: no minibatch was done by an updater that is left:\n{run.report}")
    # Time of a minibatch of the rank at each update, over the last ones, as many as there are updaters: updates of
    # several updaters come in no even order, and over so many each has done about one.
    ends_s, count = run.ends_s, len(run.report.updaters)
    first_s = ends_s[-1] - run.report.seconds
    begins_s = [*[first_s] * count, *ends_s]
    step_us = [(end_s - begins_s[i]) / min(count, i + 1) * 1e6 for i, end_s in enumerate(ends_s)]
    return RankRun(
        step_us=tuple(step_us), losses=run.losses, weights_sha256=weights_sha256(run.model), report=str(run.report),
        emulation=emulation_here(),
    )  # fmt: skip
