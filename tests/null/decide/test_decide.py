"""`planner.optimize` and `planner.simulate` as Python functions."""

from __future__ import annotations

import json
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import reference
from builders import (
    cluster_document,
    line_problem,
    make,
    problems,
    profile_document,
    usual_cluster,
    usual_document,
    usual_profile,
    write,
)
from hypothesis import given

import planner
from planner import optimize, simulate
from planner.decide.plan_request import Request
from planner.decide.strategies import BASELINES
from planner.documents.profile import parse_cluster, parse_profile
from planner.model.problem import Problem
from runtime.errors import InputError
from runtime.plan import Plan, parse_plan


def decided(problem: Problem, **options: Any) -> Plan:
    return optimize(problem.profile, problem.cost.cluster, **options)


def indices(plan: Plan) -> list[list[int]]:
    """The gradients of each bucket, for profiles whose gradients are called g0, g1, …"""
    return [[int(name.removeprefix("g")) for name in bucket.gradients] for bucket in plan.buckets]


@given(problems(max_count=8))
def test_prediction_follows_the_contract(problem: Problem) -> None:
    """The plan's time is the recurrence's over its own buckets, and so are the baselines'."""
    plan = decided(problem)
    compute = problem.profile.compute
    assert plan.predicted is not None
    assert plan.predicted.iteration_us == pytest.approx(reference.iteration_us(problem, indices(plan)), rel=1e-12)
    backward_us = sum(gradient.backward_us for gradient in compute.gradients)
    assert plan.predicted.forward_us == compute.forward_us
    assert plan.predicted.backward_us == pytest.approx(backward_us)
    quiet_us = compute.forward_us + backward_us + compute.update_us
    exposed_us = plan.predicted.iteration_us - quiet_us
    assert plan.predicted.exposed_us == pytest.approx(exposed_us, rel=1e-9, abs=1e-6)
    assert plan.baselines is not None
    assert set(plan.baselines) == set(BASELINES)
    count = problem.count
    for name, buckets in (("wfbp", [[i] for i in range(count)]), ("single", [range(count)])):
        assert plan.baselines[name].iteration_us == pytest.approx(reference.iteration_us(problem, buckets), rel=1e-12)


@given(problems(max_count=8))
def test_optimum_and_its_certificate(problem: Problem) -> None:
    plan = decided(problem)
    stops, end_us = reference.best_stops(problem)
    best_us = max(end_us, problem.compute_end_us) + problem.update_us
    assert indices(plan) == [list(bucket) for bucket in reference.buckets_of(stops)]
    assert plan.predicted is not None
    assert plan.certificate is not None
    assert plan.certificate.lower_bound_us == pytest.approx(best_us, rel=1e-12)
    assert plan.certificate.gap <= 1e-12
    assert plan.certificate.note is None


@given(problems(max_count=8, mixed=True, contention=True))
def test_any_plan_is_sound_and_reads_back(problem: Problem) -> None:
    plan = decided(problem)
    assert plan.predicted is not None
    assert plan.certificate is not None
    assert plan.certificate.gap >= 0.0
    assert plan.certificate.lower_bound_us <= plan.predicted.iteration_us
    gap = plan.predicted.iteration_us / plan.certificate.lower_bound_us - 1 if plan.certificate.lower_bound_us else 0
    assert plan.certificate.gap == pytest.approx(gap, abs=1e-12)
    assert parse_plan(json.loads(json.dumps(plan.to_document()))) == plan
    assert plan.gradients == tuple(gradient.name for gradient in problem.profile.compute.gradients)
    assert [bucket.size_bytes for bucket in plan.buckets] == [
        sum(problem.profile.compute.gradients[i].size_bytes for i in bucket) for bucket in indices(plan)
    ]


def test_plan_says_what_it_is_for() -> None:
    profile = usual_profile()
    plan = optimize(profile)
    assert plan.model == profile.model
    assert (plan.world.ranks, plan.world.nodes) == (4, 4)
    assert plan.accuracy == "exact"
    assert (plan.delay, plan.local_async, plan.fallback) == (None, None, None)
    assert {(b.collective, b.algorithm, b.compressor.name) for b in plan.buckets} == {("all_reduce", "library", "none")}
    assert all(bucket.reason for bucket in plan.buckets)


def test_timeline_of_a_plan() -> None:
    """Every bucket has one bar on the network, named after its place; three bars are compute."""
    plan = optimize(usual_profile())
    assert plan.predicted is not None
    tasks = plan.predicted.timeline or ()
    network = [task for task in tasks if task.resource == "network"]
    assert [task.task for task in network] == [f"bucket {index} all_reduce" for index in range(len(plan.buckets))]
    compute = {task.task: task for task in tasks if task.resource == "compute"}
    assert list(compute) == ["forward", "backward", "update"]
    assert compute["update"].end_us == plan.predicted.iteration_us


def test_equal_inputs_give_equal_plans(tmp_path: Path) -> None:
    document = usual_document(cluster=cluster_document(None, [[10, 50], [10**6, 900]], (1.1, 1.2)))
    path = write(tmp_path / "profile.json", document)
    plans = [optimize(path), optimize(Path(path)), optimize(parse_profile(document))]
    for index, plan in enumerate(plans):
        plan.save(tmp_path / f"{index}.json")
    contents = {(tmp_path / f"{index}.json").read_bytes() for index in range(3)}
    assert len(contents) == 1


def test_nothing_to_gain_is_said() -> None:
    """Communication that hides in any case: DDP's default buckets are as good."""
    idle = line_problem([(10, 1000.0)] * 3, 0.0, 0.0)
    assert any(note.startswith("nothing to gain: ") for note in decided(idle).notes)
    late = line_problem([(25_000, 1000.0)] * 3, 0.0, 0.01)  # DDP sends these 300 kB in one bucket, after backward
    assert not any(note.startswith("nothing to gain: ") for note in decided(late).notes)


def test_notes_on_where_costs_come_from() -> None:
    plan = optimize(usual_profile(ranks=2), usual_cluster(samples=[[1, 2], [3, 4], [5, 6]]))
    assert "all-reduce: 3 measured samples" in plan.notes
    assert "compute was measured on 2 ranks, the plan is for 4" in plan.notes
    assert "costs are extrapolated from another number of ranks" not in plan.notes


def test_certificate_names_its_limits() -> None:
    contended = optimize(usual_profile(), usual_cluster(contention=(1.5, 1.5))).certificate
    assert contended is not None
    assert contended.method == "dynamic programming with labels and local search"
    assert "where compute and network do not slow each other down" in (contended.note or "")
    mixed = decided(make(profile_document([(1, 1.0)] * 2, dtypes=["float32", "bfloat16"]), cluster_document()))
    assert mixed.certificate is not None
    assert "buckets of consecutive gradients" in (mixed.certificate.note or "")


def test_cluster_given_replaces_the_measured_one(tmp_path: Path) -> None:
    profile = usual_profile()
    slower = usual_cluster(line=(90000.0, 0.001), nodes=7)
    plan = optimize(profile, slower)
    assert plan.world.ranks == 7
    assert len(plan.buckets) == 1 < len(optimize(profile).buckets)
    path = write(tmp_path / "cluster.json", cluster_document((90000.0, 0.001), nodes=7))
    assert optimize(profile, path) == plan


def test_wrong_calls() -> None:
    with pytest.raises(InputError, match="--accuracy: found 'lossy', expected one of: exact, bounded, relaxed"):
        optimize(usual_profile(), accuracy="lossy")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="--passes: found 'mrege'"):
        optimize(usual_profile(), passes="mrege")
    with pytest.raises(InputError, match="expected `--cluster FILE`"):
        optimize(usual_profile(cluster={}))
    with pytest.raises(InputError, match="expected `--cluster FILE`"):
        simulate(usual_profile(cluster={}))
    with pytest.raises(InputError, match="found the strategy 'best', expected one of"):
        simulate(usual_profile(), strategies=["best"])
    with pytest.raises(InputError, match="3 ranks do not fill nodes of 2"):
        simulate(usual_profile(), usual_cluster(ranks_per_node=2), ranks=[3])


def test_largest_documents_give_readable_plans() -> None:
    """The limits of the formats fit each other: whatever a profile may hold, its plan can be read."""
    profile = parse_profile(profile_document([(2**40, 1e15)] * 100, forward_us=1e15, update_us=1e15))
    cluster = parse_cluster(cluster_document((1e15, 1e12), nodes=10**7))
    plan = optimize(profile, cluster)
    assert parse_plan(json.loads(json.dumps(plan.to_document(), allow_nan=False))) == plan
    with pytest.raises(InputError, match="found more than 10000000 ranks"):
        optimize(profile, usual_cluster(nodes=10**7 + 1))


def test_simulation_follows_the_contract() -> None:
    problem = make(usual_document(), cluster_document((200.0, 0.001)))
    results = simulate(problem.profile, problem.cost.cluster, strategies=["wfbp", "single", "wfbp:layer", "optimal"])
    assert [result.strategy for result in results] == ["wfbp", "single", "wfbp:layer", "optimal"]
    buckets = [[[i] for i in range(6)], [range(6)], [[0, 1], [2], [3], [4, 5]]]
    for result, expected in zip(results[:3], buckets, strict=True):
        assert result.iteration_us == pytest.approx(reference.iteration_us(problem, expected))
        assert result.exposed_us == pytest.approx(result.iteration_us - (100.0 + 960.0 + 10.0))
        assert result.buckets == len(expected)
    best = reference.buckets_of(reference.best_stops(problem)[0])
    assert results[3].iteration_us == pytest.approx(reference.iteration_us(problem, best))


def test_simulation_over_ranks() -> None:
    """Ranks come in the order given, each with every strategy; other ranks than measured are marked."""
    results = simulate(usual_profile(), strategies=["ddp", "optimal"], ranks=[8, 4, 1])
    assert [(r.ranks, r.strategy, r.extrapolated) for r in results] == [
        (8, "ddp", True), (8, "optimal", True), (4, "ddp", False), (4, "optimal", False), (1, "ddp", True),
        (1, "optimal", True),
    ]  # fmt: skip
    assert [r.exposed_us for r in results if r.ranks == 1] == [0.0, 0.0]
    assert results[0].iteration_us > results[2].iteration_us
    default = simulate(usual_profile())
    assert {"wfbp", "wfbp:layer", "single", "mg_wfbp", "ddp", "optimal"} == {r.strategy for r in default}
    assert {r.ranks for r in default} == {4}


def test_simulation_and_plan_agree() -> None:
    plan = optimize(usual_profile())
    results = {result.strategy: result for result in simulate(usual_profile())}
    assert plan.predicted is not None
    assert results["optimal"].iteration_us == plan.predicted.iteration_us
    assert results["optimal"].buckets == len(plan.buckets)
    for name, prediction in (plan.baselines or {}).items():
        assert results[name].iteration_us == prediction.iteration_us
        assert results[name].buckets == prediction.buckets


def test_package_gives_its_names_and_no_others() -> None:
    assert planner.optimize is optimize
    assert planner.Plan is Plan
    with pytest.raises(AttributeError, match="module 'planner' has no attribute 'optimise'"):
        _ = planner.optimise


def test_a_request_has_the_options_of_optimize() -> None:
    options = [field.name for field in fields(Request)]
    assert options == [*signature(optimize).parameters, "given"]
