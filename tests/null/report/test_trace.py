"""Trace files: the Chrome trace format, what is in the events, and measured steps beside predicted ones."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import line_problem, usual_profile, write
from hypothesis import given
from hypothesis import strategies as st

from planner import optimize
from planner.emit.lower import lower
from planner.ir import Schedule
from planner.report.trace import trace_document, trace_text
from runtime.errors import InputError
from runtime.plan import Plan
from runtime.plan.measured import MeasuredStep, MeasuredTask, load_measured
from runtime.plan.timeline import Span, Timeline

METADATA = {
    "process_name": {"name": str},
    "process_labels": {"labels": str},
    "process_sort_index": {"sort_index": int},
    "thread_name": {"name": str},
    "thread_sort_index": {"sort_index": int},
}


def check_chrome_trace(document: dict[str, Any]) -> None:
    """The rules of the Chrome trace event format that our files rely on (object form, complete and metadata events)."""
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] == "ms"
    assert all(isinstance(text, str) for text in document["otherData"].values())
    named: set[tuple[int, int]] = set()
    reached = 0.0
    ends: dict[tuple[int, int], float] = {}
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            [(key, kind)] = METADATA[event["name"]].items()
            assert isinstance(event["args"][key], kind)
            thread = event["tid"] if event["name"].startswith("thread") else 0
            named.add((event["pid"], thread))
            continue
        assert event["ph"] == "X"
        assert math.isfinite(event["ts"])
        assert event["dur"] >= 0.0
        assert event["ts"] >= reached, "events are sorted by start"
        reached = event["ts"]
        place = event["pid"], event["tid"]
        assert place in named, "threads are named before their events"
        assert (event["pid"], 0) in named
        assert event["ts"] >= ends.get(place, 0.0), "events of a thread follow one another"
        ends[place] = round(event["ts"] + event["dur"], 3)
        assert isinstance(event["args"], dict)


def small_plan() -> Plan:
    """Two buckets: [0, 1] is ready at 300, takes 90; [2] is ready at 350, waits for the link, takes 60."""
    problem = line_problem([(500, 100.0), (500, 100.0), (250, 50.0)], 50.0, 0.01)
    return lower(problem, Schedule.from_boundaries([2, 3]))


def measured_step(plan: Plan, **fields: Any) -> MeasuredStep:
    """A step of the small plan in which the second bucket starts before the first has ended, as medians may."""
    spans = (
        Span(task="forward", resource="compute", start_us=0.0, end_us=110.0),
        Span(task="backward", resource="compute", start_us=110.0, end_us=370.0),
        Span(task="bucket 0 all_reduce", resource="network", start_us=320.0, end_us=420.0, bucket=0, ready_us=310.0),
        Span(task="bucket 1 all_reduce", resource="network", start_us=415.0, end_us=490.0, bucket=1, ready_us=360.0),
        Span(task="update", resource="compute", start_us=490.0, end_us=500.0),
    )
    timeline = Timeline(spans=spans, iteration_us=500.0, forward_us=110.0, backward_us=260.0, update_us=10.0)
    return replace(MeasuredStep.of(timeline, model=plan.model, rank=1, ranks=plan.world.ranks, steps=7), **fields)


def rows(document: dict[str, Any]) -> list[tuple[str, str, str, float, float]]:
    """(process, thread, task, ts, dur) of each complete event."""
    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in document["traceEvents"] if e["ph"] == "M"}
    return [
        (
            names["process_name", event["pid"], 0]["name"],
            names["thread_name", event["pid"], event["tid"]]["name"],
            event["name"],
            event["ts"],
            event["dur"],
        )
        for event in document["traceEvents"]
        if event["ph"] == "X"
    ]


def test_golden_trace() -> None:
    document = trace_document(small_plan())
    check_chrome_trace(document)
    assert rows(document) == [
        ("predicted", "compute", "forward", 0.0, 100.0),
        ("predicted", "compute", "backward", 100.0, 250.0),
        ("predicted", "network", "bucket 0 all_reduce", 300.0, 90.0),
        ("predicted", "network", "bucket 1 all_reduce", 390.0, 60.0),
        ("predicted", "compute", "update", 450.0, 10.0),
    ]
    assert document["traceEvents"][-2]["args"] == {
        "bucket": 1,
        "gradients": ["g2"],
        "size_bytes": 1000,
        "ready_us": 350.0,
        "wait_us": 40.0,
        "reason": "alone; 0.06 ms exposed",
    }


def test_measured_step_is_a_second_process() -> None:
    """With a thread more where tasks of one resource overlap."""
    plan = small_plan()
    document = trace_document(plan, measured_step(plan))
    check_chrome_trace(document)
    assert [row for row in rows(document) if row[0] == "predicted"] == rows(trace_document(plan))
    assert [row[1:] for row in rows(document) if row[0] == "measured"] == [
        ("compute", "forward", 0.0, 110.0),
        ("compute", "backward", 110.0, 260.0),
        ("network", "bucket 0 all_reduce", 320.0, 100.0),
        ("network 2", "bucket 1 all_reduce", 415.0, 75.0),
        ("compute", "update", 490.0, 10.0),
    ]
    labels = [e["args"]["labels"] for e in document["traceEvents"] if e["name"] == "process_labels"]
    assert labels == ["test, 4 ranks", "test, 4 ranks, rank 1, mean of the middle half of 7 steps"]


def test_the_file_says_where_numbers_came_from() -> None:
    plan = optimize(usual_profile())
    text = trace_text(plan)
    document = json.loads(text)
    check_chrome_trace(document)
    assert document == json.loads(json.dumps(trace_document(plan)))
    assert (plan.sources or {}).items() <= document["otherData"].items()
    [label] = [e["args"]["labels"] for e in document["traceEvents"] if e["name"] == "process_labels"]
    assert label == "test, 4 ranks, unnamed: 4 nodes × 1 rank"
    assert len(text.splitlines()) == len(document["traceEvents"]) + 3


resources = st.sampled_from(["compute", "network", "intra", "inter"])
tasks = st.builds(
    lambda resource, start, length, bucket: MeasuredTask(
        task="t", resource=resource, start_us=start, end_us=start + length, bucket=bucket
    ),
    resources,
    st.floats(0.0, 1e6),
    st.floats(0.0, 1e5),
    st.none() | st.integers(0, 1),
)


@given(st.lists(tasks, min_size=1, max_size=12))
def test_any_tasks_make_a_sound_trace(drawn: list[MeasuredTask]) -> None:
    """Whatever the resources, overlaps and lengths: every task is there once, at its place."""
    plan = small_plan()
    document = trace_document(plan, measured_step(plan, timeline=tuple(drawn)))
    check_chrome_trace(document)
    found = [(thread.split()[0], ts) for process, thread, _, ts, _ in rows(document) if process == "measured"]
    assert sorted(found) == sorted((task.resource, round(task.start_us, 3)) for task in drawn)


def test_measured_step_is_written_and_read(tmp_path: Path) -> None:
    plan = small_plan()
    step = measured_step(plan)
    assert load_measured(write(tmp_path / "m.json", step.to_document()), plan) == step
    assert step.exposed_us == 120.0


def test_exposed_time_is_what_the_tasks_show() -> None:
    """Medians of forward, backward and update need not add up to what the median step spends on compute."""
    step = measured_step(small_plan(), backward_us=150.0)
    assert step.exposed_us == 120.0
    [task] = [task for task in step.timeline if task.bucket == 0]
    assert replace(step, timeline=(task,)).exposed_us == 500.0 - (110.0 + 150.0 + 10.0)


WRONG: list[tuple[str, Any, str]] = [
    ("schema", "planner.plan/1", '$.schema: found schema "planner.plan/1", expected "planner.timeline/1"'),
    ("steps", -1, "$.steps: found -1"),
    ("colour", "red", "$.colour: unknown field"),
    ("model", {"name": "other"}, "$.model.name: found 'other', the plan has 'test'"),
    ("model", {"name": "test", "fingerprint": "md5:1"}, "$.model.fingerprint: found"),
    ("ranks", 8, "$.ranks: found 8, the plan has 4; expected a step that was measured with this plan"),
    ("timeline", [], "$.timeline"),
    (
        "timeline",
        [{"task": "t", "resource": "network", "start_us": 2.0, "end_us": 1.0}],
        "$.timeline[0].end_us: found 1.0, expected at least start_us, 2.0",
    ),
    (
        "timeline",
        [{"task": "t", "resource": "network", "start_us": 1.0, "end_us": 1.0, "bucket": 2}],
        "$.timeline[0].bucket: found 2, expected less than 2",
    ),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG, ids=[f"{w[0]}-{i}" for i, w in enumerate(WRONG)])
def test_wrong_measured_steps(tmp_path: Path, field: str, value: Any, message: str) -> None:
    plan = small_plan()
    path = write(tmp_path / "m.json", measured_step(plan).to_document() | {field: value})
    with pytest.raises(InputError) as error:
        load_measured(path, plan)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_another_fingerprint_is_refused(tmp_path: Path) -> None:
    plan = small_plan()
    mine = replace(plan, model=replace(plan.model, fingerprint="sha256:00"))
    other = replace(plan.model, fingerprint="sha256:11")
    path = write(tmp_path / "m.json", measured_step(plan, model=other).to_document())
    assert load_measured(path, plan).model == other  # a plan written by hand need not have one
    with pytest.raises(InputError, match=r"\$\.model\.fingerprint: found 'sha256:11', the plan has 'sha256:00'"):
        load_measured(path, mine)
