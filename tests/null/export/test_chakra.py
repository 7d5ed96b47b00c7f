"""`--to chakra`, read back with the published schema."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from builders import usual_document, write
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from planner import optimize
from planner.export import export
from runtime.errors import InputError
from runtime.plan import load_plan

STRING, UINT64, INT64, BOOL, MESSAGE, INT32 = 9, 4, 3, 8, 11, 5


def schema() -> dict[str, Any]:
    """Return the classes of the published messages, with the fields that are used."""
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="ChakraProtoMsg", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, bool]) -> None:
        added = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            entry = added.field.add(name=field, number=number, type=kind, label=3 if repeated else 1)
            if kind == MESSAGE:
                entry.type_name = ".ChakraProtoMsg.AttributeProto"

    message("AttributeProto", ("name", 1, STRING, False), ("int64_val", 9, INT64, False), ("bool_val", 27, BOOL, False))
    message("GlobalMetadata", ("version", 1, STRING, False), ("attr", 2, MESSAGE, True))
    message(
        "Node", ("id", 1, UINT64, False), ("name", 2, STRING, False), ("type", 3, INT32, False),
        ("ctrl_deps", 4, UINT64, True), ("data_deps", 5, UINT64, True), ("start_time_micros", 6, UINT64, False),
        ("duration_micros", 7, UINT64, False), ("attr", 10, MESSAGE, True),
    )  # fmt: skip
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [entry.name for entry in file.message_type]
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{n}")) for n in names}


def read_back(data: bytes) -> tuple[str, list[Any]]:
    """Return the version and the nodes of an execution trace."""
    file, classes, found = io.BytesIO(data), schema(), list[Any]()
    while file.tell() < len(data):
        size = shift = 0
        while True:
            byte = file.read(1)[0]
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        found.append(classes["Node" if found else "GlobalMetadata"].FromString(file.read(size)))
    return found[0].version, found[1:]


def test_the_trace_is_the_step(tmp_path: Path) -> None:
    write(tmp_path / "p.json", usual_document())
    plan = optimize(tmp_path / "p.json")
    found = export(plan, "chakra")
    assert found.data is not None
    version, nodes = read_back(found.data)
    assert version == "0.0.4"
    assert [node.id for node in nodes] == list(range(len(nodes)))
    assert all(dependency < node.id for node in nodes for dependency in node.data_deps)
    sent = [node for node in nodes if node.type == 7]
    assert len(sent) == len(plan.buckets)
    sizes = [{one.name: one.int64_val for one in node.attr}["comm_size"] for node in sent]
    assert sizes == [bucket.size_bytes for bucket in plan.buckets]
    assert all(node.data_deps for node in sent)
    ends: dict[int, int] = {}
    for node in nodes:
        start = max((ends[dependency] for dependency in node.data_deps), default=0)
        ends[node.id] = start + node.duration_micros
    assert plan.predicted is not None
    assert max(ends.values()) == pytest.approx(plan.predicted.iteration_us, rel=0.01, abs=5.0)


def test_a_plan_without_tasks_is_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    write(tmp_path / "p.json", usual_document())
    optimize(tmp_path / "p.json").save(tmp_path / "plan.json")
    plan = replace(load_plan(tmp_path / "plan.json"), predicted=None)
    with pytest.raises(InputError, match="expected its tasks"):
        export(plan, "chakra")
