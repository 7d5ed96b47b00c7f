"""A plan as Chrome trace events, which Perfetto and chrome://tracing open.

Processes: the predicted step, and a measured one where there is one. Threads: one per resource. Every task is a
complete event (`"ph": "X"`, microseconds); all are sorted by start. The trace holds every task, none are joined.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from planner.documents.text import first_part, pluralize
from runtime.plan import Plan
from runtime.plan.measured import MeasuredStep, MeasuredTask
from runtime.plan.predicted import PredictedTask
from runtime.plan.timeline import computes
from runtime.version import __version__

Event = dict[str, Any]

DIGITS = 3
"""Times are rounded to nanoseconds, so that tasks that touch do not overlap by an error of rounding."""


Task = PredictedTask | MeasuredTask


def trace_document(plan: Plan, measured: MeasuredStep | None = None) -> dict[str, Any]:
    """Return the trace as plain JSON types."""
    processes: list[tuple[str, str, Sequence[Task]]] = []
    cluster = (plan.sources or {}).get("cluster")
    ranks = f"{plan.model.name}, {pluralize(plan.world.ranks, 'rank')}" + (
        f", {first_part(cluster)}" if cluster else ""
    )
    predicted = plan.predicted.timeline if plan.predicted else None
    if predicted:
        processes.append(("predicted", ranks, predicted))
    if measured is not None:
        where = f"{ranks}, rank {measured.rank}, mean of the middle half of {pluralize(measured.steps, 'step')}"
        processes.append(("measured", where, measured.timeline))
    metadata: list[Event] = []
    complete: list[Event] = []
    for pid, (name, label, tasks) in enumerate(processes, start=1):
        process = {"process_name": {"name": name}, "process_labels": {"labels": label}}
        metadata += _metadata(pid, 0, process | {"process_sort_index": {"sort_index": pid}})
        for tid, (lane, members) in enumerate(_lanes(tasks), start=1):
            metadata += _metadata(pid, tid, {"thread_name": {"name": lane}, "thread_sort_index": {"sort_index": tid}})
            complete += [{**_event(plan, task), "pid": pid, "tid": tid} for task in members]
    complete.sort(key=lambda event: (event["ts"], event["pid"], event["tid"]))
    about = {"model": plan.model.name, "ranks": str(plan.world.ranks), "planner": __version__}
    return {
        "traceEvents": [*metadata, *complete],
        "displayTimeUnit": "ms",
        "otherData": {**about, **(plan.sources or {})},
    }


def _metadata(pid: int, tid: int, said: Mapping[str, Event]) -> list[Event]:
    return [
        {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": arguments}
        for what, arguments in said.items()
    ]


def trace_text(plan: Plan, measured: MeasuredStep | None = None) -> str:
    """Return the text of the trace file, one event a line."""
    document = trace_document(plan, measured)
    events = ",\n".join(_json(event) for event in document.pop("traceEvents"))
    return f'{{"traceEvents": [\n{events}\n],\n{_json(document)[1:]}\n'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _lanes(tasks: Sequence[Task]) -> list[tuple[str, list[Task]]]:
    """Return (thread, tasks) per resource, compute first; tasks of a resource that overlap have a thread more.

    Events of one thread have to follow one another or lie inside each other.
    """
    resources = dict.fromkeys(task.resource for task in tasks)
    named = []
    for resource in sorted(resources, key=lambda name: not computes(name)):
        lanes: list[list[Task]] = []
        for task in sorted((t for t in tasks if t.resource == resource), key=lambda t: (t.start_us, t.end_us)):
            free = (lane for lane in lanes if round(lane[-1].end_us, DIGITS) <= round(task.start_us, DIGITS))
            lane = next(free, None)
            if lane is None:
                lanes.append([task])
            else:
                lane.append(task)
        named += [(resource if number == 1 else f"{resource} {number}", lane) for number, lane in enumerate(lanes, 1)]
    return named


def _event(plan: Plan, task: Task) -> Event:
    start_us, end_us = round(task.start_us, DIGITS), round(task.end_us, DIGITS)
    arguments: dict[str, Any] = {}
    if task.bucket is not None and task.bucket < len(plan.buckets):
        bucket = plan.buckets[task.bucket]
        gradients, size_bytes = bucket.gradients, bucket.size_bytes
        if isinstance(task, PredictedTask) and task.gradients is not None and task.first_gradient is not None:
            gradients = plan.gradients[task.first_gradient :][: task.gradients]  # of several buckets
            size_bytes = task.size_bytes
        arguments = {"bucket": task.bucket, "gradients": list(gradients)}
        if size_bytes is not None:
            arguments["size_bytes"] = size_bytes
        if task.ready_us is not None:
            arguments["ready_us"] = round(task.ready_us, DIGITS)
            arguments["wait_us"] = round(max(0.0, task.start_us - task.ready_us), DIGITS)
        if bucket.reason is not None:
            arguments["reason"] = bucket.reason
    if isinstance(task, PredictedTask) and task.critical:
        arguments["critical"] = True
    times = {"ts": start_us, "dur": round(end_us - start_us, DIGITS)}
    return {"name": task.task, "cat": task.resource, "ph": "X", **times, "args": arguments}
