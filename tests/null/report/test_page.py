"""The page without a browser: what is in it, how large it gets, and that nothing in it can be mistaken for markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import cluster_document, profile_document, random_problem, usual_document, usual_profile
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trace import measured_step, small_plan

from planner import optimize
from planner.documents.profile import parse_profile
from planner.documents.text import milliseconds
from planner.emit.timelines import MAX_BARS, join_neighbours
from planner.report.accumulation import per_optimizer_step
from planner.report.figures import scaling_figure, shorten, timeline_figure
from planner.report.files import HTML, explain
from planner.report.page import certificate_words, headline, page_text
from planner.report.tracks import plan_tracks
from runtime.errors import EnvironmentFailure
from runtime.plan import Plan, parse_plan
from runtime.plan.predicted import Certificate, PredictedTask, Prediction
from runtime.plan.strict_json import write_json

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;%{x}"


class Elements(HTMLParser):
    """Collects tags, text by tag, and the contents of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.scripts: list[str] = []
        self.words = ""
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._script = tag == "script"
        if self._script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[-1] += data
        else:
            self.words += data


def hostile_plan() -> Plan:
    """Every text of it tries to break out."""
    document = usual_document(cluster=cluster_document((200.0, 0.001), name=HOSTILE, source=HOSTILE))
    document["model"]["name"] = HOSTILE
    for index, gradient in enumerate(document["compute"]["gradients"]):
        gradient["name"] = f"{HOSTILE}{index}"
    plan = optimize(parse_profile(document))
    certificate = Certificate(method=HOSTILE, lower_bound_us=1.0, gap=0.5, note=HOSTILE)
    buckets = tuple(replace(bucket, reason=HOSTILE, collective=HOSTILE) for bucket in plan.buckets)
    baselines = {f"{HOSTILE}{name}": prediction for name, prediction in (plan.baselines or {}).items()}
    return replace(plan, buckets=buckets, certificate=certificate, baselines=baselines, notes=(HOSTILE,))


def test_texts_are_texts() -> None:
    """Names that look like markup stay names, in the page and in the figures' own markup."""
    plain, hostile = Elements(page_text(optimize(usual_profile()))), Elements(page_text(hostile_plan()))
    assert len(hostile.scripts) == len(plain.scripts) == 3
    assert set(hostile.tags) <= set(plain.tags) | {"h2", "ul", "li"}
    assert "img" not in hostile.tags
    assert HOSTILE in hostile.words
    figures = json.loads(hostile.scripts[0])
    texts = json.dumps(figures)
    assert "<script" not in texts
    assert "<img" not in texts
    assert "&lt;" in texts


def test_the_page_runs_its_own_scripts_only_and_loads_nothing() -> None:
    page = Elements(page_text(optimize(usual_profile())))
    [policy] = [
        value for tag, name, value in page.attributes if (tag, name) == ("meta", "content") and "src" in str(value)
    ]
    for script in page.scripts[1:]:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in str(policy)
    assert "default-src 'none'" in str(policy)
    assert [value for _, name, value in page.attributes if name in ("src", "href")] == ["data:,"]


def test_the_page_says_what_it_rests_on() -> None:
    """Model, cluster, dates, units, version; the certificate; every bucket with its reason."""
    document = usual_document(cluster=cluster_document((200.0, 0.001), name="lab", source="measured by us"))
    document["world"] |= {"measured": "2026-11-21T04:00:00Z", "device": "cpu", "backend": "gloo", "torch": "2.13.0"}
    plan = optimize(parse_profile(document))
    words = Elements(page_text(plan)).words
    for text in (
        "test on 4 ranks (4 nodes)",
        "test: 6 gradients, 0.897 MiB, float32",
        "lab: 4 nodes × 1 rank; source: measured by us",
        "profile of 4 ranks (cpu, gloo, torch 2.13.0), measured 2026-11-21T04:00:00Z",
        "all-reduce on 4 ranks: fitted line",
        "This is the best exact plan there is",
        # below each figure
        "test, 4 ranks. Cluster lab: 4 nodes × 1 rank; source: measured by us. Compute: profile of 4 ranks (cpu, gloo",
        "ms are milliseconds",
        "step (ms)",
    ):
        assert text in words
    for bucket in plan.buckets:
        assert bucket.reason is not None
        assert bucket.reason in words
    for name in plan.baselines or {}:
        assert name in words


def test_bars_are_the_tasks_of_plan_and_baselines() -> None:
    """Every task of positive length once, at its time, in the row of its schedule and resource."""
    plan = optimize(usual_profile())
    tracks = plan_tracks(plan, None)
    assert tracks[0].name == "plan (exact)"
    assert sorted(track.name for track in tracks[1:]) == sorted(plan.baselines or {})
    figure = timeline_figure(tracks)
    found = sorted(
        (round(base * 1000.0, 3), round(length * 1000.0, 3))
        for trace in figure["data"]
        for base, length in zip(trace["base"], trace["x"], strict=True)
    )
    predictions = [plan.predicted, *(plan.baselines or {}).values()]
    expected = sorted(
        (round(task.start_us, 3), round(task.end_us - task.start_us, 3))
        for prediction in predictions
        if prediction is not None
        for task in prediction.timeline or ()
    )
    assert found == expected
    assert len({y for trace in figure["data"] for y in trace["y"]}) == 2 * len(tracks)
    wfbp = next(track for track in tracks if track.name == "wfbp")
    messages = [bar for bar in wfbp.bars if bar.role == "message"]
    assert [(bar.gradients, bar.first_name, bar.size_bytes) for bar in messages] == [
        (1, f"g{index}", size) for index, size in enumerate([40, 20000, 800, 800000, 256, 120000])
    ]


def test_a_measured_step_stands_below_the_plan() -> None:
    plan = small_plan()
    tracks = plan_tracks(plan, measured_step(plan))
    assert [(track.name, track.iteration_us, track.exposed_us) for track in tracks] == [
        ("plan (exact)", 460.0, 100.0),
        ("measured", 500.0, 120.0),
    ]
    page = Elements(page_text(plan, measured_step(plan), "m.json"))
    words = page.words
    assert "Measured: 0.5 ms on rank 1; the prediction is off by -8.0%." in words
    assert "rank 1 of 4, mean of the middle half of 7 steps, from m.json" in words
    assert "One step, predicted and measured" in words
    assert "Measured: rank 1 of 4, mean of the middle half of 7 steps." in words


def test_any_resource_has_its_row() -> None:
    plan = small_plan()
    spans = [("inter", 0.0), ("intra", 1.0), ("compute", 2.0)]
    timeline = tuple(PredictedTask(task="t", resource=name, start_us=at, end_us=at + 1.0) for name, at in spans)
    assert plan.predicted is not None
    [track] = plan_tracks(replace(plan, predicted=replace(plan.predicted, timeline=timeline)), None)
    assert track.resources == ("compute", "inter", "intra")
    assert [(bar.resource, bar.role) for bar in track.bars] == [
        ("inter", "message"),
        ("intra", "message"),
        ("compute", "compute"),
    ]


def test_figures_are_what_the_library_expects() -> None:
    """The Python side of plotly knows every attribute of traces and layouts, and refuses others."""
    from plotly.graph_objects import Figure

    plan = optimize(usual_profile())
    for figure in (timeline_figure(plan_tracks(plan, None)), scaling_figure(plan, plan.scaling or ())):
        assert len(Figure(figure).data) == len(figure["data"]) > 0
    with pytest.raises(ValueError, match="colour"):
        Figure({"data": [{"type": "bar", "colour": "red"}]})


def test_marks_of_the_scaling_curve() -> None:
    """Filled where communication was measured, open where it is derived; a line per strategy, the optimum's below."""
    plan = optimize(usual_profile())
    figure = scaling_figure(plan, plan.scaling or ())
    lines = {trace["name"]: trace for trace in figure["data"] if "marker" in trace}
    assert list(lines) == ["optimal", "wfbp", "single", "mg_wfbp", "ddp"]
    widths = [trace["line"]["width"] for trace in lines.values()]
    assert widths[0] > max(widths[1:])
    for trace in lines.values():
        marks = dict(zip(trace["x"], trace["marker"]["symbol"], strict=True))
        assert marks == {ranks: "circle" if ranks == 4 else "circle-open" for ranks in (1, 2, 4, 8, 16, 32, 64)}
    assert figure["layout"]["xaxis"]["tickvals"] == [1, 2, 4, 8, 16, 32, 64]


def test_far_apart_strategies_get_a_logarithmic_axis() -> None:
    plan = optimize(usual_profile())
    points = [replace(point, iteration_us={"a": 1e3, "b": 1e3 * point.ranks}) for point in plan.scaling or ()]
    axis = scaling_figure(plan, points)["layout"]["yaxis"]
    assert axis["type"] == "log"
    assert {"1", "10", "50", "100"} <= set(axis["ticktext"])
    near = [replace(point, iteration_us={"a": 1e3, "b": 2e3}) for point in plan.scaling or ()]
    assert "type" not in scaling_figure(plan, near)["layout"]["yaxis"]


def hand_written(**fields: Any) -> Plan:
    """The least that a plan may hold."""
    document = {
        "schema": "planner.plan/1",
        "model": {"name": "mine"},
        "world": {"ranks": 2},
        "accuracy": "exact",
        "buckets": [{"gradients": ["fc.bias", "fc.weight", "norm"]}, {"gradients": ["conv.weight"]}],
        **fields,
    }
    return parse_plan(document)


def test_a_plan_written_by_hand_has_a_page() -> None:
    words = Elements(page_text(hand_written())).words
    for text in (
        "mine on 2 ranks: the plan explained",
        "4 gradients are communicated in 2 messages a step. It carries no prediction",
        "The plan holds no time line",
        "The plan carries no certificate",
        "the plan does not say",
    ):
        assert text in words


def test_without_plotly_the_cure_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page without figures does not need it."""
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert len(page_text(hand_written())) < 20_000
    with pytest.raises(EnvironmentFailure, match="pip install plotly"):
        page_text(optimize(usual_profile()))


def test_tasks_without_a_bucket_are_taken_in_launch_order() -> None:
    """As in plans of the first version, and in those written by hand."""
    tasks = [
        {"task": "backward", "resource": "compute", "start_us": 0.0, "end_us": 9.0},
        {"task": "first", "resource": "network", "start_us": 3.0, "end_us": 5.0},
        {"task": "second", "resource": "network", "start_us": 5.0, "end_us": 7.0},
    ]
    plan = hand_written(predicted={"iteration_us": 9.0, "timeline": tasks})
    assert plan.predicted is not None
    assert plan.predicted.bucket_times(3) == [(3.0, 5.0), (5.0, 7.0), None]
    [track] = plan_tracks(plan, None)
    assert [(bar.bucket, bar.last_name) for bar in track.bars] == [(None, None), (0, "norm"), (1, "conv.weight")]


def test_phases_of_a_bucket_count_together() -> None:
    tasks = [
        {"task": "bucket 1 a", "resource": "intra", "start_us": 3.0, "end_us": 5.0, "bucket": 1},
        {"task": "bucket 0 a", "resource": "intra", "start_us": 1.0, "end_us": 3.0, "bucket": 0},
        {"task": "bucket 1 b", "resource": "inter", "start_us": 6.0, "end_us": 7.0, "bucket": 1},
    ]
    plan = hand_written(predicted={"iteration_us": 9.0, "timeline": tasks})
    assert plan.predicted is not None
    assert plan.predicted.bucket_times(2) == [(1.0, 3.0), (3.0, 7.0)]


def test_words_of_the_certificate() -> None:
    plan = optimize(usual_profile())
    assert certificate_words(plan)[0].startswith("This is the best exact plan there is")
    loose = replace(plan, certificate=Certificate(method="search", lower_bound_us=2000.0, gap=0.04, note="a note"))
    first, how, _ = certificate_words(loose)
    assert first.startswith("With these compute and communication times, no exact plan has a step shorter than 2 ms.")
    assert "4.00% more at most than the best possible" in first
    assert how == "Shown by search. Mind: a note."


@pytest.mark.parametrize(
    ("ddp_us", "words"), [(2000.0, "50.0% shorter"), (500.0, "100.0% longer"), (1000.0, "as long")]
)
def test_headline_compares_with_ddp(ddp_us: float, words: str) -> None:
    plan = hand_written(predicted={"iteration_us": 1000.0}, baselines={"ddp": {"iteration_us": ddp_us}})
    assert words in headline(plan, None)[0]


def test_large_models_stay_within_the_limit() -> None:
    """Ten thousand gradients: plan, trace and page; the page keeps below 6 MB and below its number of bars."""
    rng = np.random.default_rng(0)
    rows = [(int(numel), 20.0) for numel in 10 ** rng.uniform(2, 5, 10_000)]
    document = profile_document(rows, cluster=cluster_document((1.0, 0.0001)))
    for index, gradient in enumerate(document["compute"]["gradients"]):
        gradient["name"] = f"module.blocks.{index // 10}.attention.projection.{index % 10}.weight"
    plan = optimize(parse_profile(document))
    for prediction in (plan.baselines or {}).values():
        assert len(prediction.timeline or ()) <= MAX_BARS + 3
    wfbp = (plan.baselines or {})["wfbp"].timeline or ()
    assert sum(task.gradients or 0 for task in wfbp) == 10_000
    assert len(json.dumps(plan.to_document(), indent=1)) < 3_000_000
    text = page_text(plan)
    assert len(text.encode()) <= 6_000_000
    assert all(len(track.bars) <= MAX_BARS + 3 for track in plan_tracks(plan, None))
    assert "buckets; <code>planner explain --json</code> lists all" in text or len(plan.buckets) <= 500


starts = st.lists(st.floats(0.0, 1e4), min_size=1, max_size=40, unique=True).map(sorted)


@given(starts, st.integers(1, 12), st.sampled_from(["all_reduce", "mixed"]))
@settings(max_examples=200)
def test_joining_keeps_what_is_drawn(at: list[float], limit: int, kinds: str) -> None:
    """No more bars than asked for where all are of a kind; every task in one bar; in order, as wide as their tasks."""
    tasks = [
        PredictedTask(
            task=f"bucket {index} {'all_reduce' if kinds == 'all_reduce' or index % 3 else 'all_gather'}",
            resource="network",
            start_us=start,
            end_us=(at[index + 1] if index + 1 < len(at) else start + 1.0),
            bucket=index,
            gradients=2,
            first_gradient=2 * index,
            size_bytes=8,
        )
        for index, start in enumerate(at)
    ]
    bars = join_neighbours(tasks, limit)
    if len(tasks) <= limit:
        assert bars == tuple(tasks)
    if kinds == "all_reduce":
        assert len(bars) <= limit
    assert sum(bar.tasks or 1 for bar in bars) == len(tasks)
    assert sum(bar.gradients or 0 for bar in bars) == 2 * len(tasks)
    assert sum(bar.size_bytes or 0 for bar in bars) == 8 * len(tasks)
    assert (bars[0].start_us, bars[-1].end_us) == (tasks[0].start_us, tasks[-1].end_us)
    first = 0
    for bar in bars:
        assert bar.first_gradient == first
        first += bar.gradients or 0


@pytest.mark.parametrize(
    ("time_us", "text"),
    [(None, ""), (0.0, "0"), (1234.5678, "1.235"), (1234567.0, "1,235"), (12345678.9, "12,346"), (1e18, "1e+15")],
)
def test_times_in_words(time_us: float | None, text: str) -> None:
    assert milliseconds(time_us) == text


def test_shorten() -> None:
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghijk", 10) == "abcde…hijk"
    assert all(len(shorten("x" * 50, width)) == width for width in range(3, 50))


def test_pages_of_equal_plans_are_equal() -> None:
    problem = random_problem(np.random.default_rng(3), 40, "line")
    first, second = (optimize(problem.profile, problem.cost.cluster) for _ in range(2))
    assert page_text(first) == page_text(second)
    assert not re.search(r"\d{4}-\d\d-\d\dT", page_text(first).split("plotly.js v")[0])


def test_a_measured_step_of_micro_batches_meets_a_prediction_of_as_many() -> None:
    plan = small_plan()  # forward 100, backward 250, 100 exposed, update 10 µs
    plan = replace(plan, baselines={"ddp": replace(plan.predicted, iteration_us=500.0)} if plan.predicted else None)
    assert headline(plan, measured_step(plan, iteration_us=460.0))[-1].endswith("off by +0.0%.")
    for exchanged, whole_us in ((1, 350.0 + 460.0), (2, 2 * 450.0 + 10.0)):
        whole = per_optimizer_step(plan, 2, exchanged)
        assert headline(whole, measured_step(plan, iteration_us=whole_us))[-1].endswith("off by +0.0%.")
        assert whole.predicted is not None
        assert whole.predicted.exposed_us == pytest.approx(exchanged * 100.0)
        assert max(task.end_us for task in whole.predicted.timeline or ()) == pytest.approx(whole_us)
        assert (whole.baselines or {})["ddp"].iteration_us == pytest.approx(whole_us + exchanged * 40.0)
    bare = replace(plan, predicted=Prediction(iteration_us=460.0))
    assert per_optimizer_step(bare, 2, 1).predicted is None


def test_explaining_a_saved_step_of_micro_batches_compares_whole_steps(tmp_path: Path) -> None:
    plan = small_plan()
    plan.save(tmp_path / "plan.json")
    step = measured_step(plan, iteration_us=810.0, micro_batches=2, exchanged=1)
    write_json(tmp_path / "measured.json", step.to_document())
    explain(str(tmp_path / "plan.json"), str(tmp_path / "measured.json"), {HTML: str(tmp_path / "page.html")})
    assert "the prediction is off by +0.0%" in (tmp_path / "page.html").read_text()
