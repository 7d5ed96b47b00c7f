"""Weights gathered beside the next forward: what a step takes, when plans have it, and what they say of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import halves_cluster, make, profile_document, run, write
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.comparison.variants import make_lineup
from planner.decide.optimize import optimize
from planner.decide.pipeline import parse_passes, run_passes
from planner.decide.strategies import make_schedule
from planner.documents.profile import Profile, parse_profile
from planner.emit.lower import lower
from planner.export.base import stock_plan
from planner.ir import Schedule
from planner.model.delay import CycleTimeline
from planner.model.engine import run as run_ops
from planner.model.forward import needs
from planner.model.modes import model_of, simulate_schedule, step_us
from planner.model.modes.late_gather import (
    LateGather,
    WindowSpan,
    by_need,
    gathers_of,
    of_stops,
    ops_of,
)
from planner.model.modes.sharded import Sharded, flags_us
from planner.model.problem import Problem
from planner.model.schedule_text import parse_schedule
from planner.passes import late_gather as late_gather_pass
from planner.passes.late_gather import LateGathers, late_gathers
from planner.report.figures import timeline_figure
from planner.report.trace import trace_document
from planner.report.tracks import plan_tracks
from planner.strategies.decoupled import THRESHOLDS_MIB
from planner.verify import VerifyError, verify
from runtime.plan import Plan, load_plan, parse_plan

ROWS = [(1000, 100.0), (50, 10.0), (3000, 300.0), (2000, 200.0), (4, 90.0)]
"""Readiness order; forward passes through them from the last one on."""
LATE = ["late-gather"]


def document(rows: Sequence[tuple[int, float]] = ROWS, **options: Any) -> dict[str, Any]:
    """A step with AdamW."""
    made = profile_document(rows, **{"forward_us": 350.0, "update_us": 400.0} | options)
    made["compute"]["optimizer"] = {
        "name": "AdamW", "adaptive": True, "elementwise": True, "holds_all": True,
        "state_bytes": 8 * sum(numel for numel, _ in rows),
    }  # fmt: skip
    return made


def profile(half: tuple[float, float] | None = (30.0, 0.005), **options: Any) -> Profile:
    return parse_profile(document(cluster=halves_cluster(half), **options))


def late(stops: Sequence[int], groups: Sequence[int]) -> Schedule:
    return of_stops(stops, groups)


def test_a_step_by_hand() -> None:
    """Two buckets; the one that is ready last is gathered first, and forward, half as long as backward, waits for both.

    Gradients 4 and 3 are needed at 0 and 45 µs, 2 at 145 µs, 1 and 0 at 295 and 300 µs.
    """
    step, schedule = make(document(), halves_cluster()), late([2, 5], [2, 5])
    assert needs(step).need_us.tolist() == pytest.approx([300.0, 295.0, 145.0, 45.0, 0.0])
    first_us, second_us = 30.0 + 0.02 * (4 + 2000 + 3000), 30.0 + 0.02 * 1050
    # 130.1 µs at the start; then 295 µs of forward, while the second one comes.
    assert [gather.cost_us for gather in gathers_of(step, schedule)] == pytest.approx([first_us, second_us])
    assert second_us < 295.0
    pushed_us = 700.0 + 350.0 + 30.0 + 0.02 * 5004 + flags_us(step)
    assert step_us(step, schedule) == pytest.approx(first_us + pushed_us + 100.0)
    one = late([2, 5], [5])
    assert step_us(step, one) == pytest.approx(30.0 + 0.02 * 6054 + pushed_us + 100.0)
    assert step_us(step, replace(one, mode=Sharded())) == pytest.approx(pushed_us + 100.0 + first_us + second_us)


def test_two_steps_are_shown_and_what_their_length_comes_from() -> None:
    step, schedule = make(document(), halves_cluster()), late([1, 2, 5], [2, 5])
    timeline = simulate_schedule(step, schedule)
    assert isinstance(timeline, CycleTimeline)
    assert timeline.steps == 2
    length_us = step_us(step, schedule)
    spans = [span for span in timeline.spans if isinstance(span, WindowSpan)]
    assert len(spans) == len(timeline.spans)
    for first in (one for one in spans if one.step == 0 and not one.critical):
        (other,) = [one for one in spans if one.start_us == pytest.approx(first.start_us + length_us)
                    and one.task.split(" ")[:3] == [*first.task.split(" "), "1"][:len(one.task.split(" "))]
                    and one.resource == first.resource]  # fmt: skip
        assert other.end_us - other.start_us == pytest.approx(first.end_us - first.start_us)
    assert [span.task for span in spans if span.resource == "network"] == [
        "bucket 2 all_gather", "buckets 0-1 all_gather", "bucket 0 reduce_scatter", "bucket 1 reduce_scatter",
        "bucket 2 reduce_scatter",
    ] * 2  # fmt: skip
    path = sorted((span for span in spans if span.critical), key=lambda span: span.start_us)
    assert path[0].start_us == 0.0
    assert path[-1].end_us == pytest.approx(2.0 * length_us)
    assert all(after.start_us == pytest.approx(before.end_us) for before, after in pairwise(path))
    border = [
        span.task for span in path if abs(span.start_us - length_us) < 1e-6 or abs(span.end_us - length_us) < 1e-6
    ]
    assert border == ["update", "bucket 2 all_gather"]


def random_step(rng: np.random.Generator, count: int) -> tuple[Problem, Schedule]:
    """A step and buckets by chance."""
    numel = (10 ** rng.uniform(1, 5, count)).astype(int).tolist()
    rows = list(zip(numel, rng.exponential(200.0, count).tolist(), strict=True))
    layers = [
        {"name": f"layer{i}", "kind": "linear", "flops": 1.0, "activation_bytes": 0.0, "forward_us": 1.0 + i % 3}
        for i in rng.permutation(count).tolist()
    ]
    made = document(rows, forward_us=float(rng.uniform(50, 100) * count)) | {"layers": layers}
    stops = [*sorted(set(rng.integers(1, count, count // 2).tolist())), count]
    groups = [stop for stop in stops[:-1] if rng.random() < 0.5] + [count]
    step = make(made, halves_cluster())
    return step, by_need(step, late(stops, groups))


@pytest.mark.parametrize("contention", [
    None, {"compute": 1.2, "network": 1.4}, {"compute": 1.3, "network": 1.0},
    {"compute": 1.1, "network": 1.1, "by_size": [[1000.0, 2.0, 1.5], [400000.0, 1.1, 1.2]]},
])  # fmt: skip
def test_every_way_of_simulating_agrees(contention: dict[str, Any] | None) -> None:
    """The closed form and the engine; also where layers run in another order than gradients are ready."""
    rng = np.random.default_rng(1)
    for count in (2, 3, 5, 8, 12):
        problem, schedule = random_step(rng, count)
        machines = halves_cluster() if contention is None else halves_cluster() | {"contention": contention}
        problem = make(problem.profile.to_document(), machines)
        expected_us = step_us(problem, schedule)
        assert simulate_schedule(problem, schedule).spans[-1].end_us == pytest.approx(2.0 * expected_us)
        ran = run_ops(ops_of(problem, schedule, 3))
        assert ran.total_us == pytest.approx(3.0 * expected_us)
        assert sum(ran.ops[number].kind == "update" for number in ran.critical_path()) == 3
        assert sum(model_of(schedule).critical_path(problem, schedule).values()) == pytest.approx(1.0)


def test_no_order_of_launch_is_better_than_by_need() -> None:
    rng = np.random.default_rng(2)
    for count in (3, 4, 6, 8):
        problem, schedule = random_step(rng, count)
        groups = list(schedule.mode.groups(len(schedule.buckets)))  # type: ignore[attr-defined]
        for _ in range(10):
            rng.shuffle(groups)
            other = replace(schedule, mode=LateGather(tuple(map(tuple, groups))))
            assert step_us(problem, schedule) <= step_us(problem, other) * (1.0 + 1e-12)


LAYERS = [("layer4", 10.0, None), ("shared", 30.0, ["g3", "g2"]), ("layer2", 20.0, None), ("other", 40.0, None)]


@pytest.mark.parametrize(
    ("measured", "source"), [(True, "forward times of its layers"), (False, "FLOPs of its layers")]
)
def test_when_forward_needs_weights(measured: bool, source: str) -> None:
    """By layers where they are known, the first that uses a weight; what none names with what is ready behind it."""
    made = document()
    made["layers"] = [
        {"name": name, "kind": "linear", "flops": share * 1e6, "activation_bytes": 0.0}
        | ({"forward_us": share} if measured else {}) | ({"parameters": parameters} if parameters else {})
        for name, share, parameters in LAYERS
    ]  # fmt: skip
    found = needs(make(made, halves_cluster()))
    assert found.source == source
    assert found.need_us.tolist() == pytest.approx([35.0, 35.0, 35.0, 35.0, 0.0])
    made["layers"][1]["parameters"] = ["g3"]
    assert needs(make(made, halves_cluster())).need_us.tolist() == pytest.approx([140.0, 140.0, 140.0, 35.0, 0.0])
    made["layers"] = [layer | {"name": "x", "parameters": None} for layer in made["layers"]]
    assert needs(make(made, halves_cluster())).source == "backward's share of each layer"


def test_gradients_of_a_layer_are_needed_together() -> None:
    found = needs(make(document(layers=["a", "a", "b", "c", "c"]), halves_cluster()))
    assert found.ordered
    assert found.need_us.tolist() == pytest.approx([295.0, 295.0, 145.0, 0.0, 0.0])


def test_what_a_module_holds_beside_its_parts_is_needed_when_it_begins() -> None:
    made = document()
    for gradient, name in zip(made["compute"]["gradients"], ("token", "b.1.w", "b.gamma", "b.0.w", "a.w"), strict=True):
        gradient["name"] = name
    found = needs(make(made, halves_cluster()))
    assert found.need_us.tolist() == pytest.approx([0.0, 295.0, 45.0, 45.0, 0.0])
    assert not found.ordered


def test_the_plan_says_what_comes_when(tmp_path: Path) -> None:
    given = write(tmp_path / "profile.json", document(cluster=halves_cluster()))
    path = str(tmp_path / "plan.json")
    run("optimize", given, "-o", path, "--allow", "late-gather")
    plan = load_plan(path)
    assert plan.gathers
    assert plan.interface == ("late-gather",)
    assert plan == optimize(given, allow=LATE)
    run("explain", path)
    assert plan.updates is not None
    assert plan.predicted is not None
    step = plan.updates.step
    assert step is not None
    assert (step.sharded, step.gather) == (True, "forward")
    assert step.late_us == plan.predicted.iteration_us
    assert step.sharded_us is not None
    assert step.replicated_us is not None
    assert step.late_us <= 0.98 * min(step.sharded_us, step.replicated_us)
    exact, shared = optimize(given), optimize(given, allow=["sharded-step"])
    assert step.replicated_us == exact.predicted.iteration_us  # type: ignore[union-attr]
    assert step.sharded_us == shared.predicted.iteration_us  # type: ignore[union-attr]
    assert "late_us" not in json.dumps(exact.to_document() | shared.to_document())
    groups = step.gathers or tuple((bucket,) for bucket in reversed(range(len(plan.buckets))))
    assert sorted(bucket for group in groups for bucket in group) == list(range(len(plan.buckets)))
    assert plan.certificate is not None
    assert plan.certificate.lower_bound_us <= plan.predicted.iteration_us
    assert plan.predicted.exposed_us == pytest.approx(plan.predicted.iteration_us - 1050.0 - 100.0)
    (note,) = [note for note in plan.notes if "beside the next forward" in note]
    assert "when forward needs weights: by backward's share of each layer" in note
    assert any("exposed" in str(bucket.reason) for bucket in plan.buckets)
    bare = next(one for one in make_lineup(plan, None, []).variants if one.name == "none")
    assert bare.predicted_us == pytest.approx(1050.0 + 400.0)
    _, lost = stock_plan(plan)
    assert "every rank updates all weights" in lost[0]
    assert f"{(step.replicated_us - step.late_us) / 1e3:.2g}" in lost[0]
    assert parse_plan(plan.to_document()).digest() == plan.digest()


def grouped() -> Plan:
    """A plan of which several buckets are gathered together."""
    return lower(make(document(), halves_cluster()), late([1, 2, 5], [2, 5]))


def test_the_picture_has_both_steps() -> None:
    plan = grouped()
    assert plan.updates is not None
    assert plan.updates.step is not None
    assert plan.updates.step.gathers == ((2,), (1, 0))
    track = plan_tracks(plan, None)[0]
    (bars,) = [[bar for bar in track.bars if bar.task == "buckets 0-1 all_gather"]]
    assert [(bar.gradients, bar.first_name, bar.last_name, bar.size_bytes) for bar in bars] == [
        (2, "g0", "g1", 4 * 1050)
    ] * 2
    figure = timeline_figure([track])
    outlined = {trace["name"]: trace["meta"].get("critical") for trace in figure["data"]}
    assert set(outlined["communication"]) == {True, False}
    assert all(len(trace["meta"].get("critical", trace["x"])) == len(trace["x"]) for trace in figure["data"])
    events = [event for event in trace_document(plan)["traceEvents"] if event["name"] == "buckets 0-1 all_gather"]
    assert [event["args"]["gradients"] for event in events] == [["g0", "g1"]] * 2
    # Buckets' own times are those of their reduce-scatters.
    assert plan.predicted is not None
    assert all(start_us >= 350.0 for start_us, _ in filter(None, plan.predicted.bucket_times(3)))
    assert timeline_figure(plan_tracks(optimize(profile()), None))["data"][0]["meta"].keys() == {"role"}


@pytest.mark.parametrize(
    ("what", "given", "mode"),
    [
        ("forward hides gathers", profile(), LateGather),
        ("forward is too short", profile(forward_us=0.5, update_us=20_000.0), Sharded),
        ("and the update, too", profile(forward_us=0.5, update_us=1.0), type(Schedule(buckets=()).mode)),
        ("nobody measured the halves", profile(None), type(Schedule(buckets=()).mode)),
        ("one rank", parse_profile(document(cluster=halves_cluster(nodes=1))), type(Schedule(buckets=()).mode)),
    ],
)
def test_what_is_shortest_is_taken(what: str, given: Profile, mode: type) -> None:
    """All-reduces, a sharded step, gathers beside forward; what is not taken is said where it may be."""
    plan = optimize(given, allow=LATE)
    assert (plan.gathers is not None, plan.sharded) == (mode is LateGather, mode in (LateGather, Sharded)), what
    assert optimize(given, allow=["sharded-step"]).gathers is None
    assert optimize(given).sharded is False
    if what != "one rank":
        said = [note for note in plan.notes if "beside the next forward" in note]
        assert len(said) == 1
        assert ("as they may" in said[0]) == (mode is not LateGather)


def test_it_stays_off_where_it_cannot_be() -> None:
    other = document(cluster=halves_cluster())
    other["compute"]["optimizer"]["elementwise"] = False
    assert (
        optimize(parse_profile(other), allow=LATE, passes="merge,shard_updates,late_gather{when=always}").updates
        is None
    )
    assert not optimize(profile(), allow=LATE, passes="merge,shard_updates,late_gather{when=never}").gathers
    assert optimize(profile(), allow=LATE, passes="merge,late_gather").gathers
    slow = optimize(profile((500.0, 0.01)), allow=LATE, passes="merge,shard_updates,late_gather{when=always}")
    assert slow.gathers


def test_memory_counts() -> None:
    """A group of all buckets comes in memory of its own: where that does not fit, gathers stay in the step."""
    given = document(cluster=halves_cluster((30.0, 0.0)))
    plan = optimize(parse_profile(given), allow=LATE)
    assert plan.updates is not None
    assert plan.updates.step is not None
    needed = plan.updates.step.sharded_bytes
    assert needed is not None
    assert optimize(parse_profile(given), allow=LATE, max_memory_mib=needed / 2**20 * 1.001).gathers
    tight = optimize(parse_profile(given), allow=LATE, max_memory_mib=needed / 2**20 * 0.7)
    assert tight.sharded


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.floats(0.0, 200.0), st.floats(0.0, 0.02)),
    st.floats(0.0, 2000.0), st.floats(0.0, 2000.0), st.sampled_from([None, (1.1, 1.3), (1.5, 1.0)]),
)  # fmt: skip
def test_never_slower_than_what_it_starts_from(
    half: tuple[float, float], forward_us: float, update_us: float, contention: tuple[float, float] | None
) -> None:
    step = make(document(forward_us=forward_us, update_us=update_us), halves_cluster(half, contention=contention))
    start = Schedule.from_boundaries([1, 2, 3, 4, 5])
    for passes in ("merge", "merge,shard_updates", "shard_updates{step=always}"):
        before = run_passes(parse_passes(passes), start, step).schedule
        found = run_passes(parse_passes(f"{passes},late_gather"), start, step)
        assert step_us(step, found.schedule) <= step_us(step, before) * (1.0 + 1e-12)
        assert parse_schedule(str(found.schedule)) == found.schedule
        if before.mode == Sharded():
            always = run_passes(parse_passes(f"{passes},late_gather{{when=always}}"), start, step)
            assert step_us(step, always.schedule) <= step_us(step, before) * (1.0 + 1e-12)
            assert always.bound is not None
            assert always.bound.step_us <= step_us(step, always.schedule) * (1.0 + 1e-12)


def test_passes_behind_it_keep_it() -> None:
    step, given = make(document(), halves_cluster()), late([2, 5], [5])
    found = run_passes(parse_passes("merge"), given, step).schedule
    assert len(found.buckets) != len(given.buckets)
    assert found.mode == LateGather()
    verify(found, [0] * 5)


def test_what_is_sent_in_the_step_is_tried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the search has found, which need not be exact."""
    step = make(document(), halves_cluster())
    shared = run_passes(parse_passes("merge,shard_updates{step=always}"), Schedule.from_boundaries([5]), step).schedule
    poor = replace(late_gathers(step), schedule=late([5], [5]))
    assert step_us(step, poor.schedule) > step_us(step, shared)
    monkeypatch.setattr(late_gather_pass, "late_gathers", lambda _: poor)
    found = LateGathers(when="always").apply(shared, step).schedule
    assert found.buckets == shared.buckets
    assert step_us(step, found) <= step_us(step, shared)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (((1,), (0,)), "each of 3 buckets once"),
        (((2,), (1,), (1, 0)), "each of 3 buckets once"),
        (((1,), (2, 0)), "gather 1: found buckets 0,2, expected one or several without a gap"),
        (((2, 1, 0), ()), "gather 1: found buckets none"),
        (((3, 2), (1,), (0,)), "each of 3 buckets once"),
    ],
)
def test_groups_that_cannot_be_are_refused(groups: tuple[tuple[int, ...], ...], words: str) -> None:
    schedule = Schedule.from_boundaries([1, 2, 5])
    with pytest.raises(VerifyError, match=words):
        verify(replace(schedule, mode=LateGather(groups)), [0] * 5)
    verify(replace(schedule, mode=LateGather(((2, 1), (0,)))), [0] * 5)


def test_baselines_are_cut_by_size() -> None:
    """DeAR's best threshold of its sweep; no choice of a threshold is shorter than what is chosen for both windows."""
    rng = np.random.default_rng(9)
    for _ in range(4):
        problem, _ = random_step(rng, 30)
        best_us = step_us(problem, make_schedule(problem, "dear"))
        swept = [make_schedule(problem, f"dear:{threshold!r}") for threshold in THRESHOLDS_MIB]
        assert best_us == pytest.approx(min(step_us(problem, one) for one in swept))
        assert step_us(problem, late_gathers(problem).schedule) <= best_us * (1.0 + 1e-12)
    step = make(document([(30_000_000, 1.0), (20_000_000, 1.0), (1, 1.0), (50_000_000, 1.0)]), halves_cluster())
    assert str(make_schedule(step, "megatron")) == (
        "late_gather\n[0-1] all_reduce/library none\n[2-3] all_reduce/library none"
    )
    assert make_schedule(step, "megatron:1").stops == (1, 2, 4)
    assert make_schedule(step, "dear:100").stops == (1, 4)
