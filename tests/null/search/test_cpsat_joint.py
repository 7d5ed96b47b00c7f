"""Merging and densities together: the constraint program against trying everything, and against the labels."""

from __future__ import annotations

import numpy as np
import pytest
import sparse_reference
from builders import cluster_document, make, profile_document
from forms import at_ratios
from hypothesis import given, settings
from test_joint import RATIOS, sparse_problems

from planner import optimize
from planner.model.compression import make_limits, ratio_limits
from planner.model.problem import Problem
from planner.search.cpsat_joint import solve_joint
from planner.search.labels import search
from planner.search.tables import BucketTables, bucket_tables, flat_forms

LIMIT = 4.0


def tables_of(problem: Problem) -> BucketTables:
    limits = make_limits(problem, 64.0)
    return bucket_tables(problem, flat_forms(at_ratios(*RATIOS)), limits, np.arange(problem.count + 1))


def known_us(tables: BucketTables) -> float:
    """One dense bucket."""
    return max(tables.compute_end_us, float(tables.ready_us[-1] + tables.cost_us[0, 0, -1]))


@settings(max_examples=25)
@given(sparse_problems(max_count=4))
def test_equals_trying_everything_and_the_labels(problem: Problem) -> None:
    tables = tables_of(problem)
    solution = solve_joint(tables, 4, known_us(tables), LIMIT)
    assert solution.proven
    best_us, _ = sparse_reference.best(problem, ratio_limits(problem, 64.0).tolist(), RATIOS)
    end_us = best_us - problem.update_us
    assert end_us - solution.error_us - 1e-9 <= solution.bound_us <= end_us * (1 + 1e-12)
    labels = search(tables, 4, known_us(tables))
    assert labels is not None
    assert labels.exact
    assert labels.end_us == pytest.approx(end_us, rel=1e-12)


def random_joint(rng: np.random.Generator, count: int) -> Problem:
    rows = list(zip((10 ** rng.uniform(1, 4.5, count)).astype(int).tolist(), rng.exponential(60.0, count), strict=True))
    fields = {
        "inter": {"alpha_us": float(rng.uniform(2, 30)), "beta_us_per_byte": float(rng.uniform(0.001, 0.01))},
        "sparsify": {"alpha_us": float(rng.uniform(0, 20)), "beta_us_per_byte": float(rng.uniform(0, 0.001))},
        "unpack": {"alpha_us": float(rng.choice([0.0, 5.0])), "beta_us_per_byte": 0.0},
    }
    return make(profile_document(rows), cluster_document((float(rng.uniform(20, 200)), 0.01), **fields))


def test_neither_labels_nor_solver_find_what_the_other_excludes() -> None:
    rng = np.random.default_rng(8)
    proven = 0
    for count in (6, 8, 10, 12):
        tables = tables_of(random_joint(rng, count))
        labels = search(tables, 4, known_us(tables))
        assert labels is not None
        solution = solve_joint(tables, 4, known_us(tables), LIMIT)
        proven += solution.proven
        assert solution.bound_us <= labels.end_us * (1 + 1e-12)
        assert not (solution.proven and labels.exact) or solution.bound_us >= labels.end_us - solution.error_us - 1e-6
    assert proven >= 2


def test_few_labels_are_nearly_as_good_where_not_all_are_kept() -> None:
    """Above 16 gradients a part of the labels is kept; the solver's bound says what that may cost."""
    tables = tables_of(random_joint(np.random.default_rng(2), 18))
    few, many = search(tables, 4, known_us(tables)), search(tables, 4, known_us(tables), labels=400)
    assert few is not None
    assert many is not None
    assert not few.exact
    assert many.end_us <= few.end_us * (1 + 1e-12)
    assert few.end_us <= 1.02 * many.end_us


def test_the_solver_of_a_lossy_plan_is_told() -> None:
    problem = random_joint(np.random.default_rng(4), 6)
    options = {"accuracy": "bounded", "compress": "all", "max_ratio": 64.0}
    plan = optimize(problem.profile, problem.cost.cluster, solver="cpsat", **options)  # type: ignore[arg-type]
    usual = optimize(problem.profile, problem.cost.cluster, **options)  # type: ignore[arg-type]
    assert plan.accuracy == usual.accuracy == "bounded"
    assert plan.buckets == usual.buckets
    assert plan.certificate is not None
    assert plan.certificate.solver is not None
    assert plan.certificate.solver.proven
    assert plan.certificate.gap <= 1e-9
