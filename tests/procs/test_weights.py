"""Ranks with weights: unlike numbers of samples lead to the weights of one process that has all of them."""

from __future__ import annotations

from typing import Any

import pytest
import weight_checks
import weight_lives_checks

from planner.jobs.launch import LocalWorld, run_ranks
from runtime.plan.transports import TRANSPORTS


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def several(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Results of every rank of two and of three."""
    return run_ranks(LocalWorld(ranks=request.param), weight_checks.all_checks)


@pytest.mark.filterwarnings("ignore::runtime.AdaptedWarning")
@pytest.mark.parametrize("ranks", [2, 4, pytest.param(3, marks=pytest.mark.long)])
def test_gradients_are_those_of_one_process(ranks: int) -> None:
    for found in run_ranks(LocalWorld(ranks=ranks), weight_checks.like_one_process):
        assert sum(not name.startswith("sparse") for name in found) >= sum(one.exact for one in TRANSPORTS.values()) + 5
        assert all(difference < 1e-12 for difference in found.values()), found


def test_equal_weights_change_no_bit(several: list[dict[str, Any]]) -> None:
    for rank in several:
        assert len(rank["equal_weights"]) == 2 * len(weight_checks.EQUAL)
        assert all(rank["equal_weights"].values()), rank["equal_weights"]


def test_equal_weights_take_no_message_and_weigh_no_gradient(several: list[dict[str, Any]]) -> None:
    for place, rank in enumerate(several):
        weighed = (6, 6, 12, 18) if place == 1 else (6, 6, 6, 6)
        assert rank["taken"] == list(zip((0, 0, 1, 2), weighed, strict=True))


def test_a_weighted_mean_in_float32_is_within_two_ulp(several: list[dict[str, Any]]) -> None:
    assert all(rank["bits_of_float32"] <= 2 for rank in several)


def test_narrow_buckets_are_weighed(several: list[dict[str, Any]]) -> None:
    assert all(rank["narrow_mean"] < 0.01 for rank in several)


def test_a_rank_of_weight_zero_contributes_nothing(several: list[dict[str, Any]]) -> None:
    for rank in several:
        assert all(rank["zero_weight"].values()), rank["zero_weight"]


def test_an_average_that_is_not_zeroed_is_added(several: list[dict[str, Any]]) -> None:
    assert all(rank["kept_average"] < 1e-12 for rank in several)


def test_a_run_continues_from_its_state_bit_for_bit(several: list[dict[str, Any]]) -> None:
    assert all(rank["continued"] for rank in several)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("weight of -1", "session.weight: found -1, expected the number of samples or tokens"),
        ("weight of nan", "session.weight: found nan, expected the number of samples or tokens"),
        ("weight of inf", "session.weight: found inf, expected the number of samples or tokens"),
        ("weight of many", "session.weight: found 'many', expected the number of samples or tokens"),
        ("zero everywhere", "found weights of 0 on all"),
        ("on one rank", "found weights on some ranks alone: none on rank 1"),
        ("elsewhere", "found ranks at unlike places: rank 0 at session.batches, rank 1 at a backward"),
        ("asked for nan", "found nan, expected the number of samples or tokens"),
        ("begun later", "found a first step without weights before it"),
        ("delay", "session.weight: the plan has a delay"),
        ("asked with delay", "the plan has a delay"),
        ("asked with outer steps", "the plan has outer steps"),
    ],
)
def test_what_no_weights_can_be_is_refused_on_all_ranks_alike(
    several: list[dict[str, Any]], case: str, said: str
) -> None:
    found = {rank["refusals"][case] for rank in several}
    assert len(found) == 1
    assert said in found.pop()


def test_training_continues_after_a_refusal(several: list[dict[str, Any]]) -> None:
    for rank in several:
        assert [rank["refusals"][case] for case in ("first step", "after an error", "then on all")] == ["nothing"] * 3


def test_a_missing_weight_ends_the_step_on_all_ranks_at_once(several: list[dict[str, Any]]) -> None:
    given, *missing = [rank["refusals"]["missing later"] for rank in several]
    assert given.startswith("CommunicationError: the step did not complete: an exception ended the backward of")
    assert all("found no weight for this backward" in one for one in missing)


@pytest.mark.parametrize("check", ["batches", "unweighted batches"])
def test_uneven_batches_end_alike_and_lose_no_sample(several: list[dict[str, Any]], check: str) -> None:
    assert len({len(rank[check][2]) for rank in several}) == 1
    for number, rank in enumerate(several):
        difference, counted, seen, empty = rank[check]
        own = seen[: 1 + 2 * number]
        assert difference < 1e-12
        assert seen[len(own) :] == own[-1:] * (len(seen) - len(own))
        assert counted == (sum(own) if check == "batches" else 0)
        assert empty.startswith("InputError: session.batches: found no batch at all on rank 0 of")


@pytest.mark.parametrize("several", [2], indirect=True)
@pytest.mark.parametrize("cause", ["compute", "input", "batches"])
def test_the_late_rank_is_named_with_what_makes_it_late(several: list[dict[str, Any]], cause: str) -> None:
    why = "input" if cause == "batches" else cause
    for number, rank in enumerate(several):
        causes, said, last, shown, _ = rank["late_rank"][cause]
        assert (causes[1], last, shown) == (why, 1, True)
        assert [one.startswith("rank 1 arrived last in at least nine of the last 10 steps") for one in said] == [
            True
        ] * (number == 0)
        assert all(f"what is longer there is {why}" in one for one in said)


@pytest.mark.parametrize("several", [2], indirect=True)
def test_waiting_for_buffers_is_no_compute(several: list[dict[str, Any]]) -> None:
    assert several[0]["late_rank"]["buffers"][-1][1] < 8e3


@pytest.mark.long
def test_a_script_that_stops_early_ends_with_an_error_before_the_deadline() -> None:
    first, *others = run_ranks(LocalWorld(ranks=2), weight_checks.stops_early)
    assert first == "nothing at once"
    assert all(one.startswith("CommunicationError: ") and one.endswith("at once") for one in others), others


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_hard_scripts_end_with_the_weights_of_one_process(ranks: int) -> None:
    for found in run_ranks(LocalWorld(ranks=ranks), weight_lives_checks.all_lives):
        assert not {name: apart for name, apart in found.items() if not apart < 1e-12}
