"""What is drawn: one track for the plan, one for a measured step, one for each baseline; bars on resources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.emit.timelines import join_neighbours, kind_of
from planner.report.tables import plan_kind
from runtime.plan import Plan
from runtime.plan.measured import MeasuredStep
from runtime.plan.predicted import PredictedTask, Prediction
from runtime.plan.timeline import computes

ROLES = ("forward", "backward", "update", "compute", "message")
"""What a bar is drawn as; `compute` is everything else on that resource."""

MEASURED = "measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One task, or several neighbouring ones, with what is known of them."""

    task: str
    resource: str
    role: str
    start_us: float
    end_us: float
    ready_us: float | None
    tasks: int
    bucket: int | None
    gradients: int | None
    first_name: str | None
    last_name: str | None
    size_bytes: int | None

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us

    @property
    def wait_us(self) -> float | None:
        """How long a ready bucket waits for the link."""
        return None if self.ready_us is None else max(0.0, self.start_us - self.ready_us)


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
    """The plan, then the measured step, then the baselines from fast to slow; only those with a timeline."""
    tracks = []
    if plan.predicted is not None and plan.predicted.timeline:
        tracks.append(_predicted(plan_kind(plan), plan, plan.predicted, own=True))
    if measured is not None:
        tracks.append(measured_track(plan, measured))
    for name, prediction in sorted((plan.baselines or {}).items(), key=lambda item: item[1].iteration_us):
        if prediction.timeline:
            tracks.append(_predicted(name, plan, prediction, own=False))
    return tracks


def measured_track(plan: Plan, measured: MeasuredStep) -> Track:
    """A step as a session measured it."""
    tasks = [
        PredictedTask(
            task=task.task,
            resource=task.resource,
            start_us=task.start_us,
            end_us=task.end_us,
            bucket=task.bucket,
            ready_us=task.ready_us,
        )
        for task in measured.timeline
    ]
    return Track(
        name=MEASURED,
        iteration_us=measured.iteration_us,
        exposed_us=measured.exposed_us,
        buckets=len(plan.buckets),
        bars=_bars(plan, _members(plan, tasks)),
    )


def _predicted(name: str, plan: Plan, prediction: Prediction, *, own: bool) -> Track:
    tasks = prediction.timeline or ()
    return Track(
        name=name,
        iteration_us=prediction.iteration_us,
        exposed_us=prediction.exposed_us,
        buckets=len(plan.buckets) if own else prediction.buckets,
        bars=_bars(plan, _members(plan, tasks) if own else tasks),
    )


def _members(plan: Plan, tasks: Sequence[PredictedTask]) -> list[PredictedTask]:
    """Tasks of the plan's own buckets, with what is in them; tasks without `bucket` are taken in launch order."""
    firsts, total = [], 0
    for bucket in plan.buckets:
        firsts.append(total)
        total += len(bucket.gradients)
    known, place = [], 0
    for task in tasks:
        index = task.bucket
        if index is None and not computes(task.resource):
            index, place = place, place + 1
        known.append(task if index is None or index >= len(plan.buckets) else _filled(plan, task, index, firsts[index]))
    return known


def _filled(plan: Plan, task: PredictedTask, index: int, first: int) -> PredictedTask:
    bucket = plan.buckets[index]
    return PredictedTask(
        task=task.task,
        resource=task.resource,
        start_us=task.start_us,
        end_us=task.end_us,
        bucket=index,
        ready_us=task.ready_us,
        gradients=len(bucket.gradients),
        first_gradient=first,
        size_bytes=bucket.size_bytes,
    )


def _bars(plan: Plan, tasks: Iterable[PredictedTask]) -> tuple[Bar, ...]:
    names = plan.gradients
    return tuple(_bar(task, names) for task in join_neighbours(tasks) if task.end_us > task.start_us)


def _bar(task: PredictedTask, names: Sequence[str]) -> Bar:
    first, count = task.first_gradient, task.gradients
    members = names[first : first + count] if first is not None and count is not None else ()
    return Bar(
        task=task.task,
        resource=task.resource,
        role=_role(task),
        start_us=task.start_us,
        end_us=task.end_us,
        ready_us=task.ready_us,
        tasks=task.tasks or 1,
        bucket=task.bucket,
        gradients=count,
        first_name=members[0] if members else None,
        last_name=members[-1] if members else None,
        size_bytes=task.size_bytes,
    )


def _role(task: PredictedTask) -> str:
    if not computes(task.resource):
        return "message"
    kind = kind_of(task)
    return kind if kind in ROLES else "compute"
