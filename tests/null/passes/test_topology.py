"""The pass `topology` and its part in `joint`: against trying everything, and what plans and tables say of it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from builders import cluster_document, every_choice, line_problem, make, profile_document, two_nodes
from forms import at_ratios

from planner.decide.optimize import optimize
from planner.decide.strategies import make_schedule
from planner.documents.profile import parse_cluster, parse_profile
from planner.ir import Bucket, Schedule
from planner.model.codecs import Form, TopK, Wire
from planner.model.compression import Limits
from planner.model.modes import simulate_schedule, step_us
from planner.model.problem import Problem
from planner.passes.joint import Joint
from planner.passes.merge import Merge
from planner.passes.topology import Topology
from planner.search.forms import LinkForms
from planner.search.links import search
from planner.search.tables import dense_transports, flat_forms, forms_on_links, has_two_links
from planner.verify import verify
from runtime.plan.transports import HITOPK, LIBRARY, TORUS_2D, TWO_SHOT


def problem(rng: np.random.Generator, count: int, **fields: Any) -> Problem:
    """Gradients of any sizes."""
    rows = [(int(10 ** rng.uniform(1, 3.5)), float(rng.uniform(0, 2000))) for _ in range(count)]
    return make(
        profile_document(rows), two_nodes(float(rng.uniform(0.05, 1.0)), float(rng.uniform(0.005, 0.2)), **fields)
    )


def limits(ratios: list[float]) -> Limits:
    """These ratios at the most, and no gradient keeps its dtype."""
    return Limits(np.array(ratios), np.zeros(len(ratios), dtype=np.bool_))


@pytest.mark.parametrize("seed", range(12))
def test_the_replay_agrees_with_the_simulator(seed: int) -> None:
    rng = np.random.default_rng(seed)
    of = problem(rng, 4, sparsify={"alpha_us": 30.0, "beta_us_per_byte": 0.01},
                 unpack={"alpha_us": 10.0, "beta_us_per_byte": 0.02},
                 encode={"int8": {"alpha_us": 5.0, "beta_us_per_byte": 0.003}},
                 decode={"int8": {"alpha_us": 3.0, "beta_us_per_byte": 0.004}})  # fmt: skip
    forms = LinkForms(
        of, forms_on_links(flat_forms([Form(TWO_SHOT, Wire("int8"), 4.0), *at_ratios(10.0)])), limits([100.0] * 4)
    )
    for choice in every_choice(4, len(forms.forms)):
        ours = forms.end_us(choice) + of.update_us
        assert ours == pytest.approx(step_us(of, forms.schedule(choice)), rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_exact_buckets_are_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    of = problem(rng, 6)
    forms = LinkForms(of, forms_on_links((), dense_transports(of)))
    best_us = min(forms.end_us(choice) for choice in every_choice(6, 3)) + of.update_us
    given = Merge().apply(Schedule.from_boundaries([6]), of).schedule
    found = Topology().apply(given, of).schedule
    verify(found, of.dtype_ids.tolist())
    assert step_us(of, found) == pytest.approx(best_us, rel=1e-9)
    assert step_us(of, found) <= min(step_us(of, given), step_us(of, make_schedule(of, "torus_2d"))) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_buckets_and_densities_are_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    of = problem(rng, 4, sparsify={"alpha_us": 30.0, "beta_us_per_byte": 0.001})
    forms = LinkForms(of, forms_on_links(flat_forms(at_ratios(4.0, 250.0))), limits([1000.0] * 4))
    best_us = min(forms.end_us(choice) for choice in every_choice(4, len(forms.forms))) + of.update_us
    found = search(forms, [(4,), (1, 2, 3, 4)])
    assert min(step_us(of, one) for one in found.schedules) == pytest.approx(best_us, rel=1e-9)
    assert found.exact


def test_elsewhere_the_schedule_stays_as_it_is() -> None:
    flat = line_problem([(1000, 100.0), (2000, 50.0)], 50.0, 0.01)
    given = Schedule.from_boundaries([1, 2])
    assert not has_two_links(flat)
    assert Topology().apply(given, flat).schedule is given
    unknown = make(profile_document([(10, 1.0)]), cluster_document((1.0, 0.1), nodes=2, ranks_per_node=2))
    assert Topology().apply(Schedule.from_boundaries([1]), unknown).schedule == Schedule.from_boundaries([1])


def test_a_torus_where_links_inside_are_fast_and_flat_where_starting_is_dear() -> None:
    rows = [(100_000, 100.0)]
    fast, dear = (
        two_nodes(),
        two_nodes(slow=0.001, fast=0.001, alpha_us=1000.0, all_reduce_algorithm="recursive_doubling"),
    )
    given = Schedule.from_boundaries([1])
    found = [Topology().apply(given, make(profile_document(rows), links)).schedule for links in (fast, dear)]
    assert [schedule.buckets[0].transport for schedule in found] == [TORUS_2D, LIBRARY]


def test_while_one_bucket_is_between_nodes_another_is_inside() -> None:
    of = make(profile_document([(20_000, 500.0)] * 4), two_nodes(slow=0.02, fast=0.01))
    timeline = simulate_schedule(of, Schedule.from_boundaries([1, 2, 3, 4], TORUS_2D))
    pairs = itertools.product(timeline.on("intra"), timeline.on("inter"))
    assert any(max(a.start_us, b.start_us) < min(a.end_us, b.end_us) and a.bucket != b.bucket for a, b in pairs)


def test_plans_carry_the_order_of_phases() -> None:
    profile = parse_profile(profile_document([(50_000, 100.0), (50_000, 100.0)], cluster=two_nodes()))
    plan = optimize(profile)
    assert all(bucket.algorithm == "torus_2d" for bucket in plan.buckets)
    counts = [3] * len(plan.buckets)
    assert plan.phase_order is not None
    assert sorted(plan.phase_order) == [(b, p) for b, count in enumerate(counts) for p in range(count)]
    assert "inside nodes" in str(plan.buckets[0].reason)
    assert "between them" in str(plan.buckets[0].reason)
    assert plan.certificate is not None
    assert plan.certificate.lower_bound_us <= (plan.predicted.iteration_us if plan.predicted else 0.0)


def test_hitopk_in_joint_where_nothing_is_protected() -> None:
    rows = [(200_000, 100.0), (300_000, 100.0)]
    of = make(profile_document(rows), two_nodes(slow=0.5, fast=0.0001))
    found = (
        Joint(protect="none", compress="all")
        .apply(Topology().apply(Schedule.from_boundaries([2]), of).schedule, of)
        .schedule
    )
    assert {bucket.transport.algorithm for bucket in found.buckets} == {"hitopk"}
    [first, *_] = found.buckets
    assert isinstance(first.codec, TopK)
    profile = parse_profile(profile_document(rows, cluster=two_nodes(slow=0.5, fast=0.0001)))
    plan = optimize(profile, accuracy="bounded", protect="none", compress="all")
    assert plan.accuracy == "bounded"
    spec = plan.buckets[0].compressor
    assert (plan.buckets[0].algorithm, spec.name, spec.scope) == ("hitopk", "topk", "bucket")
    shard = math.ceil(sum(numel for numel, _ in rows[: len(plan.buckets[0].gradients)]) / 2)
    assert spec.density is not None
    assert math.floor(spec.density * shard) == math.ceil(shard / 1000)


def test_the_crossover_between_dense_and_selected_is_predicted() -> None:
    """The slower the links between nodes, the more buckets leave something out; on fast ones none does."""
    rows = [(200_000, 5000.0)]
    profile = parse_profile(profile_document(rows))
    kinds = []
    for slow in (1e-5, 1e-3, 1.0):
        machines = parse_cluster(two_nodes(slow, 1e-5, sparsify={"alpha_us": 50.0, "beta_us_per_byte": 1e-4}))
        plan = optimize(profile, machines, accuracy="bounded", protect="none", compress="all")
        kinds.append(plan.buckets[0].algorithm)
    assert kinds[0] in ("library", "torus_2d")
    assert kinds[-1] == "hitopk"


def test_a_bucket_with_a_protected_gradient_is_not_selected_from_by_shards() -> None:
    of = make(profile_document([(1000, 1.0), (1000, 1.0)]), two_nodes())
    forms = LinkForms(of, forms_on_links(flat_forms(at_ratios(100.0))), limits([100.0, 1.0]))
    known = forms.known(0, 1, 3)
    assert known is not None
    assert forms.known(0, 2, 3) is None
    assert forms.known(1, 2, 3) is None
    assert known[0] == Bucket((0,), HITOPK, TopK(5))
