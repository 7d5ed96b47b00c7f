"""`planner run` with a plan that has local updaters, and measuring them: the job as the runtime's updaters need it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from planner.documents.profile import Profile
from planner.jobs.training import BuiltJob, RankRun, build, this_rank, weights_sha256
from planner.profile.bench import Bench
from planner.profile.progress import Progress
from planner.profile.request import LOGGER
from planner.profile.step import TIMEOUT_S, joined
from planner.profile.updaters import expected_s, measure_local_async
from planner.testbed.hosts import emulation_here
from runtime.checks.plan import trainable_parameters
from runtime.errors import EnvironmentFailure
from runtime.local_async import LocalJob, run_local_async
from runtime.local_async.job import samples_of
from runtime.monitor.preserve import preserved
from runtime.plan import Plan


def local_job(spec: str, device: str) -> LocalJob:
    """Return a job by its name, for a rank and for each of its updaters. Raises InputError."""
    built = build(spec, device)
    return LocalJob(model=built.model, loss=built.loss, batch=built.batch_of, optimizer=built.job.optimizer)


def measure_updaters(
    built: BuiltJob, batch: Any, profile: Profile, most: int, progress: Progress, timeout_s: float | None = None
) -> Profile:
    """Return the profile with its section on local updaters, up to so many of each rank; every rank calls it.

    Raises InputError where the model's tensors cannot be shared.
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
    samples = samples_of(batch) or None
    return replace(profile, local_async=section, world=replace(profile.world, batch_per_rank=samples))


REPEATED_STEPS = 200
"""A rank may be so many steps ahead of another one while both measure."""


def train_rank_locally(spec: str, plan: Plan, steps: int, device: str, timeout_s: float | None = None) -> RankRun:
    """Train a job with local updaters on this rank: `steps` minibatches, over all of its updaters."""
    run = run_local_async(partial(local_job, spec, device), plan, steps, timeout_s=timeout_s)
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
