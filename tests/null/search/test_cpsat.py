"""The constraint program against brute force, the dynamic programs and the search on two links; and `--solver`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import reference
from builders import cluster_document, make, problems, profile_document, random_problem, usual_profile
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import optimize, simulate
from planner.decide.strategies import make_schedule
from planner.ir import Schedule
from planner.model.modes import simulate_schedule
from planner.model.problem import Problem
from planner.model.step import Overlap
from planner.passes.merge import boundaries, merge_problem, merge_without_contention
from planner.report.tables import certificate_text
from planner.search.cpsat import MAX_GRADIENTS, solve_merge, solve_two_links
from planner.search.merge import MergeSolution
from planner.search.merge_contended import end_us
from planner.search.merge_phased import PhasedProblem
from planner.strategies.topologies import phased_problem
from runtime.errors import CheckFailed, InputError
from runtime.plan import parse_plan
from runtime.plan.transports import TORUS_2D

SHORT = 0.3
"""Deterministic time enough for small problems."""


def check_against_brute_force(problem: Problem) -> None:
    """From the worst hint to the optimum, proved."""
    _, best_us = reference.best_stops(problem)
    solution = solve_merge(merge_problem(problem), (problem.count,))
    assert solution.proven
    assert best_us - solution.error_us - 1e-9 <= solution.bound_us <= best_us * (1 + 1e-12)
    found_us = reference.network_end_us(problem, reference.buckets_of(solution.stops))
    assert found_us <= best_us + solution.error_us + 1e-9
    assert merge_without_contention(problem).end_us == pytest.approx(solution.bound_us, abs=solution.error_us + 1e-9)


@settings(max_examples=60)
@given(problems(max_count=7, mixed=True))
def test_equals_brute_force_and_the_program_on_a_grid(problem: Problem) -> None:
    check_against_brute_force(problem)


@pytest.mark.parametrize("kind", ["line", "monotone", "jagged"])
def test_equals_brute_force_and_the_program(kind: str) -> None:
    rng = np.random.default_rng(3)
    for count in range(1, 10):
        check_against_brute_force(random_problem(rng, count, kind))


@settings(max_examples=40)
@given(problems(max_count=6, contention=True))
def test_with_contention_the_bound_holds_and_the_result_is_no_worse(problem: Problem) -> None:
    arrays, overlap = merge_problem(problem), Overlap.of(problem)
    best_us = min(end_us(arrays, overlap, stops) for stops in reference.all_stops(problem.count))
    hint = boundaries(make_schedule(problem, "optimal"))
    assert hint is not None
    solution = solve_merge(arrays, hint, overlap, SHORT)
    assert solution.bound_us <= best_us * (1 + 1e-12)


def test_with_contention_the_bound_is_nearly_always_the_optimum() -> None:
    """Not always: the model may wait, which no schedule does. It is never below that without factors."""
    exact = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, 6, "line", contention=(1.07, 1.3))
        arrays, overlap = merge_problem(problem), Overlap.of(problem)
        best_us, best = min((end_us(arrays, overlap, stops), stops) for stops in reference.all_stops(6))
        solution = solve_merge(arrays, best, overlap, SHORT)
        assert solution.bound_us <= best_us
        exact += solution.proven and solution.bound_us >= best_us - solution.error_us
        assert solution.bound_us >= merge_without_contention(problem).end_us - solution.error_us
    assert exact >= 18


def two_links(rng: np.random.Generator, count: int, ranks_per_node: int = 4, **options: Any) -> Problem:
    """Gradients on four nodes, whose inner links are now and then the slower ones."""
    numel = (10 ** rng.uniform(2, 5, count)).astype(int)
    rows = list(zip(numel.tolist(), rng.exponential(100.0, count).tolist(), strict=True))
    intra = {"alpha_us": 5.0, "beta_us_per_byte": float(10 ** rng.uniform(-5, -2))}
    links = {"intra": intra, "inter": {"alpha_us": 20.0, "beta_us_per_byte": 1e-3}}
    return make(profile_document(rows, **options), cluster_document(None, ranks_per_node=ranks_per_node, **links))


def arrays_of(problem: Problem) -> PhasedProblem:
    arrays = phased_problem(problem)
    assert arrays is not None
    return arrays


@pytest.mark.parametrize("mixed", [False, True])
def test_two_links_equal_brute_force(mixed: bool) -> None:
    """From the worst hint; the search that is the default, which keeps all labels here, finds the same."""
    for seed in range(15):
        rng = np.random.default_rng(seed)
        count = int(rng.integers(1, 8))
        dtypes = rng.choice(["float32", "bfloat16"], count).tolist() if mixed else None
        problem = two_links(rng, count, dtypes=dtypes)
        arrays = arrays_of(problem)
        best_us = min(arrays.end_us(stops) for stops in reference.all_stops(count))
        solution = solve_two_links(arrays, (count,))
        assert solution.proven
        assert best_us - solution.error_us <= solution.bound_us <= best_us * (1 + 1e-12)
        assert arrays.end_us(solution.stops) <= best_us + solution.error_us
        assert boundaries(make_schedule(problem, "torus_2d"), TORUS_2D) is not None
        found = make_schedule(problem, "torus_2d")
        assert solution.bound_us <= simulate_schedule(problem, found).iteration_us <= best_us * 1.05 + 10.0


def test_two_links_of_one_kind_are_one_network() -> None:
    problem = two_links(np.random.default_rng(0), 6, ranks_per_node=1)
    arrays = arrays_of(problem)
    best_us = min(arrays.end_us(stops) for stops in reference.all_stops(6))
    assert solve_two_links(arrays, (6,)).bound_us == pytest.approx(best_us, rel=1e-6)


@pytest.mark.parametrize("kind", ["line", "jagged"])
def test_many_gradients_end_at_the_limit_with_a_bound(kind: str) -> None:
    problem = random_problem(np.random.default_rng(300), 300, kind)
    optimum = merge_without_contention(problem)
    solution = solve_merge(merge_problem(problem), optimum.stops, limit=0.05)
    assert not solution.proven
    assert 0.9 * optimum.end_us < solution.bound_us <= optimum.end_us * (1 + 1e-12)


def test_too_many_gradients_are_refused() -> None:
    problem = random_problem(np.random.default_rng(0), MAX_GRADIENTS + 1, "line")
    with pytest.raises(InputError, match="found 601 gradients, expected at most 600; use the solver dp"):
        optimize(problem.profile, problem.cost.cluster, solver="cpsat")


def document(problem: Problem, **options: Any) -> str:
    return json.dumps(optimize(problem.profile, problem.cost.cluster, **options).to_document())


@pytest.mark.parametrize("contention", [None, (1.1, 1.3)])
def test_equal_inputs_give_equal_plans_that_are_no_worse(contention: tuple[float, float] | None) -> None:
    for count in (3, 40):
        problem = random_problem(np.random.default_rng(count), count, "line", contention=contention)
        options: dict[str, Any] = {"solver": "cpsat", "solver_limit": SHORT}
        text = document(problem, **options)
        assert text == document(problem, **options)
        plan, usual = parse_plan(json.loads(text)), optimize(problem.profile, problem.cost.cluster)
        assert plan.predicted is not None
        assert usual.predicted is not None
        assert plan.predicted.iteration_us <= usual.predicted.iteration_us * (1 + 1e-12)
        assert plan.certificate is not None
        assert plan.certificate.solver is not None
        assert usual.certificate is not None
        assert usual.certificate.solver is None
        assert plan.certificate.solver.bound_us <= plan.certificate.lower_bound_us <= plan.predicted.iteration_us
        assert plan.certificate.lower_bound_us >= usual.certificate.lower_bound_us
        if contention is None:
            assert [b.gradients for b in plan.buckets] == [b.gradients for b in usual.buckets]


def test_explain_says_the_bound_in_words() -> None:
    plan = optimize(usual_profile(), solver="cpsat")
    assert plan.certificate is not None
    assert plan.certificate.solver is not None
    assert plan.certificate.solver.proven
    bound = f"{plan.certificate.solver.bound_us / 1000:,.4g} ms"
    assert f"CP-SAT proved by itself that no plan takes less than {bound}" in certificate_text(plan)
    large = random_problem(np.random.default_rng(1), 150, "line", contention=(1.1, 1.2))
    text = certificate_text(optimize(large.profile, large.cost.cluster, solver="cpsat", solver_limit=0.01))
    assert "CP-SAT ended at its limit of 0.01 in deterministic time, having proved that no plan takes less than" in text


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_contradiction_fails_the_check(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dynamic program that says more, or less, than is true does not go unnoticed."""
    problem = random_problem(np.random.default_rng(2), 8, "line")
    true = merge_without_contention(problem)
    wrong = MergeSolution(true.stops, true.end_us * factor)
    monkeypatch.setattr("planner.decide.solvers.merge_without_contention", lambda _: wrong)
    with pytest.raises(CheckFailed, match="a defect of the planner"):
        optimize(problem.profile, problem.cost.cluster, solver="cpsat")


def test_simulate_gives_bounds_for_what_can_be_solved() -> None:
    problem = two_links(np.random.default_rng(5), 6)
    names = ["wfbp", "optimal", "torus_2d"]
    records = simulate(problem.profile, problem.cost.cluster, strategies=names, solver="cpsat")
    usual = simulate(problem.profile, problem.cost.cluster, strategies=names)
    assert [record.lower_bound_us for record in usual] == [None] * 3
    assert records[0] == usual[0]
    for record, before in zip(records[1:], usual[1:], strict=True):
        assert record.lower_bound_us is not None
        assert record.lower_bound_us <= record.iteration_us <= before.iteration_us * (1 + 1e-12)
        assert record.lower_bound_us == pytest.approx(record.iteration_us, rel=1e-4)


@given(st.integers(1, 5))
@settings(max_examples=5)
def test_one_rank_sends_nothing(count: int) -> None:
    problem = make(profile_document([(10, 1.0)] * count), cluster_document(None, nodes=1))
    [optimal, torus] = simulate(
        problem.profile, problem.cost.cluster, strategies=["optimal", "torus_2d"], solver="cpsat"
    )
    assert optimal.lower_bound_us == optimal.iteration_us
    assert torus.lower_bound_us is None


def test_hints_of_any_shape_are_taken() -> None:
    """A schedule that is no run of consecutive gradients gives the program's optimum as the hint."""
    assert boundaries(Schedule.from_boundaries([2, 3])) == (2, 3)
    assert boundaries(Schedule.from_boundaries([2, 3], TORUS_2D)) is None
