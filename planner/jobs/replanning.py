"""`planner.replan`: a new plan for a run that goes on, from what its own steps and links are like now.

What is measured, and where it comes from:

- forward, update and the readiness of each gradient: the last steps of the run, on all ranks, as `planner profile`
  combines them. The messages beside them slowed them; where the old profile says by how much, that is taken off again.
- the all-reduce over sizes: timed anew while training pauses, some seconds. Rescaling the old curve by how long buckets
  took would mix up start-up time and bandwidth, and with one bucket nothing could tell them apart.
- how compute and network slow each other down, and what selecting elements costs: the old profile's, where it is given.
  Both are about the machines, and measuring them takes steps of its own.

Class and interface of plans stay what they are: an exact plan is followed by an exact one, a drop-in one by one that is
drop-in. With a lossy plan, readiness as measured holds some of the time that selecting took, so that the new plan's
prediction is a little too long.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from planner.decide.optimize import DEFAULT_PASSES, optimize
from planner.documents.profile import (
    Cluster,
    ComputeProfile,
    Contention,
    Gradient,
    Profile,
    ProfileWorld,
    Sample,
    load_profile,
)
from planner.model.what_if import scale_compute
from planner.profile.compute import RankTimes, combine_parameters, rank_times
from planner.profile.links import fit, measure_all_reduce
from planner.profile.progress import Silent
from runtime.checks.plan import dtype_name
from runtime.errors import InputError
from runtime.monitor.drift import bucket_times, complete, measured_times, predicted_times
from runtime.plan import Plan
from runtime.plan.names import layer_of

if TYPE_CHECKING:
    from runtime.monitor.clock import Clock
    from runtime.monitor.recorder import StepMarks
    from runtime.session.session import Session

MIN_STEPS, LAST_STEPS = 5, 20
"""Steps of the present plan that are needed, and that are used: the last ones, for the run has changed."""

LARGEST_BYTES = 16 * 1024 * 1024
"""Largest message that is timed; beyond it the curve goes on as a line."""

BUDGET_S = 1.0
"""What timing the links may take, once they have been timed often enough."""

LATE_SHARE = 0.05
"""A rank counts as late when the others wait for it longer than this share of a step."""

MOST_STEPS = 2 / 3
"""… and in this share of the steps."""


@dataclass(frozen=True)
class RankSteps:
    """What one rank tells the others about its last steps."""

    problem: str | None
    step: int = 0
    times: RankTimes | None = None
    first_us: tuple[float, ...] = ()
    """By step, how long the first bucket was on the link: longer on ranks that came early."""
    step_us: float = 0.0
    compute_ratio: float | None = None
    """Forward and backward, measured over predicted."""
    network_ratio: float | None = None


def replan(
    session: Session,
    profile: Profile | str | Path | None = None,
    *,
    passes: str = DEFAULT_PASSES,
    allow: Sequence[str] | None = None,
    switch: bool = True,
    at_step: int | None = None,
) -> Plan:
    """Decides again, from fresh measurements, for a run whose steps are not what its plan predicts.

    Every rank calls this between the same two steps; training pauses for some seconds. Rank 0 decides.

    Args:
        session: attached, with some steps of the present plan done.
        profile: the profile that the plan was made from, or its path: says how compute and network slow each other
            down, what selecting elements costs, and on CUDA, where only buckets are timed in training, how readiness is
            spread within them.
        passes: the pipeline, as for `optimize`.
        allow: interfaces that the new plan may have beside drop-in, as for `optimize`; default: those of the present
            plan, so that a drop-in run stays one.
        switch: change over to the plan, with `session.switch`.
        at_step: the first step with it; default: the next one.

    Returns:
        The plan, the same on every rank; its notes say what has changed. With one rank the plan that there is.

    Raises:
        InputError: on all ranks alike: too few steps, a profile of another model, ranks at different steps, a delay.
        CommunicationError: a rank did not come within the deadline.
    """
    session.pause("planner.replan")
    if session.world.ranks == 1:
        return session.plan
    if session.plan.delay is not None:
        raise InputError(
            "planner.replan: the run has a delay, which begins with a run and cannot be decided again in it; expected "
            "a plan without: profile again and attach anew, or session.switch to an exact plan"
        )
    old, mine = _measure_rank(session, profile)
    everyone: list[RankSteps] = session.world.gather(mine, "comparing the last steps")
    # The same verdict on all ranks.
    problems = [f"rank {rank}: {one.problem}" for rank, one in enumerate(everyone) if one.problem]
    if problems:
        alike = len({one.problem for one in everyone}) == 1
        raise InputError(f"planner.replan: {everyone[0].problem}" if alike else "\n".join(problems))
    steps = [one.step for one in everyone]
    if len(set(steps)) > 1:
        raise InputError(
            f"planner.replan: ranks have done different numbers of steps ({', '.join(map(str, steps[:8]))}); expected "
            f"one: call it between the same two steps on every rank"
        )
    device = next(iter(session.parameters.values())).device
    size_bytes = sum(p.numel() * p.element_size() for p in session.parameters.values())
    with session.world.naming("timing the all-reduce"):
        curves = measure_all_reduce(session.world, device, min(size_bytes, LARGEST_BYTES), Silent(), BUDGET_S)
    plan = _decide_on_first(session, old, everyone, curves, passes, allow)
    if switch:
        session.switch(plan, at_step)
    return plan


def _measure_rank(session: Session, profile: Profile | str | Path | None) -> tuple[Profile | None, RankSteps]:
    clock = session.recorder.clock
    try:
        old = profile if profile is None or isinstance(profile, Profile) else load_profile(profile)
        if old is not None:
            _check_profile(old, session)
        steps = complete(session.recorder.steps, clock)[-LAST_STEPS:]
        if len(steps) < MIN_STEPS:
            raise InputError(
                f"found {len(steps)} steps of the present plan that are recorded from forward to the end of backward, "
                f"expected at least {MIN_STEPS}: train on, and call planner.replan then"
            )
    except InputError as error:
        return None, RankSteps(str(error))
    contention = old.cluster.contention if old is not None and old.cluster is not None else None
    times = rank_times(steps, session.plan.gradients, clock)
    if contention is not None and contention.compute > 1.0:
        times = without_contention(times, [_busy(step, clock) for step in steps], contention)
    if not times.ready_us and old is None:
        return None, RankSteps("on this device only buckets are timed in training; expected the plan's profile too: "
                               "call planner.replan(session, profile)")  # fmt: skip
    measured, predicted = measured_times(steps, clock), predicted_times(session.plan)
    return old, RankSteps(
        problem=None,
        step=session.step,
        times=times,
        first_us=tuple(durations[0] for step in steps if (durations := bucket_times(step, clock))),
        step_us=measured.step_us,
        compute_ratio=_ratio(measured.compute_us, predicted.compute_us if predicted else 0.0),
        network_ratio=_ratio(sum(measured.buckets_us), sum(predicted.buckets_us) if predicted else 0.0),
    )


def _check_profile(profile: Profile, session: Session) -> None:
    theirs, ours = {gradient.name for gradient in profile.compute.gradients}, set(session.plan.gradients)
    if theirs != ours:
        other = sorted(theirs ^ ours)
        more = f" and {len(other) - 5} more" if len(other) > 5 else ""
        raise InputError(
            f"profile: $.compute.gradients: found a profile of another model: only one of profile and plan holds "
            f"{', '.join(other[:5])}{more}; expected the profile that the plan was made from"
        )


def _ratio(measured: float, predicted: float) -> float | None:
    return measured / predicted if predicted > 0.0 and measured > 0.0 else None


def _busy(step: StepMarks, clock: Clock) -> list[tuple[float, float]]:
    """When messages were on the link, in microseconds from the start of forward."""
    sent = [one for one in step.sent if one.start is not None and one.end is not None]
    return [(clock.between_us(step.forward, one.start), clock.between_us(step.forward, one.end)) for one in sent]


def without_contention(
    times: RankTimes, busy_us: Sequence[Sequence[tuple[float, float]]], contention: Contention
) -> RankTimes:
    """The times as they were if messages did not slow computation down.

    Args:
        times: of some steps of one rank, with messages beside them.
        busy_us: by step, when messages were on the link.
        contention: its factor of computation says by how much they slow it.
    """
    lost = 1.0 - 1.0 / contention.compute

    def moved(column: Sequence[float]) -> list[float]:
        return [at - lost * _overlap(busy, at) for at, busy in zip(column, busy_us, strict=True)]

    return replace(
        times,
        ready_us={name: moved(column) for name, column in times.ready_us.items()},
        backward_end_us=moved(times.backward_end_us),
    )


def _overlap(busy: Sequence[tuple[float, float]], until: float) -> float:
    """How long the link was busy by then; messages travel one at a time. Not a number stays one."""
    if np.isnan(until):
        return until
    return sum(max(0.0, min(end, until) - start) for start, end in busy)


def _decide_on_first(
    session: Session,
    old: Profile | None,
    everyone: Sequence[RankSteps],
    curves: tuple[tuple[Sample, ...], tuple[Sample, ...]],
    passes: str,
    allow: Sequence[str] | None,
) -> Plan:
    """Rank 0's plan, or its error, on all ranks."""
    plan, problem = None, None
    if session.world.rank == 0:
        try:
            profile = _profile(session, old, everyone, curves)
            # Accuracy and interface of the run's plans: of the lossy one while it is tried against the exact one.
            trial = session.trial
            plan_of_run = session.plan if trial is None or trial.verdict is not None else trial.lossy
            allowed = plan_of_run.interfaces if allow is None else allow
            found = optimize(profile, passes=passes, accuracy=plan_of_run.accuracy, allow=allowed)
            plan = replace(found, notes=(*found.notes, *_findings(session, everyone)))
        except Exception as error:  # the other ranks wait for the answer
            problem = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    decided: tuple[Plan | None, str | None] = session.world.gather((plan, problem), "waiting for rank 0's plan")[0]
    if decided[0] is None:
        raise InputError(f"planner.replan: {decided[1]}")
    return decided[0]


def _profile(
    session: Session,
    old: Profile | None,
    everyone: Sequence[RankSteps],
    curves: tuple[tuple[Sample, ...], tuple[Sample, ...]],
) -> Profile:
    """What `planner profile` would say now."""
    world, plan = session.world, session.plan
    nodes = plan.world.nodes if plan.world.nodes is not None and world.ranks % plan.world.nodes == 0 else world.ranks
    before = old.cluster if old is not None else None
    alone, queued = curves
    # What a reduce-scatter and an all-gather took when the ranks were profiled: a shared step asks for it.
    known = before.samples if before is not None and before.samples and before.ranks == world.ranks else {}
    cluster = Cluster(
        name="measured while training",
        nodes=nodes,
        ranks_per_node=world.ranks // nodes,
        samples={
            **{name: known[name] for name in ("reduce_scatter", "all_gather") if name in known},
            "all_reduce": alone,
        },
        back_to_back={"all_reduce": queued},
        collectives={"all_reduce": fit(alone)},
        contention=before.contention if before is not None else None,
        sparsify=before.sparsify if before is not None else None,
        unpack=before.unpack if before is not None else None,
        push_pack=before.push_pack if before is not None else None,
        local_update=before.local_update if before is not None else None,
        pull_take=before.pull_take if before is not None else None,
        measured_for=before.measured_for if before is not None else None,
    )
    return Profile(
        model=plan.model,
        world=ProfileWorld(ranks=world.ranks, nodes=nodes, backend=world.backend, torch=torch.__version__),
        compute=_compute(session, old, [one.times for one in everyone if one.times is not None]),
        cluster=cluster,
    )


def _update_us(session: Session, old: Profile | None, measured_us: float) -> float:
    """What the whole update takes: of a shared step each rank has measured its part, and the gathers of weights."""
    if not session.plan.sharded:
        return measured_us
    if old is not None:
        return old.compute.update_us
    step = session.report().step
    return round(max(0.0, measured_us - (step.gather_us if step else 0.0)) * session.world.ranks, 3)


def _compute(session: Session, old: Profile | None, ranks: Sequence[RankTimes]) -> ComputeProfile:
    """From the marks of every gradient, or the old profile stretched to the times of forward, backward and update."""
    if any(rank.ready_us for rank in ranks):
        planned = {name: session.parameters[name] for name in session.plan.gradients}
        seen = combine_parameters(ranks, planned)
        names = {gradient.name for gradient in seen.gradients}
        # What no step of late has used closes the last bucket, so that nothing waits for it.
        unseen = tuple(
            Gradient(name=name, layer=layer_of(name), numel=p.numel(), dtype=dtype_name(p.dtype), backward_us=0.0)
            for name, p in planned.items()
            if name not in names
        )
        return replace(
            seen,
            update_us=_update_us(session, old, seen.update_us),
            gradients=(*seen.gradients, *unseen),
            optimizer=old.compute.optimizer if old else None,
            norms=old.compute.norms if old else None,
        )
    assert old is not None
    end_us = float(np.median(np.array([rank.backward_end_us for rank in ranks]).max(axis=0)))
    before_us = old.compute.forward_us + sum(gradient.backward_us for gradient in old.compute.gradients)
    updates = [time_us for rank in ranks for time_us in rank.update_us]
    stretched = scale_compute(old.compute, _ratio(end_us, before_us) or 1.0, 1.0)
    if not updates:
        return stretched
    return replace(stretched, update_us=_update_us(session, old, round(statistics.median(updates), 3)))


def _findings(session: Session, everyone: Sequence[RankSteps]) -> list[str]:
    """What has changed, in words, for the plan's notes."""
    notes = [f"planned again after {session.step} steps of a run"]
    compute = [(one.compute_ratio, rank) for rank, one in enumerate(everyone) if one.compute_ratio is not None]
    if compute:
        ratio, rank = max(compute)
        notes.append(f"forward and backward took {ratio:.2f} times as long as predicted, on rank {rank} the longest")
    network = [one.network_ratio for one in everyone if one.network_ratio is not None]
    if network:
        # The rank that comes last waits for nobody.
        notes.append(f"messages took {min(network):.2f} times as long as predicted, waiting for late ranks left out")
    late = find_late_rank([one.first_us for one in everyone], statistics.median(one.step_us for one in everyone))
    if late is not None:
        rank, late_us = late
        notes.append(
            f"rank {rank} comes to the first message {late_us / 1e3:.1f} ms after the first rank; no plan mends that: "
            f"look at what this rank does besides, and at its machine"
        )
    return notes


def find_late_rank(first_us: Sequence[Sequence[float]], step_us: float) -> tuple[int, float] | None:
    """(the rank that the others wait for, how long the first of them waits), or None where there is no such rank.

    Args:
        first_us: by rank and step, how long the first message took on that rank; the late rank's is the shortest.
        step_us: a step, to compare with.
    """
    count = min(map(len, first_us))
    if not count:
        return None
    times = np.array([rank[-count:] for rank in first_us])
    last = times.argmin(axis=0)
    rank = int(np.bincount(last).argmax())
    late_us = float(np.median(times.max(axis=0) - times.min(axis=0)))
    often = float(np.mean(last == rank)) >= MOST_STEPS
    return (rank, late_us) if often and late_us > LATE_SHARE * step_us else None
