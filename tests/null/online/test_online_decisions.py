"""What a run concludes from its own steps: contention, curves, trials; and the process that decides."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from builders import usual_document
from hypothesis import example, given
from hypothesis import strategies as st

from planner import optimize, simulate
from planner.cost.model import scale
from planner.documents.profile import parse_profile
from planner.ir import GAIN
from planner.online.deciding import Decision, decide, names_of
from planner.online.measuring import (
    Overlap,
    Seen,
    find_contention,
    us_per_byte,
    with_costs,
    with_own_messages,
)
from planner.online.opening import IN_RUN
from planner.online.probes import Costs, Piece, costs_of, pieces_of, probe_sizes
from planner.online.trying import FEWEST_ROUNDS, MIN_BUCKET_RATIO, MOST_ROUNDS, MOST_SIZES, climb, judge
from runtime.monitor.verdict import half_interval
from runtime.plan import parse_plan
from runtime.sparse.compressors.wire import WIRE_DTYPES

NAMES = ("the plan of 3 buckets", "DDP's buckets")


def until_decided(rounds: list[tuple[float, float]]) -> tuple[int, Any]:
    for count in range(1, MOST_ROUNDS + 1):
        if (verdict := judge(rounds[:count], NAMES)) is not None:
            return count, verdict
    raise AssertionError("a trial has to end")


@given(st.lists(st.tuples(st.floats(1e3, 1e6), st.floats(1e3, 1e6)), min_size=MOST_ROUNDS, max_size=MOST_ROUNDS))
def test_every_trial_ends_with_the_faster(rounds: list[tuple[float, float]]) -> None:
    count, verdict = until_decided(rounds)
    assert count >= FEWEST_ROUNDS
    assert verdict.good == (verdict.step_us < verdict.other_us)
    new_us, old_us = (sum(column) / count for column in zip(*rounds[:count], strict=True))
    if abs(old_us - new_us) > verdict.noise_us * (1.0 + 1e-9):
        assert verdict.step_us == pytest.approx(new_us)
    else:  # of the middle half
        middle = sorted(rounds[:count], key=lambda one: one[1] - one[0])[count // 4 : count - count // 4]
        assert min(new for new, _ in middle) <= verdict.step_us * (1.0 + 1e-9)
        assert verdict.step_us <= max(new for new, _ in middle) * (1.0 + 1e-9)


def test_times_are_those_of_a_step_of_the_optimizer() -> None:
    """Where each of its four micro-batches exchanges; what is measured and compared stays the time of an exchange."""
    verdict = judge([(9e3, 10e3)] * FEWEST_ROUNDS, NAMES, exchanges=4)
    assert verdict is not None
    assert verdict.step_us == 9e3
    assert "take 36.00 ms, with DDP's buckets 40.00 ms" in verdict.text


def test_an_interrupted_block_does_not_decide() -> None:
    rounds = [(102.0 + index % 3, 100.0) for index in range(MOST_ROUNDS)]
    count, verdict = until_decided([*rounds[:2], (102.0, 190.0), *rounds[3:]])
    assert count == MOST_ROUNDS
    assert not verdict.good
    assert (verdict.step_us, verdict.other_us) == (pytest.approx(102.5), 100.0)


def test_a_trial_ends_where_it_has_lost_what_it_may() -> None:
    slower = [(120.0, 100.0)] * 4
    assert judge(slower[:2], NAMES) is None
    assert judge(slower[:2], NAMES, may_lose_us=200.0) is None
    verdict = judge(slower[:3], NAMES, may_lose_us=200.0)
    assert verdict is not None
    assert not verdict.good
    assert judge([(180.0, 100.0), (90.0, 100.0)], NAMES, may_lose_us=200.0) is None
    assert judge([(180.0, 100.0)], NAMES, may_lose_us=200.0) is not None
    count, verdict = until_decided([(90.0, 100.0), (91.0, 100.0)] * 5)
    assert count == FEWEST_ROUNDS
    assert verdict.good
    assert "the run goes on with the plan of 3 buckets" in verdict.text


@given(st.sets(st.integers(1, 200), max_size=9), st.integers(1, 200), st.integers(1, 200))
@example({6, 11}, 5, 8)
def test_trials_of_sizes_go_where_steps_become_shorter(counts: set[int], present: int, best: int) -> None:
    """Steps are the longer the further, by ratio, a number of buckets is from the best one."""

    def step(count: int) -> float:
        return abs(math.log(count / best))

    at, tried = present, []
    sizes = climb({**dict.fromkeys(counts, 1.0), 1000: 1.3}, present, 0.1)
    with suppress(StopIteration):
        count = next(sizes)
        while True:
            tried.append(count)
            assert count in counts
            assert max(count / at, at / count) >= MIN_BUCKET_RATIO
            faster = step(count) < step(at)
            at = count if faster else at
            count = sizes.send(faster)
    assert len(tried) <= MOST_SIZES
    assert len(set(tried)) == len(tried)
    assert step(at) <= step(present)
    if len(tried) < MOST_SIZES:
        assert all(step(at) <= step(one) for one in counts if not at / MIN_BUCKET_RATIO < one < at * MIN_BUCKET_RATIO)


def test_one_bucket_is_tried_where_a_few_are_slower_than_some() -> None:
    steps_us, best, sizes = {1: 84.0, 2: 88.0, 3: 85.0, 5: 87.0}, 3, climb(dict.fromkeys([1, 2, 5], 1.0), 3, 0.0)
    with suppress(StopIteration):
        count = next(sizes)
        while True:
            best = min(best, count, key=lambda one: steps_us[one])
            count = sizes.send(best == count)
    assert best == 1


def seen(shared_us: float, lost: float, network: float) -> Seen:
    """Two ranks with a plan whose one message of 1 MB lies in backward for so long; alone it takes 10 ms."""
    one = Overlap(50e3 + lost * shared_us, shared_us, (10e3 * network,), (0.9,))
    return Seen((1_000_000,), (one, one))


@given(st.floats(0.0, 0.6), st.floats(1.0, 4.0))
def test_contention_is_found_from_plans_that_overlap_differently(lost: float, network: float) -> None:
    curve = ((1000.0, 100.0), (1_000_000.0, 10e3))
    found = find_contention([seen(2e3, lost, network), seen(20e3, lost, network), seen(9e3, lost, network)], curve)
    assert found is not None
    assert found.compute == pytest.approx(1.0 / (1.0 - lost), rel=1e-3)
    assert found.network == pytest.approx(network, rel=1e-3)
    assert find_contention([seen(2e3, lost, network), seen(2.1e3, lost, network)], curve) is None


def test_a_curve_is_of_the_rank_that_came_last_and_goes_on_with_the_steps_own_messages() -> None:
    sizes = probe_sizes(3_000_000)
    assert sizes[0] == 1024
    assert sizes[-1] == 3_000_000
    pieces = pieces_of(3_000_000, narrow=False)
    assert [piece.size_bytes for piece in pieces] == sizes
    alone = [((100.0 + piece.size_bytes * 1e-3) * piece.calls,) for piece in pieces]
    waited = [(time_us + 5000.0,) for (time_us,) in alone]
    curve = costs_of(pieces, [[*alone, *waited, *alone], [*waited, *alone, *waited]]).all_reduce
    assert [time_us for _, time_us in curve] == pytest.approx([100.0 + size * 1e-3 for size in sizes])
    assert with_own_messages(curve, {500.0: 1.0, 2e7: 20e3, 3e7: 1.0})[len(curve) :] == ((2e7, 20e3),)


def test_what_a_byte_takes_is_no_matter_of_a_few_that_waited_or_shared_the_link() -> None:
    for last_us in (0.0, 3e3):
        ranks = [Overlap(1e4, 3e3, (3e3 + late, last_us), (1.0, 0.0)) for late in (900.0, 0.0)]
        assert 3e-3 <= us_per_byte(ranks, 10**6 + 500) * 1.001 <= 6.1e-3
    assert us_per_byte([Overlap(1e4, 0.0, (), ())], 500) > 0


def test_a_message_waits_for_the_rank_that_encodes_slowest() -> None:
    pieces = pieces_of(3_000_000, narrow=True)
    assert {piece.name for piece in pieces if piece.encodes} == set(WIRE_DTYPES)
    assert [piece.calls for piece in pieces if piece.encodes] == [1] * 2 * len(WIRE_DTYPES)

    def times(factor: float) -> list[tuple[float, ...]]:
        return [
            (factor * piece.size_bytes, 2.0 * factor * piece.size_bytes) if piece.encodes else (100.0 * piece.calls,)
            for piece in pieces
        ]

    costs = costs_of(pieces, [times(1.0) + times(9.0) + times(2.0), times(0.5) + times(0.5) + times(3.0)])
    for dtype in WIRE_DTYPES:
        sizes = [piece.size_bytes for piece in pieces if piece.encodes and piece.name == dtype]
        assert costs.encode[dtype] == tuple((size, 3.0 * size) for size in sizes)
        assert costs.decode[dtype] == tuple((size, 6.0 * size) for size in sizes)
    assert {name for name in costs.messages} == {"all_reduce", "two_shot", "native"}
    assert Piece("int8", 1000, encodes=True).expected_us(1e9) < 1e6  # the link's rate is no matter of encoding


def request() -> dict[str, Any]:
    names = [gradient.name for gradient in parse_profile(usual_document()).compute.gradients]
    return {
        "profile": usual_document(),
        "options": {"accuracy": "exact", "allow": []},
        "others": [[names], [[name] for name in names]],
        "owners": None,
        "gathers": [],
    }


def answer_to(asked: dict[str, Any]) -> dict[str, Any]:
    """Return what the process that decides answers."""
    decision = Decision(asked)
    try:
        deadline = time.monotonic() + 60.0
        while (answer := decision.poll()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        decision.close()
    return answer


def test_the_process_that_decides_gives_the_plan_that_optimize_gives() -> None:
    answer = answer_to(request())
    profile = parse_profile(usual_document())
    plan = parse_plan(answer["plan"])
    assert plan == optimize(profile)
    assert answer["others_us"] == [result.iteration_us for result in simulate(profile, strategies=["single", "wfbp"])]
    assert names_of(plan.buckets) == [list(bucket.gradients) for bucket in plan.buckets]


COSTS = {
    "narrow wins": ({"all_reduce": 1e-2, "two_shot": 1e-2, "native": 1e-2}, 1e-5),
    "encoding is dear": ({"all_reduce": 1e-2, "two_shot": 1e-2, "native": 1e-2}, 1.0),
    "two shots and sums of the backend are slow": ({"all_reduce": 1e-2, "two_shot": 9e-2, "native": 9e-2}, 1e-5),
    "the link is fast": ({"all_reduce": 1e-8, "two_shot": 1e-8, "native": 1e-8}, 1e-5),
}
"""Made-up costs of a byte in µs: by collective, and of encoding as of decoding it."""


@pytest.mark.parametrize("name", COSTS)
def test_narrow_dtypes_are_decided_on_by_what_was_measured(name: str) -> None:
    """As offline, by the same costs; and what did harm stays whole."""
    us_per_byte, encode = COSTS[name]
    sizes = (1e3, 1e5, 1e7)
    lines = {dtype: tuple((size, 5.0 + encode * size) for size in sizes) for dtype in WIRE_DTYPES}
    messages = {of: tuple((size, 20.0 + us * size) for size in sizes) for of, us in us_per_byte.items()}
    profile = parse_profile(usual_document())
    assert profile.cluster is not None
    profile = replace(profile, cluster=with_costs(profile.cluster, Costs(messages, lines, lines)))
    options = {"accuracy": "bounded", "allow": [], "compress": IN_RUN, "protect": None}
    asked = {**request(), "profile": profile.to_document(), "options": options}
    plan = parse_plan(decide(asked)["plan"])
    assert plan == optimize(profile, accuracy="bounded", compress="wire")
    assert plan.accuracy == ("bounded" if name == "narrow wins" else "exact")
    narrow = [bucket for bucket in plan.buckets if not bucket.dense]
    assert {bucket.compressor.name for bucket in narrow} == ({"wire"} if name == "narrow wins" else set())
    harmed = (narrow or plan.buckets)[0].gradients[0]
    spared = parse_plan(decide({**asked, "options": options | {"protect": harmed}})["plan"])
    assert all(bucket.dense for bucket in spared.buckets if harmed in bucket.gradients)
    assert spared.accuracy == plan.accuracy


@given(st.lists(st.tuples(st.floats(1e3, 1e6), st.floats(1e3, 1e6)), min_size=MOST_ROUNDS, max_size=MOST_ROUNDS))
@example([(97e3, 100e3)] * MOST_ROUNDS)
@example([(99e3, 100e3)] * MOST_ROUNDS)
def test_a_bounded_plan_has_to_win_beyond_the_noise(rounds: list[tuple[float, float]]) -> None:
    count, plain = until_decided(rounds)
    verdict = judge(rounds[:count], NAMES, must_win=GAIN)
    assert verdict is not None
    gains_us = [old - new for new, old in rounds[:count]]
    beyond = abs(sum(gains_us) / count) > half_interval(gains_us)
    assert verdict.good == (plain.step_us < plain.other_us * (1.0 - GAIN) and beyond)


def test_a_plan_from_measurements_on_other_ranks_says_so() -> None:
    measured = parse_profile(usual_document())
    assert measured.cluster is not None
    scaled = replace(measured, cluster=scale(measured.cluster, 6, 1))
    plan = parse_plan(decide({**request(), "profile": scaled.to_document()})["plan"])
    assert (plan.world.ranks, plan.world.nodes) == (6, 6)
    assert plan.predicted is not None
    assert plan.predicted.extrapolated
    assert "costs are extrapolated from another number of ranks" in plan.notes
    assert "compute was measured on 4 ranks, the plan is for 6" in plan.notes
    assert any("scaled from 4 ranks, extrapolated" in source for source in (plan.sources or {}).values())


def test_what_is_wrong_is_an_answer() -> None:
    answer = answer_to({**request(), "profile": {"schema": "planner.profile/1"}})
    assert "$.model" in answer["problem"]
    assert decide(request())["plan"]["schema"] == "planner.plan/1"
