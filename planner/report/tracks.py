"""Tracks to draw: one for the plan, one for a measured step, one for each baseline; bars on resources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.emit.timelines import join_neighbours, kind_of
from planner.report.tables import plan_kind
from runtime.plan import Plan
from runtime.plan.measured import MeasuredStep
from runtime.plan.predicted import PredictedTask, Prediction
from runtime.plan.timeline import computes

ROLES = ("forward", "backward", "update", "compute", "message")
"""Roles of bars; `compute` is everything else on that resource."""

MEASURED = "measured"


@dataclass(frozen=True, kw_only=True)
class Bar(PredictedTask):
    """One task, or several neighbouring ones, and how it is drawn."""

    role: str
    first_name: str | None
    """The first and the last of its gradients."""
    last_name: str | None


@dataclass(frozen=True, kw_only=True)
class Track:
    """One step of one schedule, predicted or measured."""

    name: str
    iteration_us: float
    exposed_us: float | None
    buckets: int | None
    bars: tuple[Bar, ...]

    @property
    def resources(self) -> tuple[str, ...]:
        """Compute first, then the links as they are first used."""
        used = dict.fromkeys(bar.resource for bar in self.bars)
        return tuple(sorted(used, key=lambda resource: not computes(resource)))


def plan_tracks(plan: Plan, measured: MeasuredStep | None) -> list[Track]:
    """Return the plan, then the measured step, then the baselines from fast to slow; only those with a timeline."""
    tracks: list[Track] = []

    def add(name: str, step: Prediction | MeasuredStep, buckets: int | None, tasks: Sequence[PredictedTask]) -> None:
        bars = _bars(plan, tasks)
        track = Track(name=name, iteration_us=step.iteration_us, exposed_us=step.exposed_us, buckets=buckets, bars=bars)
        tracks.append(track)

    if plan.predicted is not None and plan.predicted.timeline:
        add(plan_kind(plan), plan.predicted, len(plan.buckets), _with_gradients(plan, plan.predicted.timeline))
    if measured is not None:
        tasks = [PredictedTask(**vars(task)) for task in measured.timeline]
        add(MEASURED, measured, len(plan.buckets), _with_gradients(plan, tasks))
    for name, baseline in sorted((plan.baselines or {}).items(), key=lambda item: item[1].iteration_us):
        if baseline.timeline:
            add(name, baseline, baseline.buckets, baseline.timeline)
    return tracks


def _with_gradients(plan: Plan, tasks: Sequence[PredictedTask]) -> list[PredictedTask]:
    """Return the tasks with the gradients of their buckets; tasks without `bucket` are in launch order."""
    firsts, total = [], 0
    for bucket in plan.buckets:
        firsts.append(total)
        total += len(bucket.gradients)
    known, place = [], 0
    for task in tasks:
        index = task.bucket
        if index is None and not computes(task.resource):
            index, place = place, place + 1
        if index is not None and index < len(plan.buckets) and task.gradients is None:
            bucket = plan.buckets[index]
            task = replace(
                task,
                bucket=index,
                tasks=None,
                gradients=len(bucket.gradients),
                first_gradient=firsts[index],
                size_bytes=bucket.size_bytes,
            )
        known.append(task)
    return known


def _bars(plan: Plan, tasks: Sequence[PredictedTask]) -> tuple[Bar, ...]:
    """Return the tasks that take time, joined where they are too many to be drawn."""
    names, bars = plan.gradients, []
    for task in join_neighbours(tasks):
        if task.end_us <= task.start_us:
            continue
        first, kind = task.first_gradient, kind_of(task)
        members = names[first : first + task.gradients] if first is not None and task.gradients is not None else ()
        role = "message" if not computes(task.resource) else kind if kind in ROLES else "compute"
        first_name, last_name = (members[0], members[-1]) if members else (None, None)
        bars.append(Bar(**vars(task), role=role, first_name=first_name, last_name=last_name))
    return tuple(bars)
