"""Delayed synchronization: Eq. 4, the simulated steady state, and what the halves of an all-reduce cost."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import delayed_reference
import numpy as np
import pytest
from builders import cluster_document, make, problems, profile_document
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.ssd import Terms, mean_step_us
from planner.decide.simulate import idle_us
from planner.decide.strategies import make_schedule
from planner.emit.lower import lower
from planner.ir import Schedule
from planner.model.delay import (
    WORK,
    CycleTimeline,
    StepSpan,
    steady_state,
)
from planner.model.delay_load import StepWork
from planner.model.modes import delayed as mode
from planner.model.modes import simulate_schedule, step_us
from planner.model.modes.delayed import Delayed
from planner.model.problem import Problem
from planner.model.schedule_text import parse_schedule
from planner.verify import VerifyError, verify
from runtime.errors import InputError

STEPS = st.integers(1, 5)


def one_bucket(alpha_us: float, **options: Any) -> StepWork:
    """Forward 100, backward 200, a push and a pull of half of alpha each; the owner's update takes 2, the local 10."""
    options = {"local_update": {"alpha_us": 10.0, "beta_us_per_byte": 0.0}, **options}
    profile = profile_document([(1000, 200.0)], forward_us=100.0, update_us=8.0)
    problem = make(profile, cluster_document((alpha_us, 0.0), **options))
    return StepWork.of(problem, Schedule.from_boundaries([1]))


def random_load(rng: np.random.Generator, buckets: int) -> StepWork:
    """Communication from far less to far more than computation."""
    scale = 10 ** rng.uniform(-1.0, 1.0)
    backward_us = rng.exponential(100.0, buckets)
    forward_us = float(rng.uniform(0.0, 200.0))
    return StepWork(
        forward_us=forward_us,
        ready_us=tuple((forward_us + np.cumsum(backward_us)).tolist()),
        push_us=tuple((rng.exponential(100.0, buckets) * scale).tolist()),
        pull_us=tuple((rng.exponential(100.0, buckets) * scale * rng.choice([0.3, 1.0, 3.0])).tolist()),
        factors=((1.0, 1.0),) * buckets,
        owner_us=float(rng.uniform(0.0, 20.0)),
        local_update_us=float(rng.choice([0.0, 30.0])),
        pack_us=tuple((rng.exponential(10.0, buckets) * rng.choice([0.0, 1.0])).tolist()),
    )


def loads(count: int, buckets: int | None = None) -> list[StepWork]:
    rng = np.random.default_rng(7)
    return [random_load(rng, buckets or int(rng.integers(1, 6))) for _ in range(count)]


# Eq. 4


@pytest.mark.parametrize(
    ("alpha_us", "case", "means_us"),
    [
        # Push and pull 50 each, 102 with the owner's update: all of it hides behind the next step, which takes 310.
        (100.0, 3, [310.0, 310.0, 310.0]),
        # Pushes of 200 hide. Ready at 300, the weights come at 702, and the next step could use them at 610.
        (400.0, 1, [402.0, 356.0, 310.0 + 92.0 / 3]),
        # Pushes of 400, and 2 of owners behind each, take longer than a step: the network is never idle.
        (800.0, 2, [802.0, 602.0, (3 * 402.0 + 400.0) / 3]),
    ],
)
def test_eq_4_and_the_simulator_by_hand(alpha_us: float, case: int, means_us: list[float]) -> None:
    load = one_bucket(alpha_us)
    assert load.terms.case == case
    for k, expected_us in enumerate(means_us, start=1):
        assert mean_step_us(load.terms, k) == pytest.approx(expected_us, rel=1e-12)
        assert steady_state(load, k).mean_us == pytest.approx(expected_us, rel=1e-12)


def test_eq_4_is_what_the_simulator_finds_for_one_bucket() -> None:
    """There every assumption of the closed form holds: h_b^L is all of backward, and a push has no gaps.

    Where packing takes time it has: a bucket is packed when its last push has ended.
    """
    seen = set()
    for load in (replace(one, pack_us=()) for one in loads(150, buckets=1)):
        seen.add(load.terms.case)
        for k in (1, 2, 3, 5):
            found = steady_state(load, k)
            assert found.settled
            assert found.mean_us == pytest.approx(mean_step_us(load.terms, k), rel=1e-8)
    assert seen == {1, 2, 3}


def test_eq_4_is_never_above_the_simulator() -> None:
    """With several buckets it misses gaps between pushes, backlogs, and that a network never idle saves nothing."""
    seen = set()
    for load in loads(200):
        seen.add(load.terms.case)
        for k in (1, 2, 4):
            mean_us = steady_state(load, k).mean_us
            assert mean_us >= mean_step_us(load.terms, k) * (1 - 1e-9)
            network_us = sum(load.push_us) + load.owner_us + sum(load.pull_us) / k
            assert mean_us >= max(load.compute_us, network_us) * (1 - 1e-9)
    assert seen == {1, 2, 3}


def equal_layers(pull_us: float) -> StepWork:
    """Four layers, 25 of backward and 30 of push each: pushes follow one another without a gap."""
    ready_us = (125.0, 150.0, 175.0, 200.0)
    one = (1.0, 1.0)
    return StepWork(
        forward_us=100.0, ready_us=ready_us, push_us=(30.0,) * 4, pull_us=(pull_us,) * 4, factors=(one,) * 4,
        owner_us=0.0, local_update_us=0.0,
    )  # fmt: skip


def test_eq_4_with_equal_layers() -> None:
    """Pulls end at 125 + 120 + 240 = 485 of a step, and the next one could use them at 400: 85 are exposed."""
    load = equal_layers(60.0)
    assert (load.terms.case, load.terms.late_us) == (1, 85.0)
    for k in (2, 3, 4):
        assert steady_state(load, k).mean_us == pytest.approx(200.0 + 85.0 / k)
        assert mean_step_us(load.terms, k) == pytest.approx(200.0 + 85.0 / k)
    # In every step 360 have to travel, of which the closed form takes the 75 of backward after the first layer off.
    assert steady_state(load, 1).mean_us == pytest.approx(360.0)
    assert mean_step_us(load.terms, 1) == pytest.approx(285.0)
    assert steady_state(equal_layers(10.0), 1).mean_us == mean_step_us(equal_layers(10.0).terms, 1) == 200.0


def test_eq_4_has_no_step_between_its_cases() -> None:
    terms = Terms(
        forward_us=100.0, backward_us=200.0, first_us=20.0, push_us=0.0, exchange_us=0.0, local_update_us=10.0
    )
    late = replace(terms, exchange_us=590.0)  # late by 590 + 120 − 610
    assert (late.late_us, late.case, replace(terms, exchange_us=490.0).case) == (100.0, 1, 3)
    below, above = (replace(terms, push_us=push_us, exchange_us=700.0) for push_us in (310.0 - 1e-9, 310.0))
    assert (below.case, above.case) == (1, 2)
    assert mean_step_us(below, 3) == pytest.approx(mean_step_us(above, 3), rel=1e-9)


def test_eq_4_is_what_the_paper_prints() -> None:
    """The record of the equation, read as arithmetic."""
    records = json.loads((Path(__file__).parents[2] / "data" / "paper_tables.json").read_text(encoding="utf-8"))
    [record] = [item for item in records if item["id"] == "ssd-041"]
    printed = [text.partition(": ")[2] for text in record["value"].split("; ")]
    names = {"h_loc^1": "h_loc", "h_b^L": "h_b", "sum h_s": "sum_h"}
    for load in loads(30):
        terms = load.terms
        values = {
            "T_f": terms.forward_us, "T_b": terms.backward_us, "h_b": terms.first_us, "sum_h": terms.push_us,
            "T_c": terms.exchange_us, "h_loc": terms.local_update_us, "k": 3,
        }  # fmt: skip
        text = printed[terms.case - 1]
        for name, plain in names.items():
            text = text.replace(name, plain)
        assert mean_step_us(terms, 3) == pytest.approx(eval(text, {}, values), rel=1e-12)


# The simulator


def agrees(load: StepWork, k: int) -> None:
    """Within what a backlog may still add to or take from the reference's mean; nearly equal where it does neither."""
    found, cycles = steady_state(load, k), 50
    idle_us, behind_us = delayed_reference.mean_us(load, k, cycles)
    slack_us = (load.compute_us + load.terms.exchange_us) / cycles / k
    if abs(idle_us - behind_us) <= 1e-10 * idle_us:
        slack_us = 1e-8 * idle_us
    assert min(idle_us, behind_us) - slack_us <= found.mean_us <= max(idle_us, behind_us) + slack_us
    assert found.error_us <= 1e-3 * found.mean_us


def test_steady_state_against_many_steps() -> None:
    for load in loads(40):
        for k in (1, 2, 4):
            agrees(load, k)
            agrees(replace(load, take_us=25.0), k)


@settings(max_examples=25)
@given(problems(max_count=6, mixed=True), STEPS, st.sampled_from(["wfbp", "ddp"]))
def test_steady_state_of_problems_with_ties(problem: Problem, k: int, buckets: str) -> None:
    """Times of 0, and DDP's buckets of several dtypes, which may be ready in another order than they leave."""
    agrees(StepWork.of(problem, make_schedule(problem, buckets)), k)


def test_a_backlog_that_grows_slowly_is_found_at_once() -> None:
    """The network takes a millionth more than computation: a million steps pass before anything waits."""
    load = replace(equal_layers(0.0), push_us=(50.0 * (1 + 1e-6),) * 4)
    found = steady_state(load, 2)
    assert found.settled
    assert found.mean_us == pytest.approx(200.0 * (1 + 1e-6), rel=1e-9)


def test_more_delay_is_never_slower_without_contention() -> None:
    for load in loads(200):
        means_us = [steady_state(load, k).mean_us for k in range(1, 6)]
        for less_us, more_us in pairwise(means_us):
            assert more_us <= less_us * (1 + 1e-8)


def test_contention_makes_both_slower() -> None:
    """Pushes of 100 beside 310 of computation, each factor 2: while they travel, for 200, compute does 100."""
    load = replace(one_bucket(200.0), pull_us=(0.0,), owner_us=0.0, factors=((2.0, 2.0),))
    assert steady_state(load, 1).mean_us == pytest.approx(310.0 + 100.0)
    assert steady_state(replace(load, factors=((1.0, 2.0),)), 1).mean_us == pytest.approx(310.0)


def test_packing_and_taking_are_computation() -> None:
    """Weights of 4000 bytes: 3 + 4 to pack a push in every step, 5 + 8 to take what every second one pulls."""
    lines = {
        "push_pack": {"alpha_us": 3.0, "beta_us_per_byte": 0.001},
        "pull_take": {"alpha_us": 5.0, "beta_us_per_byte": 0.002},
    }
    assert steady_state(one_bucket(100.0, **lines), 2).mean_us == pytest.approx(310.0 + 7.0 + 13.0 / 2)
    named = [span.task for span in simulate_schedule(*delayed(2, 10.0, **lines)).spans]
    assert {"pack", "pack 1"} <= set(named)


def node_load(rng: np.random.Generator, buckets: int) -> StepWork:
    """As `random_load`, with nodes of several ranks."""
    load = random_load(rng, buckets)
    scale = 10 ** rng.uniform(-2.0, 0.0)
    times = [tuple((rng.exponential(100.0, buckets) * scale).tolist()) for _ in range(3)]
    return replace(load, scatter_us=times[0], gather_us=times[1], spread_us=times[2], pack_us=())


def test_nodes_as_workers_against_many_steps() -> None:
    """Step by step on the clock: averages inside nodes, pushes and pulls between them, and what is spread."""
    rng = np.random.default_rng(11)
    for _ in range(40):
        load = node_load(rng, int(rng.integers(1, 5)))
        for k in (1, 2, 4):
            agrees(load, k)


def test_fast_links_inside_nodes_leave_delay_between_nodes_as_it_is() -> None:
    for load in loads(20):
        buckets = len(load.ready_us)
        inside = replace(load, scatter_us=(1e-9,) * buckets, gather_us=(1e-9,) * buckets, spread_us=(1e-9,) * buckets)
        for k in (1, 3):
            assert steady_state(inside, k).mean_us == pytest.approx(steady_state(load, k).mean_us, rel=2e-3)


def test_averages_inside_nodes_by_hand() -> None:
    """Ready at 300, averaged at 300 + 40 + 30; pushed from 340 on for 50. Pulled and spread in the shadow of a step."""
    profile = profile_document([(1000, 200.0)], forward_us=100.0, update_us=8.0)
    samples = {
        "inter/reduce_scatter": [[2000, 50.0]], "inter/all_gather": [[2000, 20.0]],
        "intra/reduce_scatter": [[4000, 40.0]], "intra/all_gather": [[4000, 30.0]],
    }  # fmt: skip
    document = cluster_document(
        (100.0, 0.0), nodes=2, ranks_per_node=2, local_update={"alpha_us": 10.0, "beta_us_per_byte": 0.0}
    )
    problem = make(profile, document | {"samples": samples})
    load = StepWork.of(problem, Schedule.from_boundaries([1]))
    assert (load.push_us, load.pull_us) == ((50.0,), (20.0,))
    assert (load.scatter_us, load.gather_us, load.spread_us, load.owner_us) == ((40.0,), (30.0,), (30.0,), 2.0)
    assert steady_state(load, 2).mean_us == 380.0
    timeline = simulate_schedule(problem, replace(Schedule.from_boundaries([1]), mode=Delayed(2)))
    sent = {(span.task, span.resource): span.start_us for span in timeline.spans if span.start_us < 450.0}
    assert sent[("bucket 0 node_reduce_scatter", "intra")] == 300.0
    assert sent[("bucket 0 reduce_scatter", "inter")] == 340.0
    assert sent[("bucket 0 spread", "intra")] == 412.0
    sizes = mode.message_bytes(problem, replace(Schedule.from_boundaries([1]), mode=Delayed(2)))
    assert sizes == {"inter": 4000.0 * 1.5 / 2, "intra": 4000.0 * 2.5}


def delayed(k: int, alpha_us: float = 400.0, **cluster: Any) -> tuple[Problem, Schedule]:
    rows = [(1000, 120.0), (3000, 80.0)]
    profile = profile_document(rows, forward_us=100.0, update_us=8.0)
    return make(profile, cluster_document((alpha_us, 0.0), **cluster)), replace(
        Schedule.from_boundaries([1, 2]), mode=Delayed(k)
    )


@pytest.mark.parametrize("k", [1, 2, 3])
def test_timeline_of_one_cycle(k: int) -> None:
    problem, schedule = delayed(k, local_update={"alpha_us": 10.0, "beta_us_per_byte": 0.0})
    timeline = simulate_schedule(problem, schedule)
    assert isinstance(timeline, CycleTimeline)
    assert timeline == mode.simulate(problem, schedule)
    assert timeline.iteration_us == step_us(problem, schedule) == mode.step_us(problem, schedule)
    assert (timeline.forward_us, timeline.backward_us, timeline.update_us) == (100.0, 200.0, 10.0)
    assert timeline.exposed_us == pytest.approx(timeline.iteration_us - 310.0)
    assert timeline.steps % k == 0
    spans = [span for span in timeline.spans if isinstance(span, StepSpan)]
    assert len(spans) == len(timeline.spans)
    for step in range(timeline.steps):
        sent = [span.task for span in spans if span.step == step and span.bucket is not None]
        pulls = ["bucket 0 all_gather", "bucket 1 all_gather"] if step % k == 0 else []
        assert sent == ["bucket 0 reduce_scatter", "bucket 1 reduce_scatter", *pulls]
    updates = [span.end_us for span in spans if span.task.startswith("update")]
    assert updates[-1] == pytest.approx(timeline.steps * timeline.iteration_us)
    pushes = [span for span in spans if span.ready_us is not None]
    assert all(span.ready_us <= span.start_us + 1e-9 for span in pushes if span.ready_us is not None)
    network = sorted(timeline.on("network"), key=lambda span: span.start_us)
    assert all(a.end_us <= b.start_us + 1e-9 for a, b in pairwise(network))
    assert next(span.task for span in spans) == "forward"


def test_what_a_mean_step_sends_and_leaves_idle() -> None:
    problem, schedule = delayed(2)
    assert mode.message_bytes(problem, schedule) == {"network": 16000.0 * 1.5}
    timeline = simulate_schedule(problem, schedule)
    idle = idle_us(timeline)
    assert idle["compute"] == pytest.approx(timeline.exposed_us)
    assert idle["network"] == pytest.approx(timeline.iteration_us - 2 * 200.0 - 200.0)
    shares = mode.critical_path(problem, schedule)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["reduce_scatter"] > 0.3


def test_effort_is_bounded_and_what_is_left_open_is_said() -> None:
    """A contended network that hardly settles: more cycles are simulated for few buckets than for many."""
    few = replace(equal_layers(20.0), factors=((1.3, 1.7),) * 4)
    found = steady_state(few, 2)
    assert found.error_us <= 1e-3 * found.mean_us
    many = random_load(np.random.default_rng(3), WORK // 40)
    many = replace(many, factors=((1.3, 1.7),) * len(many.ready_us))
    found = steady_state(many, 8)
    assert len(found.ran.lanes["network"]) < 4 * WORK
    assert found.settled == (found.error_us == 0.0)


# Costs


def test_several_dtypes_are_pushed_one_by_one() -> None:
    document = profile_document([(10, 1.0), (10, 1.0)], dtypes=["float32", "float64"])
    problem = make(document, cluster_document((100.0, 1.0)))
    load = StepWork.of(problem, Schedule.from_boundaries([2]))
    assert load.push_us == (pytest.approx(50.0 + 20.0 + 50.0 + 40.0),)
    assert load.pull_us == load.push_us


def test_fewer_servers_receive_and_update_accordingly_more() -> None:
    """Fig. 6 of the paper: of 4 workers 2 or 1 are servers; the start-up of a message stays."""
    problem = make(profile_document([(10, 1.0), (20, 1.0)], update_us=8.0), cluster_document((100.0, 1.0)))
    schedule = Schedule.from_boundaries([2])
    works = {servers: StepWork.of(problem, schedule, servers=servers) for servers in (0, 4, 2, 1)}
    assert works[0] == works[4]
    assert [works[servers].push_us for servers in (4, 2, 1)] == [(50.0 + 60.0 * load,) for load in (1, 2, 4)]
    assert [works[servers].pull_us for servers in (4, 2, 1)] == [(50.0 + 60.0 * load,) for load in (1, 2, 4)]
    assert [works[servers].owner_us for servers in (4, 2, 1)] == [2.0, 4.0, 8.0]
    names = ("ssd:2", "ssd:2:4", "ssd:2:2", "ssd:2:1")
    whole, four, two, one = (step_us(problem, make_schedule(problem, name)) for name in names)
    assert whole == four < two < one
    with pytest.raises(InputError, match="ssd with 5 servers, expected at most"):
        make_schedule(problem, "ssd:2:5")
    with pytest.raises(InputError, match="delay k=2 servers=2, expected servers on all workers"):
        lower(problem, make_schedule(problem, "ssd:2:2"))


# The schedule


def test_text_form_of_a_delay() -> None:
    schedule = Schedule(buckets=Schedule.from_boundaries([2]).buckets, mode=Delayed(3))
    assert str(schedule) == "delay k=3\n[0-1] all_reduce/library none"
    assert parse_schedule(str(schedule)) == schedule
    fewer = replace(schedule, mode=Delayed(3, servers=2))
    assert str(fewer).startswith("delay k=3 servers=2\n")
    assert parse_schedule(str(fewer)) == fewer


def test_delay_is_for_relaxed_schedules_whose_buckets_can_be_pushed() -> None:
    schedule = parse_schedule("delay k=2\n[0-1] all_reduce/library none")
    verify(schedule, (0, 0), accuracy="relaxed")
    for accuracy in ("exact", "bounded"):
        with pytest.raises(VerifyError, match=f"delay k=2: that is relaxed, but the plan has to be {accuracy}"):
            verify(schedule, (0, 0), accuracy=accuracy)
    with pytest.raises(VerifyError, match="a delay of 0 steps is none"):
        verify(replace(schedule, mode=Delayed(0)), (0, 0), accuracy="relaxed")
    verify(parse_schedule("delay k=2\n[0-1] sparse/flat topk k=1"), (0, 0), accuracy="relaxed")
    for form in ("sparse/hitopk topk k=1", "all_reduce/torus_2d none"):
        with pytest.raises(VerifyError, match="with delay, buckets are pushed whole or selected from"):
            verify(parse_schedule(f"delay k=2\n[0-1] {form}"), (0, 0), accuracy="relaxed")
    with pytest.raises(VerifyError, match="with delay, nothing is selected by layer"):
        verify(parse_schedule("delay k=2\n[0-1] sparse/flat topk k=2 ks=1,1"), (0, 0), accuracy="relaxed")
