"""What every rank does for `planner profile --parallel fsdp2`: the usual profile, modules, the library's messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.cost.halves import LIBRARY_GATHER, LIBRARY_SCATTER
from planner.documents.profile import Profile
from planner.jobs.training import KEPT_BATCHES, build, error_context, profile_rank, this_rank
from planner.profile.links import measure_links
from planner.profile.progress import Progress
from planner.profile.request import LOGGER, Request, heard
from planner.profile.step import deadline_s, joined
from planner.profile.units import measure_units
from runtime.monitor.preserve import preserved

LONGEST_S = 8.0
"""For the curve of each of the two collectives."""


def profile_rank_fsdp2(
    spec: str, device: str, show_progress: bool, timeout_s: float | None = None, request: Request | None = None
) -> Profile:
    """Profile a job by its name on this rank, and what FSDP2 could gather together; every rank gets the same profile.

    The plain model has to fit on one rank. Raises InputError where no module computes once in a step.
    """
    found = profile_rank(spec, device, show_progress, timeout_s, request=request)
    built = build(spec, device)
    batches = [built.batch(step) for step in range(KEPT_BATCHES)]
    turn = 0

    def step(loss_ready: Callable[[], None]) -> None:
        nonlocal turn
        turn += 1
        built.model.zero_grad()
        loss = built.loss(built.model, batches[turn % KEPT_BATCHES])
        loss_ready()
        built.backward(loss)

    if timeout_s is None:
        timeout_s = deadline_s(found.compute.step_us, found.compute.size_bytes)
    progress = Progress(show=show_progress and this_rank() == 0)
    with error_context(spec), heard(), joined(None, timeout_s) as world:
        if this_rank() == 0:
            LOGGER.info("profile: modules that FSDP2 could gather together, and its messages: some seconds")
        with preserved(built.model):
            units = measure_units(built.model, step, None, world, update_us=found.compute.update_us)
        optimizer, size_bytes = found.compute.optimizer, found.compute.size_bytes
        if optimizer is not None and optimizer.state_bytes is not None and size_bytes:
            units = replace(units, state_factor=round(optimizer.state_bytes / size_bytes, 3))
        cluster = found.cluster
        if cluster is not None and world.ranks > 1:
            names = (LIBRARY_GATHER, LIBRARY_SCATTER)
            times = measure_links(world, built.device, found.compute.size_bytes, progress, names, LONGEST_S)
            cluster = replace(
                cluster, samples={**(cluster.samples or {}), **times.samples},
                notes=(*(cluster.notes or ()), *times.cut) or None,
            )  # fmt: skip
        agreed: Profile = world.gather(replace(found, units=units, cluster=cluster), "agreeing on the profile")[0]
        return agreed
