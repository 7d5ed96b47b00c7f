"""What a profile is asked for, its phases and their budget; and what plans say that ask for more than was measured."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import cluster_document, profile_document

from planner import optimize
from planner.documents.profile import (
    Cluster,
    ComputeIntervals,
    Contention,
    Profile,
    parse_cluster,
    parse_profile,
    unmeasured,
)
from planner.profile import request
from planner.profile.request import (
    CONTENTION,
    DELAY,
    FLAT,
    LAYERS,
    NORMS,
    REPEATS,
    SELECTION,
    Phase,
    Phases,
    Wanted,
    heard,
    make_request,
)
from planner.report.tables import accuracy_lines, uncertainty_line
from runtime.comm.world import World
from runtime.errors import InputError

LINES = {"alpha_us": 1.0, "beta_us_per_byte": 0.0}
ROWS = [(1000, 50.0)] * 6


def profile(measured_for: str | None = None, **fields: Any) -> Profile:
    """Six gradients on four ranks; the cluster says what it was measured for."""
    document = {**profile_document(ROWS), "cluster": cluster_document(nodes=4, **fields)}
    found = parse_profile(document)
    assert found.cluster is not None
    return replace(found, cluster=replace(found.cluster, measured_for=measured_for))


def wanted(accuracy: Any, known: Cluster | None = None, ranks: int = 4, **fields: bool) -> Wanted:
    """What is measured, by default where ranks could not share the optimizer's step."""
    return Wanted.of(accuracy, ranks, **{"two_links": False, "halves": False, "norms": False, **fields}, known=known)


def test_exact_plans_ask_for_less_than_bounded_ones_and_those_for_less_than_relaxed_ones() -> None:
    classes = ("exact", "bounded", "relaxed")
    phases = {accuracy: [phase.name for phase in wanted(accuracy).phases] for accuracy in classes}
    assert phases["exact"] == [REPEATS, FLAT, LAYERS, CONTENTION]
    assert phases["bounded"] == [*phases["exact"], SELECTION]
    assert phases["relaxed"] == [*phases["bounded"], DELAY]
    flat = [wanted(accuracy).flat for accuracy in classes]
    halves = ("all_reduce", "reduce_scatter", "all_gather")
    assert flat == [
        ("all_reduce",),
        ("all_reduce", "all_gather", "two_shot", "native"),
        (*halves, "two_shot", "native"),
    ]
    assert wanted("exact", halves=True).flat == halves
    assert [phase.name for phase in wanted("relaxed", ranks=1, norms=True).phases] == [REPEATS, NORMS, LAYERS]


def test_only_what_is_missing_is_added() -> None:
    curve = ((1.0, 1.0),)
    exact = replace(parse_cluster(cluster_document()), samples={"all_reduce": curve, "reduce_scatter": curve})
    more = wanted("relaxed", exact)
    assert more.flat == ("all_gather", "two_shot", "native")
    assert (more.step, more.beside, more.selection, more.delay) == (False, (), True, True)
    contended = replace(exact, contention=Contention(compute=1.1, network=1.2, by_size=((1.0, 1.1, 1.2),)))
    assert wanted("bounded", contended).beside == ("all_gather",)
    assert wanted("exact", exact).phases == ()
    two_links = wanted("bounded", replace(exact, samples={"intra/all_reduce": curve}), two_links=True)
    assert (two_links.inside, two_links.between) == (("reduce_scatter", "all_gather"), ("all_reduce", "all_gather"))


def test_phases_share_what_is_left_of_the_budget(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(request.time, "perf_counter", lambda: now_s[0])
    phases = Phases([Phase("a", 20.0), Phase("b", 20.0), Phase("c", 20.0), Phase("d", 10.0)], 60.0, first=True)
    with caplog.at_level(logging.INFO):
        assert phases.begin("a", World()) == pytest.approx(20.0 * 60.0 / 70.0)
        now_s[0] += 5.0
        assert phases.begin("b", World()) == 20.0
        now_s[0] += 47.0
        phases.leave_out(7.0)
        assert phases.begin("c", World()) == pytest.approx(10.0)
        now_s[0] += 70.0  # longer than it may: what is left still gets its least
        assert phases.begin("d", World()) == request.LEAST_S
    assert [record.message for record in caplog.records] == [
        "profile: 1/4 a: up to 17 s; 60 s with all that follows",
        "profile: 2/4 b: up to 20 s; 50 s with all that follows",
        "profile: 3/4 c: up to 10 s; 15 s with all that follows",
        "profile: 4/4 d: up to 2 s",
    ]


def test_lines_are_seen_where_nobody_has_configured_logging(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, root.handlers[:] = root.handlers[:], []
    try:
        with heard():
            Phases([], 60.0, first=True).say("here")
        Phases([], 60.0, first=True).say("later")
    finally:
        root.handlers[:] = handlers
    assert capsys.readouterr() == ("", "profile: here\n")


def test_what_was_not_measured_is_refused_with_the_command_that_adds_it(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile("exact").save(path)
    with pytest.raises(InputError) as refused:
        optimize(path, accuracy="bounded")
    assert f"`planner profile JOB --for bounded --add-to {path}` adds it" in str(refused.value)
    with pytest.raises(InputError, match="measured for bounded plans, expected one for relaxed plans"):
        optimize(profile("bounded", sparsify=LINES), accuracy="relaxed")
    for known in (profile(), profile("relaxed")):  # written by hand, or with everything
        assert optimize(known, accuracy="relaxed").predicted is not None


def test_every_class_that_was_not_measured_has_a_line() -> None:
    exact = profile("exact")
    assert exact.cluster is not None
    lines = accuracy_lines(optimize(exact), unmeasured(exact.cluster, "here.json"))
    assert lines[1].startswith("bounded  not measured: gathers, and what selecting and encoding elements costs; ")
    assert lines[2].endswith("`planner profile JOB --for relaxed --add-to here.json` adds it")
    assert unmeasured(replace(exact.cluster, nodes=1), "here.json") == {}


def test_a_prediction_says_how_uncertain_it_is() -> None:
    noisy = profile()
    assert uncertainty_line(optimize(noisy)) == ""
    interval = (1000.0, 1200.0)
    intervals = ComputeIntervals(forward_us=interval, backward_us=interval, step_us=interval)
    plan = optimize(replace(noisy, compute=replace(noisy.compute, intervals=intervals)))
    assert plan.predicted is not None
    assert plan.predicted.compute_spread_us == 200.0
    assert " ms ± 0.1: compute varied by " in uncertainty_line(plan)
    assert "measure again" in uncertainty_line(plan)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("fast", None, None, None), "found a profile for 'fast' plans, expected one of: exact, bounded, relaxed"),
        (("exact", None, None, 2), "--for exact: found --updaters 2, which are for relaxed plans"),
        ((None, None, 1.0, None), "found a budget of 1 seconds"),
        ((None, None, float("nan"), None), "found a budget of nan seconds"),
    ],
)
def test_wrong_requests_are_refused(options: tuple[Any, ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make_request(*options)
    assert make_request(None, None, None, 2).accuracy == "relaxed"
