"""Norms of layers in plans: the pass, the split of layers over ranks, the predicted update, and what is said."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import cluster_document, make, profile_document
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from planner.decide.optimize import optimize
from planner.decide.pipeline import parse_passes, run_passes
from planner.documents.estimate import scale_compute
from planner.documents.profile import parse_cluster, parse_profile
from planner.ir import Schedule
from planner.model.engine import run
from planner.model.modes import simulate_schedule, step_us
from planner.model.norms import gather_us, replicated_us, shared_us
from planner.model.problem import Problem
from planner.model.schedule_text import parse_schedule
from planner.model.step_ops import step_ops
from planner.model.updates import update_bound_us, update_us
from planner.passes.shard_updates import ShardUpdates
from planner.profile.bench import Bench
from planner.profile.compute import Training
from planner.profile.norms import measure_norms
from planner.search.partition import NEAR, best_partition
from planner.verify import VerifyError, verify
from runtime.comm.world import World
from runtime.errors import InputError
from runtime.optimizers import LAMB, LARS
from runtime.plan.lpt import loads_of, longest_first

ROWS = [(1000, 100.0), (50, 10.0), (3000, 300.0), (2000, 200.0), (4, 1.0)]
NORMS_US = {"g0": 10.0, "g2": 30.0, "g3": 20.0}


def document(update_us: float = 100.0, **options: Any) -> dict[str, Any]:
    """profile.json of a step with LARS."""
    made = profile_document(ROWS, update_us=update_us, **options)
    layers = [{"name": name, "norm_us": time_us} for name, time_us in NORMS_US.items()]
    made["compute"]["norms"] = {"optimizer": "LARS", "row_bytes": 8, "layers": layers}
    return made


def cluster(gather: tuple[float, float] = (5.0, 0.0), nodes: int = 2, **fields: Any) -> dict[str, Any]:
    """Two ranks with an all-gather that is a line."""
    made = cluster_document((50.0, 0.01), nodes=nodes, **fields)
    made["collectives"]["all_gather"] = {"alpha_us": gather[0], "beta_us_per_byte": gather[1]}
    return made


def problem(gather: tuple[float, float] = (5.0, 0.0), **options: Any) -> Problem:
    return make(document(**options), cluster(gather))


def test_norms_are_shared_where_that_is_shorter() -> None:
    """60 us by every rank; 30 and the gather shared."""
    schedule = Schedule.from_boundaries([5])
    found = ShardUpdates().apply(schedule, problem()).schedule
    assert found.norms == (1, 0, 1)
    assert found.buckets == schedule.buckets
    assert replicated_us(problem()) == 60.0
    assert shared_us(problem(), found.norms) == 35.0
    assert ShardUpdates().apply(schedule, problem((29.9, 0.0))).schedule.norms is not None
    assert ShardUpdates().apply(found, problem((30.0, 0.0))).schedule.norms is None
    # On 2 ranks, 2 layers of 8 bytes: 32 us.
    assert ShardUpdates().apply(found, problem((0.0, 1.0))).schedule.norms is None


def test_one_rank_and_other_optimizers_share_nothing() -> None:
    alone = make(document(), cluster(nodes=1))
    assert ShardUpdates().apply(Schedule.from_boundaries([5]), alone).schedule.norms is None
    plain = make(profile_document(ROWS), cluster())
    assert ShardUpdates().apply(Schedule.from_boundaries([5]), plain).schedule.norms is None
    assert optimize(parse_profile(profile_document(ROWS, cluster=cluster()))).updates is None


@pytest.mark.parametrize("contention", [None, (1.2, 1.4)])
def test_only_the_update_is_shorter(contention: tuple[float, float] | None) -> None:
    """In every way of simulating."""
    step = make(document(), cluster(contention=contention))
    for text in ("[0-1] all_reduce/library none\n[2-4] all_reduce/library none",
                 "[0-1] all_reduce/library none\n[2-4] sparse/flat topk k=9"):  # fmt: skip
        schedule = parse_schedule(text)
        shared = replace(schedule, norms=(1, 0, 1))
        saved_us = step_us(step, schedule) - step_us(step, shared)
        assert saved_us == pytest.approx(25.0)
        before, after = simulate_schedule(step, schedule), simulate_schedule(step, shared)
        assert before.iteration_us - after.iteration_us == pytest.approx(25.0)
        assert (before.update_us, after.update_us) == (100.0, 75.0)
        assert after.iteration_us == pytest.approx(step_us(step, shared))
        assert after.spans[:-1] == before.spans[:-1]
        assert run(step_ops(step, shared)).total_us == pytest.approx(after.iteration_us)


def test_an_update_never_takes_less_than_nothing() -> None:
    step = problem(update_us=10.0)
    shared = ShardUpdates().apply(Schedule.from_boundaries([5]), step).schedule
    assert update_us(step, shared) == 0.0


def test_plans_hold_shares_and_both_predictions() -> None:
    profile = parse_profile(document(cluster=cluster()))
    plan = optimize(profile)
    assert plan.updates is not None
    norms = plan.updates.norms
    assert norms is not None
    assert norms.shares == (("g2",), ("g0", "g3"))
    assert (norms.replicated_us, norms.shared_us, norms.gather_us, norms.bound_us) == (60.0, 35.0, 5.0, 30.0)
    assert (norms.message_bytes, norms.predicted_us) == (32, 35.0)
    assert plan.predicted is not None
    assert plan.predicted.update_us == 75.0
    assert plan.baselines is not None
    assert all(baseline.update_us == 100.0 for baseline in plan.baselines.values())
    assert plan.certificate is not None
    assert plan.certificate.gap == 0.0
    said = plan.notes[-1]
    assert "LARS's norms of 3 layers take 0.06 ms by every rank and 0.035 ms shared (PTO)" in said
    assert "the least possible, and one all-gather of 32 B, 0.005 ms" in said


def test_plans_say_why_norms_are_not_shared() -> None:
    plan = optimize(parse_profile(document(cluster=cluster((200.0, 0.0)))))
    assert plan.updates is not None
    assert plan.updates.norms is not None
    assert plan.updates.norms.shares is None
    assert plan.updates.norms.predicted_us == 60.0
    assert plan.notes[-1].endswith("would take 0.23 ms shared, 0.2 ms of it the all-gather: every rank computes all")
    without = optimize(parse_profile(document(cluster=cluster())), passes="merge")
    assert without.updates is not None
    assert without.updates.norms is not None
    assert without.updates.norms.shares is None


def test_the_order_of_passes_does_not_matter() -> None:
    step, start = problem(), Schedule.from_boundaries([1, 2, 3, 4, 5])
    one = run_passes(parse_passes("merge,shard_updates"), start, step).schedule
    assert run_passes(parse_passes("shard_updates,merge"), start, step).schedule == one
    assert one.norms is not None


def test_lossy_and_exact_plans_share_alike() -> None:
    """A slow network: compression pays; its plan and its fallback share norms, and gains are told apart from that."""
    slow = cluster_document((100.0, 0.2), sparsify={"alpha_us": 1.0, "beta_us_per_byte": 0.0}, nodes=2)
    slow["collectives"]["all_gather"] = {"alpha_us": 5.0, "beta_us_per_byte": 0.0}
    profile = parse_profile(document(cluster=slow))
    plan, exact = optimize(profile, accuracy="bounded"), optimize(profile)
    assert plan.accuracy == "bounded"
    assert plan.fallback is not None
    assert plan.updates == plan.fallback.updates == exact.updates
    assert plan.predicted is not None
    assert plan.certificate is not None
    assert plan.predicted.update_us == 75.0
    assert plan.certificate.lower_bound_us <= plan.predicted.iteration_us * (1.0 + 1e-9)
    assert plan.frontier is not None
    assert plan.frontier[-1].iteration_us == pytest.approx(plan.predicted.iteration_us)
    assert exact.predicted is not None
    assert plan.frontier[0].iteration_us == pytest.approx(exact.predicted.iteration_us)


def test_delay_is_not_offered_to_layerwise_optimizers() -> None:
    slow = cluster_document((100.0, 0.2), nodes=2)
    plan = optimize(parse_profile(document(cluster=slow)), accuracy="relaxed")
    assert plan.delay is None
    assert any("delay needs torch.optim.SGD, and this step's optimizer is LARS" in note for note in plan.notes)


def test_the_solver_knows_of_it() -> None:
    profile = parse_profile(document(cluster=cluster()))
    plan, solved = optimize(profile), optimize(profile, solver="cpsat")
    assert solved.updates == plan.updates
    assert solved.certificate is not None
    assert solved.certificate.gap <= 1e-6


def test_other_numbers_of_ranks() -> None:
    """The curve of a plan: `optimal` shares norms there too, the baselines do not."""
    ring = {"alpha_us": 1.0, "beta_us_per_byte": 1e-5}
    made = parse_cluster({"schema": "planner.cluster/1", "nodes": 2, "inter": ring, "intra": ring})
    plan = optimize(parse_profile(document()), made)
    assert plan.scaling is not None
    four = next(point.iteration_us for point in plan.scaling if point.ranks == 4)
    assert min(time_us for name, time_us in four.items() if name != "optimal") > four["optimal"]


@given(st.lists(st.integers(0, 50).map(float), min_size=1, max_size=6), st.integers(1, 3))
def test_the_split_is_the_best_there_is(costs: list[float], parts: int) -> None:
    found = best_partition(tuple(costs), parts)
    best = min(max(loads_of(costs, owners, parts)) for owners in itertools.product(range(parts), repeat=len(costs)))
    assert found.largest == max(loads_of(costs, found.owners, parts))
    assert found.bound <= best * (1.0 + 1e-12)
    assert found.largest <= best * (1.0 + NEAR)


@given(st.lists(st.floats(0.0, 1e6), max_size=60), st.integers(1, 9))
def test_longest_first_keeps_graham_s_bound(costs: list[float], parts: int) -> None:
    owners = longest_first(costs, parts)
    assert len(owners) == len(costs)
    largest = max(loads_of(costs, owners, parts))
    assert largest <= sum(costs) / parts + max(costs, default=0.0) * (1.0 - 1.0 / parts) + 1e-6
    assert longest_first(costs, parts) == owners
    assert best_partition(tuple(costs), parts, "lpt").owners == owners


def test_items_without_cost_are_spread() -> None:
    assert sorted(longest_first([0.0] * 6, 3)) == [0, 0, 1, 1, 2, 2]


def test_many_layers_are_split_as_well_as_times_are_measured() -> None:
    """161 layers of ResNet-50's sizes on 4 ranks: LPT alone is 0.2 % off."""
    from planner.documents.catalog import find_profile

    sizes = tuple(5.0 + gradient.numel * 1e-4 for gradient in find_profile("resnet50").compute.gradients)
    assert len(sizes) == 161
    assert best_partition(sizes, 4).proven
    assert best_partition(sizes, 4, "lpt").largest > best_partition(sizes, 4).largest


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("norms 0,1\n[0-4] all_reduce/library none", "norms of 2 layers are shared, but there are 3"),
        ("norms 0,2,1\n[0-4] all_reduce/library none", "norms are computed by rank 2, but there are 2 ranks"),
        ("delay k=2\nnorms 0,1,1\n[0-4] all_reduce/library none", "norms are shared, but delay needs torch.optim.SGD"),
    ],
)
def test_schedules_that_share_what_cannot_be(text: str, words: str) -> None:
    schedule = parse_schedule(text)
    assert str(schedule) == text
    with pytest.raises(VerifyError, match=words):
        verify(schedule, [0] * 5, accuracy="relaxed", norms=(3, 2))


def test_the_bound_is_below_every_split() -> None:
    step = problem((7.0, 0.125))
    bound_us = update_bound_us(step)
    for owners in itertools.product(range(2), repeat=3):
        assert update_us(step, Schedule(buckets=(), norms=owners)) >= bound_us - 1e-9
    assert gather_us(step, (0, 0, 0)) == 7.0 + 0.125 * 2 * 3 * 8


def test_what_if_scales_norms_with_the_update() -> None:
    profile = parse_profile(document())
    norms = scale_compute(profile.compute, 1.0, 0.5).norms
    assert norms is not None
    assert [layer.norm_us for layer in norms.layers] == [5.0, 15.0, 10.0]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("g0", "zzz"), r"\$.compute.norms.layers\[1\].name: found 'zzz', which is none of the gradients"),
        (("g0", "g0"), r"\$.compute.norms.layers\[1\].name: found 'g0' once more; expected each layer once"),
    ],
)
def test_wrong_layers_in_a_profile(names: tuple[str, ...], words: str) -> None:
    made = document()
    made["compute"]["norms"]["layers"] = [{"name": name, "norm_us": 1.0} for name in names]
    with pytest.raises(InputError, match=words):
        parse_profile(made)


def test_wrong_options_of_the_pass() -> None:
    with pytest.raises(InputError, match=r"shard_updates\{method=x\}: expected one of: cpsat, lpt"):
        parse_passes("shard_updates{method=x}")


def test_only_layerwise_optimizers_have_norms_to_time() -> None:
    model = nn.Module()
    for index, (numel, _) in enumerate(ROWS[:3]):
        model.register_parameter(f"g{index}", nn.Parameter(torch.ones(3, numel)))
    parameters = dict(model.named_parameters())
    compute = replace(parse_profile(profile_document(ROWS[:3])).compute, norms=None)
    for optimizer, names in (
        (torch.optim.SGD(parameters.values(), lr=0.1), None),
        (None, None),
        (LARS(parameters.values(), lr=0.1, adapt=False), None),
        (LARS(parameters.values(), lr=0.1), ["g0", "g1", "g2"]),
        (LAMB([parameters["g0"], parameters["g1"], nn.Parameter(torch.ones(2, 2))]), ["g0", "g1"]),
    ):
        training = Training(model, lambda _: None, optimizer)
        found = measure_norms(training, Bench(World(), torch.device("cpu")), compute)
        assert (found and [layer.name for layer in found.layers]) == names
