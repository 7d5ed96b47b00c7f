"""Timelines small enough to keep and to draw: where there are too many tasks, neighbours of a kind become one bar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from planner.ir import Schedule
from planner.model.problem import Problem
from runtime.plan.predicted import PredictedTask, Prediction

MAX_BARS = 500
"""Bars per resource: a page a thousand pixels wide shows no more."""

COMPUTE = "compute"


def kind_of(task: PredictedTask) -> str:
    """Return the kind of a task, without its bucket: `forward`, `all_reduce`, …"""
    words = task.task.split()
    if task.bucket is not None and len(words) > 2 and words[0].startswith("bucket"):
        return words[2]
    return words[0] if words else ""


def baseline_prediction(problem: Problem, schedule: Schedule, prediction: Prediction) -> Prediction:
    """Return a baseline's prediction with a timeline that has the contents of each message, at most `MAX_BARS` bars a
    resource.
    """
    tasks = []
    for task in prediction.timeline or ():
        if task.bucket is not None:
            members = sorted(schedule.buckets[task.bucket].gradients)
            task = replace(
                task,
                gradients=len(members),
                first_gradient=members[0] if members[-1] - members[0] + 1 == len(members) else None,
                size_bytes=int(problem.size_bytes[members].sum()),
            )
        tasks.append(task)
    return replace(prediction, timeline=join_neighbours(tasks))


def join_neighbours(tasks: Iterable[PredictedTask], limit: int = MAX_BARS) -> tuple[PredictedTask, ...]:
    """Return about `limit` bars per resource at most: those with the shortest gaps are joined, kind by kind.

    Neighbours of different kinds stay apart, so a resource that alternates between kinds may keep more.
    """
    rows: dict[str, list[PredictedTask]] = {}
    for task in tasks:
        rows.setdefault(task.resource, []).append(task)
    bars = [bar for row in rows.values() for bar in _join_row(sorted(row, key=lambda task: task.start_us), limit)]
    return tuple(sorted(bars, key=lambda bar: (bar.start_us, bar.end_us)))


def _join_row(row: Sequence[PredictedTask], limit: int) -> list[PredictedTask]:
    surplus = len(row) - limit
    if surplus <= 0:
        return list(row)
    alike = [place for place in range(1, len(row)) if kind_of(row[place]) == kind_of(row[place - 1])]
    # What is joined spans the gap too: the least total length first, so that what is joined stays short.
    alike.sort(key=lambda place: (row[place].end_us - row[place - 1].start_us, place))
    joined = set(alike[:surplus])
    groups: list[list[PredictedTask]] = []
    for place, task in enumerate(row):
        if place in joined:
            groups[-1].append(task)
        else:
            groups.append([task])
    return [_join(group) for group in groups]


def _join(group: Sequence[PredictedTask]) -> PredictedTask:
    first, last = group[0], group[-1]
    if len(group) == 1:
        return first
    buckets = [task.bucket for task in group if task.bucket is not None]
    name = f"buckets {min(buckets)}-{max(buckets)} {kind_of(first)}" if buckets else f"{first.task} … {last.task}"
    return replace(
        first, task=name, end_us=max(task.end_us for task in group), tasks=sum(task.tasks or 1 for task in group),
        critical=True if any(task.critical for task in group) else None, step=None, first_gradient=_first(group),
        gradients=_sum([task.gradients for task in group]), size_bytes=_sum([task.size_bytes for task in group]),
    )  # fmt: skip


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _first(group: Sequence[PredictedTask]) -> int | None:
    """Return the first gradient of a group whose gradients follow one another, else None."""
    following = None
    for task in group:
        if task.first_gradient is None or task.gradients is None or following not in (None, task.first_gradient):
            return None
        following = task.first_gradient + task.gradients
    return group[0].first_gradient
