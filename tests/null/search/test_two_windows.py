"""Both halves of the all-reduce cut together: against every way to cut both, and against the sum of both optima."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from builders import cluster_document, make, profile_document
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.model.forward import needs
from planner.model.modes import step_us
from planner.model.modes.late_gather import by_need, of_stops
from planner.model.problem import Problem
from planner.passes.late_gather import late_gathers, windows_of
from planner.search import two_windows as program
from planner.search.two_windows import Cuts, two_windows

HALVES = ("reduce_scatter", "all_gather")


def document(rows: Sequence[tuple[int, float]], order: Sequence[int] | None = None, **options: Any) -> dict[str, Any]:
    """A step with AdamW; `order`: of the gradients' layers in forward, where it is not the reverse of readiness."""
    made = profile_document(rows, **options)
    made["compute"]["optimizer"] = {"name": "AdamW", "adaptive": True, "elementwise": True, "holds_all": True}
    if order is not None:
        made["layers"] = [
            {"name": f"layer{i}", "kind": "linear", "flops": 1.0, "activation_bytes": 0.0, "forward_us": 1.0 + i % 3}
            for i in order
        ]
    return made


def halves_of(curves: Sequence[tuple[float, float]], whole: tuple[float, float] = (0.0, 0.0)) -> dict[str, Any]:
    """Four ranks; reduce-scatter and all-gather are lines (start-up, per byte)."""
    made = cluster_document(whole)
    for name, (alpha_us, beta) in zip(HALVES, curves, strict=True):
        made["collectives"][name] = {"alpha_us": alpha_us, "beta_us_per_byte": beta}
    return made


def shortest_us(problem: Problem) -> float:
    """Of every choice of buckets, and of whole buckets that are gathered together, each in the best order."""
    found = []
    for ends in itertools.product(("none", "bucket", "group"), repeat=problem.count - 1):
        buckets = [place for place, end in enumerate(ends, start=1) if end != "none"]
        groups = [place for place, end in enumerate(ends, start=1) if end == "group"]
        schedule = of_stops([*buckets, problem.count], [*groups, problem.count])
        found.append(step_us(problem, by_need(problem, schedule)))
    return min(found)


def check(problem: Problem) -> None:
    """As short as the shortest, and no bound above it."""
    best_us, found = shortest_us(problem), late_gathers(problem)
    assert found.bound.step_us <= best_us * (1.0 + 1e-12)
    assert step_us(problem, found.schedule) >= best_us * (1.0 - 1e-12)
    if found.proven:
        assert step_us(problem, found.schedule) == pytest.approx(best_us, rel=1e-12)


def random_step(rng: np.random.Generator, count: int, kind: str, **options: Any) -> Problem:
    """Real-valued numbers without ties; costs are lines, or samples that go up and down."""
    numel = (10 ** rng.uniform(1, 5.5, count)).astype(int)
    backward_us = rng.exponential(rng.choice([30.0, 300.0]), count)
    forward_us = float(rng.choice([0.3, 0.5, 1.0]) * backward_us.sum())
    start_up_us, beta = float(rng.uniform(1, 200)), float(10 ** rng.uniform(-4.5, -2.5))
    machines = halves_of([(start_up_us * rng.uniform(0.4, 1.2), beta / 2) for _ in HALVES], (start_up_us, beta))
    machines |= {"contention": options.pop("contention")} if "contention" in options else {}
    if kind == "jagged":
        sizes = np.sort(10 ** rng.uniform(1, 6.5, 12))
        machines["samples"] = {
            name: np.column_stack([sizes, (start_up_us + beta * sizes) * rng.uniform(0.4, 1.2, 12)]).tolist()
            for name in HALVES
        }
    rows = list(zip(numel.tolist(), backward_us.tolist(), strict=True))
    return make(document(rows, forward_us=forward_us, **options), machines)


@pytest.mark.parametrize("kind", ["line", "jagged"])
def test_every_way_to_cut_both_windows(kind: str) -> None:
    rng, met = np.random.default_rng(7), 0
    for count in [1, 2, 3, 4, 5, 5, 6, 6, 6, 6, 7, 7]:
        problem = random_step(rng, count, kind)
        check(problem)
        assert late_gathers(problem).proven
        windows = windows_of(problem)
        solution = two_windows(windows)
        met += windows.end_us(solution.buckets, solution.groups) <= sum(solution.bounds_us) - windows.forward_us + 1e-9
    assert met > 0  # both optima at once


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 64, 1000, 4000]), st.integers(0, 8).map(lambda n: n * 25.0)), min_size=1,
             max_size=6),
    st.tuples(*[st.tuples(st.integers(0, 8).map(lambda n: n * 12.5), st.integers(0, 16).map(lambda n: n / 256))] * 2),
    st.integers(0, 20).map(lambda n: n * 25.0),
)  # fmt: skip
def test_ties_on_a_grid(
    rows: list[tuple[int, float]], curves: tuple[tuple[float, float], ...], forward_us: float
) -> None:
    """Equal ready times, free messages, a forward of no length."""
    problem = make(document(rows, forward_us=forward_us), halves_of(curves))
    check(problem)
    assert late_gathers(problem).proven


def test_layers_in_another_order_than_backward() -> None:
    """The bound holds for every order of launch; here the program's own is not proven to be the best."""
    rng, unordered = np.random.default_rng(3), 0
    for count in [3, 4, 5, 5, 6, 6]:
        problem = random_step(rng, count, "line", order=rng.permutation(count).tolist())
        check(problem)
        unordered += not needs(problem).ordered
        assert late_gathers(problem).proven <= needs(problem).ordered
    assert unordered >= 4


def test_bounds_hold_where_both_slow_each_other_down() -> None:
    rng = np.random.default_rng(5)
    for count, compute, network in [(3, 1.2, 1.4), (4, 1.0, 2.0), (5, 1.5, 1.5), (5, 1.05, 1.1), (6, 3.0, 1.2)]:
        check(random_step(rng, count, "line", contention={"compute": compute, "network": network}))


@pytest.mark.parametrize("kind", ["line", "jagged"])
def test_labels_alone_find_the_best(kind: str) -> None:
    """From one message for all, against every way to cut both windows."""
    rng, apart = np.random.default_rng(13), 0
    for count in [2, 3, *[4] * 4, *[5] * 10, *[6] * 10, *[7] * 8, 8, 8]:
        windows = windows_of(random_step(rng, count, kind)).on(np.arange(count + 1))
        ends = itertools.product(("none", "bucket", "group"), repeat=count - 1)
        every = [
            (
                (*(place for place, end in enumerate(of, start=1) if end != "none"), count),
                (*(place for place, end in enumerate(of, start=1) if end == "group"), count),
            )
            for of in ends
        ]
        best_us = min(windows.end_us(*cuts) for cuts in every)
        found, complete = program._improved(windows, ((count,), (count,)), None)
        assert complete
        assert windows.end_us(*found) == pytest.approx(best_us, rel=1e-12)
        apart += found[0] != found[1]
    assert apart > 10


def coupled() -> Problem:
    """Each window's optimum cuts where the other's does not: bytes and times of opposite gradients."""
    rng = np.random.default_rng(11)
    for _ in range(3_000):
        problem = random_step(rng, 7, "jagged")
        windows = windows_of(problem).on(np.arange(8))
        cuts, goal_us = program._from_optima(windows, ())
        if windows.end_us(*cuts) > goal_us * (1.0 + 1e-6) and program._improved(windows, cuts, None)[0] != cuts:
            return problem
    raise AssertionError("no such problem among those drawn")


def test_labels_find_what_neither_optimum_has() -> None:
    """A problem on which both optima, and what each completes, are not enough."""
    problem = coupled()
    check(problem)
    windows = windows_of(problem)

    def end_us(cuts: Cuts) -> float:
        return windows.end_us(*cuts)

    first, _ = program._from_optima(windows, ())
    found = two_windows(windows)
    assert found.exact
    assert end_us((found.buckets, found.groups)) < end_us(first)
    few = two_windows(windows, labels=1)
    assert end_us((found.buckets, found.groups)) <= end_us((few.buckets, few.groups)) <= end_us(first)


@pytest.mark.parametrize("places", [8, 20])
def test_more_gradients_than_places(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound and not called exact; never better than with all places, nor worse than the plans that are known."""
    problem = random_step(np.random.default_rng(2), 60, "line")
    windows = windows_of(problem)
    whole = two_windows(windows)
    monkeypatch.setattr(program, "MAX_PLACES", places)
    coarse = two_windows(windows, [(60,)])
    assert not coarse.exact
    assert set(coarse.groups) <= set(coarse.buckets)
    assert coarse.buckets[-1] == coarse.groups[-1] == 60
    ends_us = [windows.end_us(found.buckets, found.groups) for found in (whole, coarse)]
    assert sum(whole.bounds_us) - windows.forward_us <= ends_us[0] * (1.0 + 1e-12)
    assert coarse.bounds_us == pytest.approx(whole.bounds_us)
    assert ends_us[0] <= ends_us[1] * (1.0 + 1e-12)
    assert ends_us[1] <= windows.end_us((60,), (60,))


def test_no_message_more_than_needed() -> None:
    """Where all is hidden but the ends, one gather less or one bucket less would cost time."""
    problem = random_step(np.random.default_rng(4), 30, "line")
    found, windows = late_gathers(problem).solution, windows_of(problem)
    end_us = windows.end_us(found.buckets, found.groups)
    for stop in found.groups[:-1]:
        assert windows.end_us(found.buckets, tuple(one for one in found.groups if one != stop)) > end_us
    for stop in set(found.buckets[:-1]) - set(found.groups):
        assert windows.end_us(tuple(one for one in found.buckets if one != stop), found.groups) > end_us
