"""The task graph against the recurrences, by hand, and its critical path."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from builders import cluster_document, make, problems, profile_document
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.decide.strategies import make_schedule
from planner.ir import Schedule
from planner.model.modes import simulate_schedule
from planner.model.problem import Problem
from planner.model.taskgraph import Task, TaskGraph, build_graph, run_graph
from planner.search.local_search import choice_of, neighbours, stops_of
from planner.search.merge_phased import PhasedProblem, merge_phased, replay
from planner.strategies.topologies import phased_problem
from runtime.plan.transports import TORUS_2D

LINKS = {
    "intra": {"alpha_us": 5.0, "beta_us_per_byte": 0.001},
    "inter": {"alpha_us": 20.0, "beta_us_per_byte": 0.01},
}


def problem_of(
    rows: list[tuple[int, float]], contention: tuple[float, float] | None = None, ranks_per_node: int = 1
) -> Problem:
    """Gradients on a cluster of four nodes with two kinds of link."""
    cluster = cluster_document(None, contention=contention, ranks_per_node=ranks_per_node, **LINKS)
    return make(profile_document(rows), cluster)


rows_drawn = st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 300)), min_size=1, max_size=12)
factors_drawn = st.none() | st.tuples(st.floats(1, 3), st.floats(1, 3))


@given(rows_drawn, factors_drawn, st.sampled_from(["wfbp", "single", "optimal"]))
def test_agrees_with_the_recurrences(
    rows: list[tuple[int, float]], contention: tuple[float, float] | None, strategy: str
) -> None:
    problem = problem_of(rows, contention)
    schedule = make_schedule(problem, strategy)
    factors = {"compute": problem.contention.compute, "network": problem.contention.network}
    run = run_graph(build_graph(problem, schedule), factors)
    timeline = simulate_schedule(problem, schedule)
    assert run.total_us == pytest.approx(timeline.iteration_us, rel=1e-9)
    sent = [span.end_us for span in run.spans() if span.resource == "network"]
    assert sent == pytest.approx([span.end_us for span in timeline.on("network")], rel=1e-9)


@given(problems(contention=True, mixed=True), st.sampled_from(["wfbp", "single", "optimal"]))
def test_agrees_where_factors_depend_on_the_size(problem: Problem, strategy: str) -> None:
    schedule = make_schedule(problem, strategy)
    factors = {"compute": problem.contention.compute, "network": problem.contention.network}
    run = run_graph(build_graph(problem, schedule), factors)
    assert run.total_us == pytest.approx(simulate_schedule(problem, schedule).iteration_us, rel=1e-9, abs=1e-6)


@given(rows_drawn, factors_drawn, st.integers(2, 3))
def test_steps_follow_one_another(
    rows: list[tuple[int, float]], contention: tuple[float, float] | None, steps: int
) -> None:
    """An exact step ends before the next begins, so that several take as long as they do one by one."""
    problem = problem_of(rows, contention, ranks_per_node=2)
    schedule = make_schedule(problem, "torus_2d")
    factors = {"compute": problem.contention.compute, "network": problem.contention.network}
    one, several = (run_graph(build_graph(problem, schedule, count), factors) for count in (1, steps))
    assert several.total_us == pytest.approx(steps * one.total_us, rel=1e-9)


@given(rows_drawn, factors_drawn)
def test_the_critical_path_has_no_gap(rows: list[tuple[int, float]], contention: tuple[float, float] | None) -> None:
    problem = problem_of(rows, contention, ranks_per_node=2)
    factors = {"compute": problem.contention.compute, "network": problem.contention.network}
    run = run_graph(build_graph(problem, make_schedule(problem, "torus_2d")), factors)
    path = run.critical_path()
    assert run.start_us[path[0]] == 0.0
    assert run.end_us[path[-1]] == run.total_us
    for before, after in itertools.pairwise(path):
        assert run.end_us[before] == run.start_us[after]
    assert sum(run.shares().values()) == pytest.approx(1.0)


def test_phases_of_neighbouring_buckets_overlap() -> None:
    """By hand: forward 100; two buckets ready at 110 and 120; phases of 3, 30 and 2 on intra, inter and intra."""
    graph = TaskGraph()
    for name, duration_us, link in (("forward", 100, "compute"), ("a", 10, "compute"), ("b", 10, "compute")):
        graph.add(Task(name=name, kind=name, resource=link, duration_us=duration_us), after=range(len(graph.tasks)))
    scatter = [graph.add(Task(name="s", kind="s", resource="intra", duration_us=3), [ready]) for ready in (1, 2)]
    sums = [graph.add(Task(name="r", kind="r", resource="inter", duration_us=30), [before]) for before in scatter]
    for before in sums:
        graph.add(Task(name="g", kind="g", resource="intra", duration_us=2), [before])
    run = run_graph(graph)
    assert run.end_us == [100, 110, 120, 113, 123, 143, 173, 145, 175]
    assert run.critical_path() == [0, 1, 3, 5, 6, 8]


def test_an_order_that_contradicts_itself_is_refused() -> None:
    graph = TaskGraph()
    first = graph.add(Task(name="first", kind="x", resource="network", duration_us=1.0))
    second = graph.add(Task(name="second", kind="x", resource="network", duration_us=1.0))
    graph.graph.add_edge(second, first)
    with pytest.raises(ValueError, match="contradicts"):
        run_graph(graph)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 300)), min_size=1, max_size=8))
def test_two_links_are_merged_as_well_as_by_brute_force_nearly_always(rows: list[tuple[int, float]]) -> None:
    """The search is no proof: it is held against all merges, and never loses more than a twentieth here."""
    problem = problem_of(rows, ranks_per_node=2)
    found = simulate_schedule(problem, make_schedule(problem, "torus_2d")).iteration_us
    cuts = range(1, problem.count)
    every = (
        simulate_schedule(problem, Schedule.from_boundaries([*chosen, problem.count], TORUS_2D)).iteration_us
        for size in range(problem.count)
        for chosen in itertools.combinations(cuts, size)
    )
    assert found <= min(every) * 1.05


@given(rows_drawn, st.data())
def test_replays_of_moves_equal_full_replays(rows: list[tuple[int, float]], data: st.DataObject) -> None:
    """What the search computes from the moved boundary on, bit for bit."""
    problem = phased_problem(problem_of(rows, ranks_per_node=2))
    assert problem is not None
    count = len(rows)
    stops = tuple(sorted(data.draw(st.sets(st.integers(1, count))) | {count}))
    judge, choice = replay(problem), choice_of(stops)
    assert judge.begin(choice) == problem.end_us(stops)
    for index in range(len(stops)):
        trials = list(neighbours(choice, index))
        judge.look_up(trials, index, 2)
        for trial in trials:
            assert judge.end_us(trial, index) == problem.end_us(stops_of(trial))


def test_the_search_never_loses_to_what_it_began_with() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        ready_us = np.cumsum(generator.uniform(0, 100, 30))
        size = np.concatenate([[0.0], np.cumsum(generator.uniform(1, 1000, 30))])

        def cost(factor: float, size: np.ndarray = size) -> object:
            return lambda a, b: 50.0 + factor * (size[b] - size[a])

        problem = PhasedProblem(ready_us, ("intra", "inter", "intra"), (cost(0.1), cost(1.0), cost(0.2)))  # type: ignore[arg-type]
        starts = [(30,), tuple(range(1, 31))]
        found = merge_phased(problem, starts)
        assert problem.end_us(found) <= min(problem.end_us(stops) for stops in starts)
        assert math.isfinite(problem.end_us(found))
