"""Files that are no traces, or traces that cannot be planned: one line each, with what to do."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_traces import Job, make_traces, write_trace

from planner.traces.of_ranks import read_run
from planner.traces.stream import EventFile
from runtime.errors import InputError


def text(edit: Callable[[dict[str, Any]], Any] = lambda document: document) -> str:
    """Return a trace as text after an edit."""
    document = make_traces(Job())[0]
    return json.dumps(edit(document) or document, indent=2)


def without(*names: str) -> str:
    """Return a trace without events whose name or category holds one of these."""

    def edit(document: dict[str, Any]) -> None:
        document["traceEvents"] = [
            event
            for event in document["traceEvents"]
            if not any(name in event["name"] or name == event["cat"] for name in names)
        ]

    return text(edit)


def negative(document: dict[str, Any]) -> None:
    for event in document["traceEvents"]:
        event["dur"] *= -1.0


def zipped(files: dict[str, str], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Return an archive of these files."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return data.getvalue()


def first_event(**fields: Any) -> str:
    """Return a trace whose first event has these fields instead."""

    def edit(document: dict[str, Any]) -> None:
        document["traceEvents"].insert(0, {"ph": "X", "cat": "kernel", "name": "k", "ts": 1.0, "dur": 1.0, **fields})

    return text(edit)


BAD: dict[str, tuple[str | bytes, str]] = {
    "empty": (b"", "found an empty file"),
    "white space": (b"  \n ", "found the end of the file"),
    "not JSON": (b"\x00\x01\x02", "at its start, expected a trace"),
    "another document": ('{"schema": "planner.plan/1"}', "found no list traceEvents"),
    "no events": ('{"traceEvents": []}', "found 0 events"),
    "events of others": (
        '[{"ph": "X", "cat": "js", "name": "f", "ts": 1, "dur": 2}]',
        "none of an operation or a kernel",
    ),
    "truncated": (text()[:20_000], "found the end of the file after event"),
    "truncated archive": (gzip.compress(text().encode())[:3000], "truncated or damaged archive after event"),
    "damaged": (text().replace('"dur": 4.0', '"dur": #', 1), "expected valid JSON"),
    "another version": (text(lambda document: document | {"schemaVersion": 7}), "$.schemaVersion: found 7, expected 1"),
    "deep nesting": ('{"traceEvents": [' + "[" * 200_000, "few levels of nesting"),
    "giant number": ('{"traceEvents": [{"ts": ' + "9" * 5000 + "}]}", "numbers of a few digits"),
    "inference": (without("AccumulateGrad", "evaluate_function"), "an inference has nothing to plan"),
    "frozen": (without("AccumulateGrad"), "found a backward without AccumulateGrad"),
    "dropped kernels": (without("backward_kernel"), "the profiler's buffer dropped them"),
    "no kernels": (without("kernel", "gpu_memcpy"), "launches and no kernel"),
    "kernels alone": (without("cpu_op", "cuda_runtime", "user_annotation"), "no operations of the host"),
    "no step": (without("ProfilerStep", "Optimizer.step"), "none with a whole backward"),
    "steps alone": (
        without("kernel", "cpu_op", "cuda_runtime", "gpu_memcpy", "FSDP"),
        "found steps and no operations of the host",
    ),
    "negative durations": (text(negative), "or a kernel, and 312 events without a name, or of negative"),
    "two documents": (text() + text(), 'found "{\\n  \\"schemaVersion\\":" after the trace'),
    "archive of nothing": (zipped({}), "found 0 JSON files in it"),
    "archive of two": (zipped({"a.json": "{}", "b.json": "{}"}), "found 2 JSON files in it"),
    "odd compression": (
        zipped({"a.json": text()}, zipfile.ZIP_LZMA),
        "found an unreadable archive (encrypted, or not deflated)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_it_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    content, message = BAD[case]
    path = tmp_path / "t.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as error:
        read_run([str(path)])
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "fields",
    [
        {"dur": -5.0}, {"ts": float("nan")}, {"ts": "soon"}, {"dur": 1e300}, {"args": [1]}, {"name": 7}, {"ts": None},
        {"args": {"correlation": 10**40, "stream": {}}}, {"cat": None}, {"name": "<script>alert(1)</script>"},
    ],
)  # fmt: skip
def test_an_odd_event_changes_nothing(tmp_path: Path, fields: dict[str, Any]) -> None:
    path = tmp_path / "t.json"
    path.write_text(first_event(**fields))
    run = read_run([str(path)])
    assert [step.numel for step in run.steps] == [Job().sizes] * 3
    if fields.get("dur", 1.0) != 1.0:
        assert any("negative or absurd times" in note for note in run.notes)


def pair(tmp_path: Path, job: Job, edit: Callable[[dict[str, Any]], Any] = lambda document: None) -> list[str]:
    """Return the first rank's trace of one job and the second one's of another, after an edit."""
    second = make_traces(job)[1]
    edit(second)
    return [write_trace(tmp_path / "a.json", make_traces(Job())[0]), write_trace(tmp_path / "b.json", second)]


@pytest.mark.parametrize(
    ("job", "edit", "message"),
    [
        (Job(steps=2), lambda document: None, "found the steps 10 to 11 (2), and 10 to 12 (3)"),
        (Job(world=4), lambda document: None, "found 4 ranks, and 2 in"),
        (Job(), lambda document: document["distributedInfo"].update(rank=0), "found rank 0 once more"),
        (Job(buckets=(8,)), lambda document: None, "messages of gradients of other sizes"),
        (Job(sizes=(*Job.sizes[:6], 899_000, 1064)), lambda document: None, "found gradients of other sizes"),
        (Job(sizes=Job.sizes[:7], buckets=(2, 5, 7)), lambda document: None, "found 7 gradients, and 8 in"),
        (
            Job(),
            lambda document: document.update(baseTimeNanoseconds=document["baseTimeNanoseconds"] + 10**13),
            "found steps that began 10000 s apart",
        ),
    ],
)
def test_traces_of_other_runs_are_refused(tmp_path: Path, job: Job, edit: Callable[..., Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        read_run(pair(tmp_path, job, edit))
    assert str(error.value).startswith(str(tmp_path / "b.json"))
    assert message in str(error.value)


def test_a_rank_of_a_pipeline_is_refused(tmp_path: Path) -> None:
    document = make_traces(Job())[0]
    for event in document["traceEvents"]:
        if event["args"].get("Collective name") == "allreduce":
            event["args"]["Collective name"] = "send"
    with pytest.raises(InputError, match="one rank of a pipeline cannot be planned"):
        read_run([write_trace(tmp_path / "t.json", document)])


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found no file that ends in"):
        read_run([str(tmp_path)])


def test_events_are_read_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a chunk ends: inside of an event, a character or white space."""
    path = tmp_path / "t.json"
    events = [{"name": "é" * (at % 7), "at": at, "list": [1, {"a": "]},{["}]} for at in range(50)]
    path.write_text(json.dumps({"a": 1, "traceEvents": events, "z": {"b": 2}}, indent=1, ensure_ascii=False))
    for size in (1, 2, 3, 17, 100):
        monkeypatch.setattr("planner.traces.stream.CHUNK_BYTES", size)
        with EventFile(path) as file:
            assert list(file) == events
        assert file.header == {"a": 1, "z": {"b": 2}}
