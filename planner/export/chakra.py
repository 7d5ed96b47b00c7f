"""`--to chakra`: the planned step as a Chakra execution trace, which ASTRA-sim and others simulate.

A file is one message of GlobalMetadata and one of each Node behind it, each with its length before it, as protocol
buffers encode them (github.com/mlcommons/chakra, schema/protobuf/et_def.proto). All ranks do the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from planner.export.base import Export, bucket_sizes
from planner.model.problem import Problem
from runtime.errors import InputError
from runtime.plan import Plan
from runtime.plan.predicted import PredictedTask
from runtime.plan.timeline import computes

VERSION = "0.0.4"
COMPUTE_NODE, COLLECTIVE_NODE = 4, 7
COLLECTIVES = {"all_reduce": 0, "all_gather": 2, "reduce_scatter": 7}
"""Numbers of collectives in the schema."""
_VARINT, _BYTES = 0, 2
USE = "one trace for every rank: copy it to PREFIX.0.et, PREFIX.1.et, … for ASTRA-sim"


def to_chakra(plan: Plan, problem: Problem | None) -> Export:
    """Return the plan's step as an execution trace. Raises InputError where the plan has no predicted tasks."""
    tasks = plan.predicted.timeline if plan.predicted is not None else None
    if not tasks:
        raise InputError(
            "--to chakra: found a plan without $.predicted.timeline, expected its tasks; make it by `planner optimize`"
        )
    sizes, data, rows = bucket_sizes(plan, problem), _delimited(_text(1, VERSION)), list[dict[str, Any]]()
    for task in sorted(_parts(tasks), key=lambda task: (task.start_us, task.end_us)):
        sends = task.bucket is not None and not computes(task.resource)
        row = {
            "id": len(rows), "name": task.task, "type": COLLECTIVE_NODE if sends else COMPUTE_NODE,
            "data_deps": _depends(task, rows), "start_time_micros": round(task.start_us),
            "duration_micros": max(0, round(task.end_us - task.start_us)), "resource": task.resource,
        }  # fmt: skip
        if sends:
            collective = next((name for name in COLLECTIVES if name in task.task), "all_reduce")
            values = {"comm_type": COLLECTIVES[collective], "comm_size": sizes[task.bucket or 0]}
        else:
            values = {"num_ops": 0, "tensor_size": 0}
        attributes = b"".join(_message(10, _text(1, name) + _number(9, value)) for name, value in values.items())
        data += _delimited(_node(row) + attributes + _message(10, _text(1, "is_cpu_op") + _number(27, 0)))
        rows.append(row | values)
    return Export(text="", document={"version": VERSION, "nodes": rows}, notes=(USE,), data=data)


def _parts(tasks: Sequence[PredictedTask]) -> list[PredictedTask]:
    """Return the tasks, with backward cut where the gradients of a bucket are ready."""
    moments = {task.ready_us for task in tasks if task.ready_us is not None}
    found = []
    for task in tasks:
        if task.task != "backward":
            found.append(task)
            continue
        edges = [task.start_us, *sorted(at for at in moments if task.start_us < at < task.end_us), task.end_us]
        found += [
            replace(task, task=f"backward {part}", start_us=start, end_us=end)
            for part, (start, end) in enumerate(pairwise(edges))
        ]
    return found


def _depends(task: PredictedTask, rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return what a task waits for: the one before on its resource; a message its gradients, an update all messages."""
    same = [row["id"] for row in rows if row["resource"] == task.resource][-1:]
    if task.ready_us is not None:
        ready = [
            row["id"]
            for row in rows
            if computes(row["resource"]) and row["start_time_micros"] + row["duration_micros"] <= task.ready_us + 1.0
        ]
        same += ready[-1:]
    elif task.task == "update" or not computes(task.resource):
        same += [row["id"] for row in rows if row["type"] == COLLECTIVE_NODE]
    return sorted(set(same))


def _node(row: Mapping[str, Any]) -> bytes:
    encoded = _number(1, row["id"]) + _text(2, row["name"]) + _number(3, row["type"])
    if row["data_deps"]:
        encoded += _message(5, b"".join(map(_varint, row["data_deps"])))
    return encoded + _number(6, row["start_time_micros"]) + _number(7, row["duration_micros"])


def _varint(value: int) -> bytes:
    return bytes(_groups(value))


def _groups(value: int) -> Iterator[int]:
    while value > 127:
        yield value & 127 | 128
        value >>= 7
    yield value


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


def _message(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _delimited(data)


def _delimited(data: bytes) -> bytes:
    return _varint(len(data)) + data
