"""`planner.replan`: a new plan while a run continues, from its own steps and links as they are now.

- Forward, update and readiness: from the last steps on all ranks, as `planner profile` combines them. Messages during
  them slowed them; if the old profile has the factor, that is subtracted again.
- The all-reduce is timed anew while training pauses. Rescaling the old curve by the times of buckets would mix up
  start-up time and bandwidth, and with one bucket nothing could separate them.
- Contention and the costs of selecting are the old profile's, if it is given: both are about the machines, and
  measuring them takes steps of its own.

Class, interface and compression of plans stay what they are: an exact plan is followed by an exact one, a drop-in one
by one that is drop-in, low rank by low rank. With a lossy plan, readiness as measured holds some of the time that
selecting took, so that the new plan's prediction is a little too long.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from planner.decide.defaults import DEFAULT_PASSES
from planner.decide.optimize import optimize
from planner.documents.estimate import scale_compute
from planner.documents.profile import (
    Cluster,
    ComputeProfile,
    Contention,
    OperatorProfile,
    Profile,
    ProfileWorld,
    Sample,
    load_profile,
)
from planner.model.codecs import BY_NAME
from planner.profile.bench import Bench, fit
from planner.profile.compute import RankTimes, busy_times_us, combine, gradient_of, rank_times
from planner.profile.links import Limits, measure_queued
from planner.profile.operator_times import operators_of_run
from planner.profile.step import decided_by_first, refuse_alike
from runtime.checks.modes import asked_modes
from runtime.errors import InputError
from runtime.monitor.drift import bucket_times, complete, measured_times, predicted_times
from runtime.plan import Plan, UpdatePlan
from runtime.plan.combinations import SHARED_OPERATOR, reason_against

if TYPE_CHECKING:
    from runtime.session.session import Session

MIN_STEPS, LAST_STEPS = 5, 20
"""Number of steps of the present plan that are needed, and of the last ones that are used, as the run has changed."""

LARGEST_BYTES = 16 * 1024 * 1024
"""Largest message that is timed; beyond it the curve continues as a line."""

LIMITS = Limits(longest_s=4.0, budget_s=1.0)
"""Bounds of timing the links."""

STRAGGLER_SHARE, MOST_STEPS = 0.05, 2 / 3
"""Share of a step, and of the steps, for which the others wait for a rank that is called a straggler."""

KEPT = (
    "contention", "sparsify", "unpack", "encode", "decode", "low_rank", "push_pack", "local_update", "pull_take",
    "measured_for",
)  # fmt: skip
"""Fields of the old profile's cluster that stay: they are about its machines."""


@dataclass(frozen=True)
class RankSteps:
    """The last steps of one rank."""

    problem: str | None
    step: int = 0
    times: RankTimes | None = None
    first_us: tuple[float, ...] = ()
    """Time of the first bucket on the link, by step: longer on ranks that came early."""
    step_us: float = 0.0
    compute_ratio: float | None = None
    """Forward and backward, measured over predicted."""
    network_ratio: float | None = None


def replan(
    session: Session,
    profile: Profile | str | Path | None = None,
    *,
    passes: str = DEFAULT_PASSES,
    allow: str | Sequence[str] | None = None,
    switch: bool = True,
    at_step: int | None = None,
) -> Plan:
    """Decide again, from fresh measurements, for a run whose steps are not what its plan predicts.

    Every rank calls this between the same two steps; training pauses for some seconds. Rank 0 decides.

    Args:
        session: attached, with some steps of the present plan done.
        profile: the profile that the plan was made from, or its path: for contention, the costs of selecting elements,
            and on CUDA, where only buckets are timed in training, readiness within them.
        passes: the pipeline, as for `optimize`.
        allow: interfaces that the new plan may have in addition to drop-in, as for `optimize`; default: those of the
            present plan, so that a drop-in run stays one.
        switch: switch to the plan, with `session.switch`.
        at_step: the first step with it; default: the next one.

    Returns:
        The plan, the same on every rank, with notes on what has changed. With one rank the present plan.

    Raises:
        InputError: on all ranks alike: too few steps, a profile of another model, ranks at different steps, a delay.
        CommunicationError: a rank did not come within the deadline.
    """
    session._pause("planner.replan")
    if session._world.ranks == 1:
        return session.plan
    if session.plan.delay is not None:
        raise InputError(
            "planner.replan: the run has a delay, which begins with a run and cannot be decided again in it; expected "
            "a plan without: profile again and attach anew, or session.switch to an exact plan"
        )
    if session.plan.outer is not None:
        raise InputError(
            "planner.replan: the run has outer steps, in which no gradients are exchanged and measured; expected a "
            "plan without: session.switch to an exact plan first, or profile again"
        )
    old, mine = _measure_rank(session, profile)
    everyone: list[RankSteps] = session._world.gather(mine, "comparing the last steps")
    refuse_alike([one.problem for one in everyone])
    steps = [one.step for one in everyone]
    if len(set(steps)) > 1:
        raise InputError(
            f"planner.replan: ranks have done different numbers of steps ({', '.join(map(str, steps[:8]))}); expected "
            f"one: call it between the same two steps on every rank"
        )
    size_bytes = min(LARGEST_BYTES, sum(p.numel() * p.element_size() for p in session._parameters.values()))
    with session._world.error_context("timing the all-reduce"):
        curves = measure_queued(Bench(session._world, session._device), "all_reduce", size_bytes, LIMITS)

    def decide() -> Plan:
        try:
            times = [one.times for one in everyone if one.times is not None]
            operator = operators_of_run(session) if old is None else old.compute.operator
            measured = profile_of_run(session, old, times, curves, operator)
            # Accuracy and interface of the run's plans: of the lossy one while it is tried against the exact one.
            trial = session._monitor.trial
            plan_of_run = session.plan if trial is None or trial.verdict is not None else trial.lossy
            allowed = plan_of_run.interfaces if allow is None else allow
            found = optimize(
                measured, passes=passes, accuracy=plan_of_run.accuracy, allow=allowed, from_step=plan_of_run.from_step,
                compress=compress_of(plan_of_run) if passes == DEFAULT_PASSES else None,
            )  # fmt: skip
            found = replace(found, notes=(*found.notes, *_findings(session, everyone)))
            return with_operators(found, plan_of_run)
        except Exception as error:  # the other ranks wait for the answer
            problem = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
            raise InputError(f"planner.replan: {problem}") from error

    plan = decided_by_first(session._world, decide, "waiting for rank 0's plan")
    if switch:
        session.switch(plan, at_step)
    return plan


def compress_of(plan: Plan) -> str | None:
    """Return what a plan does to buckets, as the option `compress` names it; None: nothing."""
    codecs = (BY_NAME.get(bucket.compressor.name) for bucket in plan.buckets)
    return ",".join(sorted({codec.option for codec in codecs if codec is not None})) or None


def with_operators(plan: Plan, present: Plan) -> Plan:
    """Return a plan that says nothing of the optimizer's step, and its fallback, with the owners of operators of the
    present one, if it has any: of what is not known nothing is changed.
    """
    operator = present.updates.operator if present.updates else None
    if operator is None or not operator.owners or plan.updates is not None:
        return plan
    if reason_against(asked_modes(plan)[0].name, SHARED_OPERATOR) is not None:
        return plan
    fallback = plan.fallback and with_operators(plan.fallback, present)
    return replace(plan, updates=UpdatePlan(operator=operator), fallback=fallback)


def _measure_rank(session: Session, profile: Profile | str | Path | None) -> tuple[Profile | None, RankSteps]:
    clock = session._recorder.clock
    try:
        old = profile if profile is None or isinstance(profile, Profile) else load_profile(profile)
        other = sorted({g.name for g in old.compute.gradients} ^ set(session.plan.gradients)) if old is not None else []
        if other:
            more = f" and {len(other) - 5} more" if len(other) > 5 else ""
            raise InputError(
                f"profile: $.compute.gradients: found a profile of another model: only one of profile and plan holds "
                f"{', '.join(other[:5])}{more}; expected the profile that the plan was made from"
            )
        steps = complete(session._recorder.steps, clock)[-LAST_STEPS:]
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
        times = without_contention(times, busy_times_us(steps, clock), contention)
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


def _ratio(measured: float, predicted: float) -> float | None:
    return measured / predicted if predicted > 0.0 and measured > 0.0 else None


def without_contention(
    times: RankTimes, busy_us: Sequence[Sequence[tuple[float, float]]], contention: Contention
) -> RankTimes:
    """Return times of some steps of one rank as if messages did not slow computation down.

    Args:
        times: of the steps.
        busy_us: begin and end of each message on the link, by step.
        contention: the factors.
    """
    lost = 1.0 - 1.0 / contention.compute

    def moved(column: Sequence[float]) -> list[float]:
        # Messages are sent one at a time. A time that is not a number stays one.
        busy_until = [
            sum(max(0.0, min(end, at) - start) for start, end in busy) for at, busy in zip(column, busy_us, strict=True)
        ]
        return [at - lost * shared for at, shared in zip(column, busy_until, strict=True)]

    return replace(
        times,
        ready_us={name: moved(column) for name, column in times.ready_us.items()},
        backward_end_us=moved(times.backward_end_us),
    )


def profile_of_run(
    session: Session,
    old: Profile | None,
    ranks: Sequence[RankTimes],
    curves: tuple[tuple[Sample, ...], tuple[Sample, ...]],
    operator: OperatorProfile | None,
) -> Profile:
    """Return the profile of the run as it is now.

    Args:
        session: attached.
        old: the profile that the plan was made from.
        ranks: all ranks' times.
        curves: of the all-reduce, alone and in a queue.
        operator: the operators of a matrix optimizer, where their times are known.
    """
    world, plan = session._world, session.plan
    nodes = plan.world.nodes if plan.world.nodes is not None and world.ranks % plan.world.nodes == 0 else world.ranks
    before = old.cluster if old is not None else None
    alone, queued = curves
    # Reduce-scatter and all-gather as they were profiled: the sharded step needs them.
    known = before.samples if before is not None and before.samples and before.ranks == world.ranks else {}
    halves = {name: curve for name, curve in known.items() if name in ("reduce_scatter", "all_gather")}
    cluster = Cluster(
        name="measured while training",
        nodes=nodes,
        ranks_per_node=world.ranks // nodes,
        samples={**halves, "all_reduce": alone},
        back_to_back={"all_reduce": queued},
        collectives={"all_reduce": fit(alone)},
        **{name: getattr(before, name) for name in KEPT if before is not None},
    )
    return Profile(
        model=plan.model,
        world=ProfileWorld(ranks=world.ranks, nodes=nodes, backend=world.backend, torch=torch.__version__),
        compute=_compute(session, old, ranks, operator),
        cluster=cluster,
    )


def _update_us(session: Session, old: Profile | None, operator: OperatorProfile | None, measured_us: float) -> float:
    """Return the time of the whole update: of a sharded step each rank has timed its part, and gathers of weights; of
    known operators with owners what those do not save.
    """
    if not session.plan.sharded:
        shared = None if operator is None else session._operators.report()
        if shared is None or shared.replicated_us is None or shared.predicted_us is None:
            return measured_us
        return round(measured_us + max(0.0, shared.replicated_us - shared.predicted_us), 3)
    if old is not None:
        return old.compute.update_us
    step = session.report().step
    return round(max(0.0, measured_us - (step.gather_us if step else 0.0)) * session._world.ranks, 3)


def _compute(
    session: Session, old: Profile | None, ranks: Sequence[RankTimes], operator: OperatorProfile | None
) -> ComputeProfile:
    """Return the step by the marks of every gradient, or the old one stretched to forward, backward and update."""
    if any(rank.ready_us for rank in ranks):
        planned = {name: session._parameters[name] for name in session.plan.gradients}
        seen = combine(ranks, planned)
        names = {gradient.name for gradient in seen.gradients}
        # Parameters that the last steps have not used close the last bucket, so that nothing waits for them.
        unseen = tuple(gradient_of(name, one, 0.0) for name, one in planned.items() if name not in names)
        return replace(
            seen,
            update_us=_update_us(session, old, operator, seen.update_us),
            gradients=(*seen.gradients, *unseen),
            optimizer=old.compute.optimizer if old else None,
            norms=old.compute.norms if old else None,
            operator=operator,
        )
    assert old is not None
    end_us = float(np.median(np.array([rank.backward_end_us for rank in ranks]).max(axis=0)))
    before_us = old.compute.forward_us + old.compute.backward_us
    updates = [time_us for rank in ranks for time_us in rank.update_us]
    stretched = scale_compute(old.compute, _ratio(end_us, before_us) or 1.0, 1.0)
    if not updates:
        return stretched
    return replace(stretched, update_us=_update_us(session, old, operator, round(statistics.median(updates), 3)))


def _findings(session: Session, everyone: Sequence[RankSteps]) -> list[str]:
    """Return the changes, in words, for the plan's notes."""
    notes = [f"planned again after {session.step} steps of a run"]
    compute = [(one.compute_ratio, rank) for rank, one in enumerate(everyone) if one.compute_ratio is not None]
    if compute:
        ratio, rank = max(compute)
        notes.append(f"forward and backward took {ratio:.2f} times as long as predicted, on rank {rank} the longest")
    network = [one.network_ratio for one in everyone if one.network_ratio is not None]
    if network:
        # The straggler waits for no other rank.
        notes.append(f"messages took {min(network):.2f} times as long as predicted, waiting for stragglers left out")
    straggler = find_straggler([one.first_us for one in everyone], statistics.median(one.step_us for one in everyone))
    if straggler is not None:
        rank, late_us = straggler
        notes.append(
            f"rank {rank} comes to the first message {late_us / 1e3:.1f} ms after the first rank; no plan mends that: "
            f"look at what this rank does besides, and at its machine"
        )
    return notes


def find_straggler(first_us: Sequence[Sequence[float]], step_us: float) -> tuple[int, float] | None:
    """Return (the rank that others wait for, the microseconds that the first of them waits), or None without one.

    Args:
        first_us: time of the first message by rank and step, which is the shortest on the straggler.
        step_us: time of a step.
    """
    count = min(map(len, first_us))
    if not count:
        return None
    times = np.array([rank[-count:] for rank in first_us])
    last = times.argmin(axis=0)
    rank = int(np.bincount(last).argmax())
    late_us = float(np.median(times.max(axis=0) - times.min(axis=0)))
    often = float(np.mean(last == rank)) >= MOST_STEPS
    return (rank, late_us) if often and late_us > STRAGGLER_SHARE * step_us else None
