"""Buckets in mixed forms on two kinds of link: labels, search and constraint program against trying everything."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import cluster_document, every_choice, make, profile_document, two_nodes
from forms import at_ratios

from planner import optimize, simulate
from planner.decide.strategies import MIXED, make_schedule
from planner.documents.profile import parse_cluster, parse_profile
from planner.ir import GAIN, Schedule
from planner.model.compression import Limits
from planner.model.modes import simulate_schedule, step_us
from planner.model.problem import Problem
from planner.passes.joint import Joint
from planner.passes.topology import Topology, links_without_contention
from planner.search.cpsat_joint import MAX_LINK_PLACES, solve_joint
from planner.search.forms import LinkForms
from planner.search.labels import least_ends_us
from planner.search.labels import search as search_labels
from planner.search.links import search
from planner.search.tables import BucketTables, bucket_tables, dense_transports, flat_forms, forms_on_links
from runtime.errors import CheckFailed, InputError
from runtime.plan.transports import TREE

LIMIT = 2.0
SELECTS = {"sparsify": {"alpha_us": 30.0, "beta_us_per_byte": 0.001}}
UNPACKS = {**SELECTS, "unpack": {"alpha_us": 10.0, "beta_us_per_byte": 0.002}}


def problem(seed: int, count: int, **fields: Any) -> Problem:
    """Gradients of any sizes on two nodes of two ranks whose links inside are faster, some more than others."""
    rng = np.random.default_rng(seed)
    rows = [(int(10 ** rng.uniform(1, 3.5)), float(rng.uniform(0, 1500))) for _ in range(count)]
    links = two_nodes(float(rng.uniform(0.05, 1.0)), float(rng.uniform(0.005, 0.2)), **fields)
    return make(profile_document(rows), links)


def forms_at(of: Problem, *ratios: float, protected: int | None = None) -> LinkForms:
    """All forms; one gradient may have to travel whole."""
    limits = Limits(np.full(of.count, 1000.0), np.zeros(of.count, dtype=np.bool_))
    limits.ratios[[] if protected is None else [protected]] = 1.0
    return LinkForms(
        of, forms_on_links(flat_forms(at_ratios(*(r for r in ratios if r > 1.0))), dense_transports(of)), limits
    )


def tables_of(forms: LinkForms) -> BucketTables:
    return bucket_tables(forms.problem, forms.forms, forms.limits, np.arange(forms.problem.count + 1))


def one_bucket_us(forms: LinkForms) -> float:
    """When one flat dense bucket ends: the worst that may be known."""
    return forms.end_us(((forms.problem.count, 0),))


@pytest.mark.parametrize("fields", [{}, SELECTS, UNPACKS], ids=["", "selects", "unpacks"])
@pytest.mark.parametrize("seed", range(4))
def test_labels_and_solver_find_what_trying_everything_finds(seed: int, fields: dict[str, Any]) -> None:
    """Every way to cut, every form, in the eyes of the simulator itself."""
    of = problem(seed, 4, **fields)
    forms = forms_at(of, 10.0, protected=seed if seed else None)
    possible = [choice for choice in every_choice(4, len(forms.forms)) if forms.of(choice) is not None]
    best_us = min(step_us(of, forms.schedule(choice)) for choice in possible) - of.update_us
    tables, known_us = tables_of(forms), one_bucket_us(forms)
    labels = search_labels(tables, len(forms.forms), known_us)
    assert labels is not None
    assert labels.exact
    assert labels.end_us == pytest.approx(best_us, rel=1e-9)
    assert forms.end_us(tuple(zip(labels.stops, labels.forms, strict=True))) == pytest.approx(best_us, rel=1e-9)
    solution = solve_joint(tables, len(forms.forms), known_us, LIMIT)
    assert solution.proven
    assert best_us - solution.error_us - 1e-6 <= solution.bound_us <= best_us * (1 + 1e-9)
    found = tuple(zip(solution.stops, solution.forms, strict=True))
    assert forms.end_us(found) <= best_us + solution.error_us + 1e-6
    assert least_ends_us(tables, len(forms.forms)) <= best_us * (1 + 1e-9)


def test_tables_hold_the_buckets_that_plans_get() -> None:
    of = problem(3, 5, **UNPACKS)
    forms = forms_at(of, 10.0, 250.0, protected=2)
    tables = tables_of(forms)
    for start, stop in itertools.combinations(range(6), 2):
        for number, form in enumerate(forms.forms):
            known, at = forms.known(start, stop, number), (number, start, stop)
            if known is None:
                assert math.isinf(tables.cost_us[at])
                continue
            _, work = known
            phases = [time_us for _, time_us in work.phases]
            ours = [tables.scatter_us[at], tables.cost_us[at], tables.gather_us[at]]
            assert (ours if form.transport.hierarchical else ours[1:2]) == pytest.approx(phases)
            assert (tables.select_us[at], tables.unpack_us[at]) == pytest.approx((work.select_us, work.unpack_us))
    assert tables.only(np.array([0, 2, 5])).cost_us.tolist() == tables.cost_us[:, [0, 2, 5]][:, :, [0, 2, 5]].tolist()


@pytest.mark.parametrize("seed", range(4))
def test_the_solver_judges_the_passes(seed: int) -> None:
    """Beyond what can be tried: neither finds what the other excludes, and both are the optimum."""
    exact = problem(seed, 9)
    forms = forms_at(exact)
    solution = solve_joint(tables_of(forms), len(forms.forms), one_bucket_us(forms), LIMIT)
    assert solution.proven
    found_us = step_us(exact, Topology().apply(Schedule.from_boundaries([9]), exact).schedule) - exact.update_us
    assert solution.bound_us <= found_us * (1 + 1e-9)
    assert found_us <= solution.bound_us + solution.error_us
    lossy = problem(seed, 6, **SELECTS)
    frontier = Joint(protect="none", densities="0.25|0.004", compress="sparse").frontier(
        make_schedule(lossy, "optimal"), lossy
    )
    forms = forms_at(lossy, 4.0, 250.0)
    solution = solve_joint(tables_of(forms), len(forms.forms), one_bucket_us(forms), LIMIT)
    assert solution.proven
    assert frontier.points[-1].exact
    found_us = frontier.best.iteration_us - lossy.update_us
    assert solution.bound_us - 1e-6 <= found_us <= solution.bound_us + solution.error_us + 1e-6
    assert frontier.bound_us == frontier.best.iteration_us


def test_few_labels_and_a_coarse_grid_are_nearly_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        of = problem(seed, 20)
        forms = forms_at(of)
        best = search(forms, [(20,)])
        assert best.exact
        with monkeypatch.context() as fewer:
            fewer.setattr("planner.search.links.MAX_CELLS", 11**2 * len(forms.forms))
            fewer.setattr("planner.search.labels.MANY_LABELS", 4)
            found = search(forms, [(20,)])
            assert best.end_us * (1 - 1e-9) <= found.end_us <= best.end_us * 1.03
            assert found.bound_us <= best.end_us * (1 + 1e-9)
            fewer.setattr("planner.search.links.BOUNDED_CELLS", 1)
            assert search(forms, [(20,)]).bound_us <= found.bound_us


def test_certificates_say_what_was_proven() -> None:
    of = problem(1, 8)
    usual = optimize(of.profile, of.cost.cluster).certificate
    assert usual is not None
    assert usual.method == "labels over buckets and collectives on two kinds of link"
    assert (usual.gap, usual.note) == (0.0, None)
    asked = optimize(of.profile, of.cost.cluster, solver="cpsat").certificate
    assert asked is not None
    assert asked.solver is not None
    assert asked.solver.proven
    assert asked.solver.bound_us == pytest.approx(asked.lower_bound_us, rel=1e-5)
    lossy = problem(2, 6, **SELECTS)
    plan = optimize(
        lossy.profile, lossy.cost.cluster, accuracy="bounded", passes="merge,topology,joint", protect="none",
        compress="sparse", solver="cpsat",
    )  # fmt: skip
    assert plan.accuracy == "bounded"
    assert plan.certificate is not None
    assert plan.certificate.solver is not None
    assert plan.certificate.gap <= GAIN + 1e-9
    contended = make(profile_document([(900, 50.0)] * 6), two_nodes(contention=(1.2, 1.3)))
    slowed = optimize(contended.profile, contended.cost.cluster).certificate
    assert slowed is not None
    assert "do not slow each other down" in str(slowed.note)


def test_flat_buckets_alone_are_held_against_all_forms() -> None:
    """Who asks for less than the usual passes learns how far that is from the best."""
    of = make(profile_document([(100_000, 100.0)] * 4), two_nodes())
    flat = optimize(of.profile, of.cost.cluster, passes="merge")
    assert flat.certificate is not None
    best = optimize(of.profile, of.cost.cluster)
    assert flat.predicted is not None
    assert best.predicted is not None
    assert flat.certificate.gap == pytest.approx(flat.predicted.iteration_us / best.predicted.iteration_us - 1.0)
    assert flat.certificate.gap > 0.05


def test_optimal_is_what_optimize_decides() -> None:
    of = make(profile_document([(100_000, 100.0)] * 4), two_nodes())
    plan = optimize(of.profile, of.cost.cluster)
    [found, bounded] = [
        simulate(of.profile, of.cost.cluster, strategies=["optimal"], solver=solver)[0] for solver in ("dp", "cpsat")
    ]
    assert plan.predicted is not None
    assert found.iteration_us == plan.predicted.iteration_us == bounded.iteration_us
    assert {bucket.transport.algorithm for bucket in make_schedule(of, "optimal").buckets} == {"torus_2d"}
    assert bounded.lower_bound_us == pytest.approx(found.iteration_us, rel=1e-5)
    assert plan.scaling is not None
    assert {point.ranks for point in plan.scaling} >= {1, 2, 4, 8}


def test_with_many_gradients_optimal_is_all_flat_or_all_torus() -> None:
    of = make(profile_document([(2000, 5.0)] * (MIXED + 1)), two_nodes())
    found = make_schedule(of, "optimal")
    assert {bucket.transport.algorithm for bucket in found.buckets} == {"torus_2d"}
    assert step_us(of, found) == step_us(of, make_schedule(of, "torus_2d"))


def test_a_contradiction_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    of = problem(1, 5)
    true = links_without_contention(of, Topology.climbs)
    wrong = replace(true, end_us=true.end_us * 1.1)
    monkeypatch.setattr("planner.decide.solvers.links_without_contention", lambda *_: wrong)
    with pytest.raises(CheckFailed, match=r"labels: the last bucket ends after .* a defect of the planner"):
        optimize(of.profile, of.cost.cluster, solver="cpsat")


def test_too_many_gradients_are_refused() -> None:
    of = make(profile_document([(10, 1.0)] * MAX_LINK_PLACES), two_nodes())
    with pytest.raises(InputError, match="found 201 gradients on two kinds of link, expected at most 200; use the"):
        optimize(of.profile, of.cost.cluster, solver="cpsat")


def test_trees_are_looked_at_where_they_and_the_library_are_known_equally_well() -> None:
    """By formula both, or measured both; many ranks and little to send is where they win."""
    links = {
        "intra": {"alpha_us": 2.0, "beta_us_per_byte": 1e-5},
        "inter": {"alpha_us": 20.0, "beta_us_per_byte": 1e-3},
    }
    shape = {"nodes": 32, "ranks_per_node": 2}
    profile = parse_profile(profile_document([(100, 10.0)]))
    formula = parse_cluster(cluster_document(None, **shape, **links))
    measured = parse_cluster(cluster_document((3000.0, 1e-3), **shape, **links))
    tree = {"alpha_us": 100.0, "beta_us_per_byte": 1e-3}
    both = parse_cluster({**cluster_document((3000.0, 1e-3), **shape, **links), "collectives": {
        "all_reduce": {"alpha_us": 3000.0, "beta_us_per_byte": 1e-3}, "tree": tree,
    }})  # fmt: skip
    algorithms = [optimize(profile, machines).buckets[0].algorithm for machines in (formula, measured, both)]
    assert algorithms == ["tree", "torus_2d", "tree"]
    timeline = simulate_schedule(problem(0, 1), Schedule.from_boundaries([1], TREE))
    assert [span.resource for span in timeline.spans if span.bucket is not None] == ["inter"]
