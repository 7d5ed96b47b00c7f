"""Outer steps: periods by hand, the smallest H, and when there is nothing to gain."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

import pytest
from builders import cluster_document, make, profile_document, two_nodes

from planner.decide.optimize import optimize
from planner.decide.strategies import make_schedule
from planner.documents.profile import Profile
from planner.emit.lower import lower
from planner.ir import GAIN, Dense
from planner.model.codecs import Wire
from planner.model.modes import outer_steps, simulate_schedule, step_us
from planner.model.modes.outer_steps import OuterSteps
from planner.model.outer_load import NODE, SHARDED_NODE, Worker
from planner.model.problem import Problem
from planner.passes.outer import Outer
from planner.strategies import diloco
from runtime.errors import InputError
from runtime.plan import Plan, parse_plan

ROWS = [(400_000, 120.0), (400_000, 80.0), (400_000, 60.0), (400_000, 40.0)]
COMPUTE_US = 100.0 + 300.0 + 40.0
ALPHA_US, BETA = 30.0, 0.0005


def document(beta: float = BETA) -> dict[str, Any]:
    """A profile with its cluster."""
    profile: dict[str, Any] = profile_document(ROWS, forward_us=100.0, update_us=40.0)
    return profile | {"cluster": cluster_document((ALPHA_US, beta), nodes=4)}


def problem() -> Problem:
    """The same on arrays."""
    return make(profile_document(ROWS, forward_us=100.0, update_us=40.0), cluster_document((ALPHA_US, BETA), nodes=4))


def test_a_blocking_round_costs_its_message_once_in_h_steps() -> None:
    step = problem()
    [round_us] = step.bucket_cost_us([range(4)])
    for every in (1, 8):
        assert step_us(step, make_schedule(step, f"diloco:{every}")) == pytest.approx(COMPUTE_US + round_us / every)


def test_blocking_rounds_take_the_mean_of_weights_unless_asked_for_by_name() -> None:
    step = problem()
    for name, late, lr in (("outer:1", False, 1.0), ("outer:64", True, 0.7), ("diloco:64", False, 0.7)):
        outer = lower(step, make_schedule(step, name)).outer
        assert outer is not None
        assert (outer.delay_steps > 0, outer.optimizer.lr, outer.optimizer.momentum > 0.0) == (late, lr, lr < 1.0), name


def test_a_round_in_flight_costs_what_its_steps_do_not_hide() -> None:
    step = problem()
    schedule = make_schedule(step, "streaming:64:4")
    rounds_us = step.bucket_cost_us([(gradient,) for gradient in range(4)])
    exposed_us = sum(max(0.0, round_us - COMPUTE_US) for round_us in rounds_us)
    assert step_us(step, schedule) == pytest.approx(COMPUTE_US + exposed_us / 64)
    timeline = simulate_schedule(step, schedule)
    assert sum(span.task.endswith("round") for span in timeline.spans) == 4
    assert timeline.spans[0].task.startswith("local step")


@pytest.mark.parametrize("seed", range(12))
def test_fragments_hide_as_much_as_any(seed: int) -> None:
    """The step is as short as with the best of all cuts and delays, but for what a smaller delay may cost."""
    chance = random.Random(seed)
    rows = [(chance.choice((1000, 50_000, 400_000, 10**6)), chance.choice((10.0, 60.0, 120.0))) for _ in range(5)]
    line = (chance.choice((5.0, 30.0, 200.0)), chance.choice((1e-4, 5e-4, 2e-3)))
    slowed = cluster_document(line, contention=chance.choice((None, (1.3, 1.5))))
    step, every = make(profile_document(rows, forward_us=100.0, update_us=40.0), slowed), chance.choice((2, 3, 8, 16))
    shortest_us = min(
        step_us(step, diloco.schedule_of((*cuts, 5), every, late))
        for late in diloco.DELAYS
        if late < every
        for count in range(min(every, 5))
        for cuts in itertools.combinations(range(1, 5), count)
    )
    found_us = step_us(step, make_schedule(step, f"outer:{every}"))
    assert shortest_us * (1.0 - 1e-9) <= found_us <= shortest_us * (1.0 + diloco.NEAR_SHORTEST)


def test_own_work_counts_where_it_was_measured() -> None:
    """Packing and taking as compute, an owner's part of the outer step between its messages; a second bucket is packed
    while the first one is sent.
    """
    known = {"push_pack": (1.0, 1e-6), "local_update": (2.0, 4e-6), "pull_take": (3.0, 2e-6)}
    lines = {name: {"alpha_us": alpha, "beta_us_per_byte": beta} for name, (alpha, beta) in known.items()}
    step, free = make(document(), cluster_document((ALPHA_US, BETA), nodes=4, **lines)), problem()
    for stops in ((4,), (2, 4)):
        whole = diloco.schedule_of((4,), 8, 0, inside=stops)
        packed_us = 1.0 + 1e-6 * stops[0] * 1_600_000
        own_us = packed_us + len(stops) * (2.0 + 3.0) + (4e-6 / 4 + 2e-6) * 4 * 1_600_000
        assert step_us(step, whole) == pytest.approx(step_us(free, whole) + own_us / 8)
    assert "free" in outer_steps.assumptions(free)[0][0]
    assert "free" not in outer_steps.assumptions(step)[0][0]


def test_a_dense_round_costs_its_halves_where_both_are_known() -> None:
    made = cluster_document((ALPHA_US, BETA), nodes=4)
    for name, beta in (("reduce_scatter", 4e-4), ("all_gather", 3e-4)):
        made["collectives"][name] = {"alpha_us": 40.0, "beta_us_per_byte": beta}
        step = make(document(), made)
        [round_us] = step.bucket_cost_us([range(4)]) if beta == 4e-4 else [80.0 + 7e-4 * 4 * 1_600_000]
        assert step_us(step, make_schedule(step, "diloco:8")) == pytest.approx(COMPUTE_US + round_us / 8)


def test_fragments_are_layers() -> None:
    layers = [f"layer{index // 3}" for index in range(12)]
    profile = profile_document([(400_000, 40.0)] * 12, forward_us=100.0, layers=layers)
    step = make(profile, cluster_document((ALPHA_US, BETA)))
    for schedule in (make_schedule(step, "outer:8"), make_schedule(step, "outer:30")):
        assert len(schedule.buckets) > 1
        assert all(len(bucket.gradients) % 3 == 0 for bucket in schedule.buckets)


def test_h_is_the_smallest_that_hides_messages() -> None:
    plan = optimize(Profile.parse(document(), "p"), accuracy="relaxed", allow="outer", compress="none")
    assert plan.outer is not None
    assert plan.predicted is not None
    assert plan.predicted.iteration_us <= COMPUTE_US * (1.0 + GAIN)
    assert plan.outer.every > 1
    assert step_us(problem(), make_schedule(problem(), f"outer:{plan.outer.every - 1}")) > COMPUTE_US * (1.0 + GAIN)
    assert any(f"H = {plan.outer.every} is the smallest" in note for note in plan.notes)
    assert plan.fallback is not None
    assert plan.interfaces == ("outer",)


def on_nodes(fast: float, slow: float = BETA) -> dict[str, Any]:
    """The profile on two nodes of two ranks."""
    profile: dict[str, Any] = profile_document(ROWS, forward_us=100.0, update_us=40.0)
    return profile | {"cluster": two_nodes(slow, fast, alpha_us=2.0)}


def test_nodes_as_workers_average_inside_in_every_step_and_send_rounds_between_them() -> None:
    made = on_nodes(1e-4)
    step = make(made, made["cluster"])
    schedule, costs = make_schedule(step, "diloco:8"), step.node_costs
    assert costs is not None
    assert len(schedule.buckets) > 1
    end_us = round_us = 0.0
    for bucket in schedule.buckets:
        size_bytes = 1_600_000.0 * len(bucket.gradients)
        inside_us = costs.scatter.time_us(size_bytes) + costs.gather.time_us(size_bytes)
        end_us = max(end_us, step.ready_list_us[bucket.gradients[-1]]) + inside_us
        round_us += costs.push.time_us(size_bytes) + step.all_gather.curve.at(size_bytes)
    local_us = max(end_us, COMPUTE_US - 40.0) + 40.0
    assert local_us > COMPUTE_US
    assert step_us(step, schedule) == pytest.approx(local_us + round_us / 8)


@pytest.mark.parametrize(
    ("cluster", "nodes", "why"),
    [
        (two_nodes(BETA, 1e-6, alpha_us=2.0), 2, "workers are the 2 nodes: with nodes"),
        (two_nodes(BETA, BETA, alpha_us=2.0), None, "workers are the 4 ranks: with nodes"),
        (cluster_document((ALPHA_US, BETA), nodes=2, ranks_per_node=2), None, "inter-node links are not known"),
        (cluster_document((ALPHA_US, BETA), nodes=1, ranks_per_node=4), None, "all share one node"),
    ],
)
def test_ranks_are_workers_only_where_that_saves_enough(cluster: dict[str, Any], nodes: int | None, why: str) -> None:
    document = on_nodes(1.0) | {"cluster": cluster}
    plan, again = (
        optimize(Profile.parse(document, "p"), accuracy="relaxed", allow="outer", compress="wire") for _ in range(2)
    )
    assert plan.outer is not None
    assert plan.world.nodes == nodes
    assert plan.fallback is not None
    assert plan.fallback.world.nodes == cluster["nodes"]
    assert any(why in note for note in plan.notes)
    assert plan.to_document() == again.to_document()
    assert parse_plan(plan.to_document()) == plan
    assert plan.outer.problem_in(plan.buckets) is None


def with_update(update_us: float) -> dict[str, Any]:
    """The profile on two nodes of two ranks with fast links inside, and an optimizer whose step can be shared."""
    made: dict[str, Any] = profile_document(ROWS, forward_us=100.0, update_us=update_us)
    made["compute"]["optimizer"] = {"name": "AdamW", "adaptive": True, "elementwise": True, "state_bytes": 12_800_000}
    return made | {"cluster": two_nodes(BETA, 1e-6, alpha_us=2.0)}


def test_a_shared_step_takes_half_the_update_and_gathers_weights_behind_it() -> None:
    profile = with_update(200.0)
    step = make(profile, profile["cluster"])
    costs = step.node_costs
    assert costs is not None
    schedule = diloco.schedule_of((4,), 8, 0, worker=SHARDED_NODE, inside=(2, 4))
    end_us = gathers_us = round_us = 0.0
    for bucket in schedule.buckets:
        size_bytes = 1_600_000.0 * len(bucket.gradients)
        end_us = max(end_us, step.ready_list_us[bucket.gradients[-1]]) + costs.scatter.time_us(size_bytes)
        gathers_us += costs.gather.time_us(size_bytes)
        round_us += costs.push.time_us(size_bytes) + step.all_gather.curve.at(size_bytes)
    flags_us = costs.gather.time_us(2.0 * 4)
    local_us = max(end_us + flags_us, 400.0) + 100.0 + gathers_us
    assert step_us(step, schedule) == pytest.approx(local_us + round_us / 8)
    assert simulate_schedule(step, schedule).iteration_us == step_us(step, schedule)


@pytest.mark.parametrize(
    ("update_us", "memory_mib", "allow", "shared"),
    [
        (200.0, None, ("outer", "sharded-step"), True),
        (200.0, None, "outer", False),
        (1.0, None, ("outer", "sharded-step"), False),
        (1.0, 27.0, ("outer", "sharded-step"), True),
    ],
)
def test_ranks_of_a_node_share_the_step_where_that_is_shorter_or_nothing_else_fits(
    update_us: float, memory_mib: float | None, allow: str | tuple[str, ...], *, shared: bool
) -> None:
    """Weights, gradients, the whole state, outer steps' own and a message need 29 MiB, with half of the state 24."""
    profile = Profile.parse(with_update(update_us), "p")
    plan = optimize(profile, accuracy="relaxed", allow=allow, compress="none", max_memory_mib=memory_mib)
    assert plan.outer is not None
    assert plan.world.nodes == 2
    assert bool(plan.outer.sharded_step) is shared
    assert plan.interfaces == (("sharded-step", "outer") if shared else ("outer",))
    assert parse_plan(plan.to_document()) == plan
    assert not plan.sharded
    assert plan.certificate is not None
    assert plan.certificate.lower_bound_us == pytest.approx(400.0 + update_us / (2 if "sharded-step" in allow else 1))
    assert not any("plans are made without that" in note for note in plan.notes) or not shared


def test_the_fallback_of_a_shared_step_fits_into_memory_too() -> None:
    """Of a state of three copies a rank that updates all weights needs 31 MiB, with outer steps and half of it 27."""
    made = with_update(200.0)
    made["compute"]["optimizer"]["state_bytes"] = 19_200_000

    def planned(memory_mib: float, passes: str = "merge,shard_updates,outer") -> Plan:
        allow = ("outer", "sharded-step")
        profile = Profile.parse(made, "p")
        return optimize(profile, accuracy="relaxed", allow=allow, passes=passes, max_memory_mib=memory_mib)

    plan = planned(28.0)
    assert plan.outer is not None
    assert plan.fallback is not None
    assert plan.predicted is not None
    assert plan.fallback.predicted is not None
    assert (plan.outer.sharded_step, plan.fallback.sharded) == (True, True)
    assert f"{1.0 - plan.predicted.iteration_us / plan.fallback.predicted.iteration_us:.1%} shorter" in plan.notes[0]
    assert parse_plan(plan.to_document()) == plan
    for tight in (planned(20.0), planned(28.0, "merge,shard_updates,outer{step=never}")):
        assert tight.sharded
        assert any("outer steps need" in note for note in tight.notes)


@pytest.mark.parametrize("worker", [NODE, SHARDED_NODE])
@pytest.mark.parametrize("seed", range(4))
def test_fragments_between_nodes_hide_as_much_as_any(seed: int, worker: Worker) -> None:
    chance = random.Random(seed)
    rows = [(chance.choice((1000, 50_000, 400_000)), chance.choice((10.0, 60.0, 120.0))) for _ in range(4)]
    cluster = two_nodes(chance.choice((5e-4, 2e-3)), chance.choice((1e-5, 2e-4)), alpha_us=chance.choice((2.0, 60.0)))
    step, every = make(profile_document(rows, forward_us=100.0, update_us=40.0), cluster), chance.choice((2, 8))
    shortest_us = min(
        step_us(step, diloco.schedule_of((*cuts, 4), every, late, Dense(), worker, inside))
        for late in diloco.DELAYS
        if late < every
        for count in range(min(every, 4))
        for cuts in itertools.combinations(range(1, 4), count)
        for inside in ((), *diloco.cuts_inside(step, worker))
    )
    found_us = step_us(step, diloco.best_cut(step, every, Dense(), worker))
    assert shortest_us * (1.0 - 1e-9) <= found_us <= shortest_us * (1.0 + diloco.NEAR_SHORTEST)


def test_without_being_allowed_there_are_none() -> None:
    assert optimize(Profile.parse(document(), "p"), accuracy="relaxed", compress="none").outer is None
    exact = optimize(Profile.parse(document(), "p"), allow="outer")
    assert exact.outer is None


def test_fast_links_stay_synchronous() -> None:
    for cluster in (document(1e-9)["cluster"], cluster_document((1.0, 1e-9), nodes=4)):
        made = Profile.parse(document() | {"cluster": cluster}, "p")
        plan = optimize(made, accuracy="relaxed", allow="outer", compress="none")
        assert plan.outer is None
    assert any("nothing to gain, stay synchronous" in note for note in plan.notes)


@pytest.mark.parametrize("largest", [1, 8])
def test_where_no_h_is_sufficient_the_shortest_step_is_taken(largest: int) -> None:
    step = make(profile_document(ROWS, forward_us=100.0, update_us=40.0), cluster_document((ALPHA_US, 0.02), nodes=4))
    found = Outer(max_period=largest, compress="wire").apply(make_schedule(step, "optimal"), step)
    assert {type(bucket.codec) for bucket in found.schedule.buckets} == {Wire}
    assert outer_steps.mode_of(found.schedule).every == largest
    assert any("dense takes" in note and "int8 takes" in note for note in found.notes)


def test_encodings_that_need_too_much_memory_are_left_out() -> None:
    """Synchronous steps need 25 MiB; dense outer ones half a copy of 6 MiB more, 8 bits two and a quarter."""
    made = profile_document(ROWS, forward_us=100.0, update_us=40.0)
    made["compute"]["optimizer"] = {"name": "AdamW", "adaptive": True, "elementwise": True, "state_bytes": 12_800_000}
    step = make(made, cluster_document((ALPHA_US, 0.02), nodes=4))
    for memory_mib, codec in ((0.0, Wire), (45.0, Wire), (35.0, Dense)):
        found = Outer(max_period=8, compress="wire", memory_mib=memory_mib).apply(make_schedule(step, "optimal"), step)
        assert {type(bucket.codec) for bucket in found.schedule.buckets} == {codec}
    found = Outer(max_period=8, memory_mib=20.0).apply(make_schedule(step, "optimal"), step)
    assert "and a rank has less" in found.why_not


@pytest.mark.parametrize("name", ["diloco:{}", "streaming:{}:4", "streaming:{}:3", "outer:{}"])
def test_long_periods_are_simulated_as_short_ones(name: str) -> None:
    for every in (4, 7, 8, 9, 64, 101):
        schedule = make_schedule(problem(), name.format(every))
        _, begin_us, end_us = outer_steps._period(problem(), schedule)
        assert step_us(problem(), schedule) == pytest.approx((end_us - begin_us) / every)
    with mock.patch.object(outer_steps, "ops_of", wraps=outer_steps.ops_of) as simulated:
        step_us(problem(), make_schedule(problem(), name.format(10_000)))
    assert all(outer_steps.mode_of(call.args[1]).every <= 4 * 9 for call in simulated.call_args_list)


def test_the_largest_period_is_checked() -> None:
    with pytest.raises(InputError, match="--max-period: found 0, expected a whole number of steps from 1 to 10000"):
        optimize(Profile.parse(document(), "p"), accuracy="relaxed", allow="outer", max_period=0)
    with pytest.raises(InputError, match="--max-period 8: found it without --allow outer"):
        optimize(Profile.parse(document(), "p"), accuracy="relaxed", max_period=8)


@pytest.mark.parametrize(
    "line",
    [
        "outer every=4", "outer every=4 fragments=1,2", "outer every=4 delay=2", "outer every=4 delay=2 worker=node",
        "outer every=4 worker=node mean", "outer every=4 worker=sharded-node",
    ],
)  # fmt: skip
def test_text_form(line: str) -> None:
    assert str(OuterSteps.parse(line)) == line


def test_fragments_are_of_the_buckets_there_are() -> None:
    schedule = make_schedule(problem(), "streaming:8:4")
    assert outer_steps.fragments_of(schedule) == [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]
    fewer = schedule.mode.fitted(2)
    assert isinstance(fewer, OuterSteps)
    assert fewer.fragments == ()
