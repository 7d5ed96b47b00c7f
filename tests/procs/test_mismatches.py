"""Ranks that do not agree: all of them are told the same, before anything is changed, and none waits for another."""

from __future__ import annotations

from typing import Any

import mismatch_checks
import pytest

from planner.jobs.launch import LocalWorld, run_ranks
from runtime.comm.world import LONGEST_TIMEOUT_S, bounded_timeout_s
from runtime.session.attaching import STEPS_PER_DEADLINE


@pytest.fixture(scope="module")
def pair() -> list[dict[str, Any]]:
    """Results of both ranks of two."""
    return run_ranks(LocalWorld(ranks=2), mismatch_checks.all_mismatches)


DISAGREEMENTS = {
    "versions": ["different versions of this package", "rank 1: 9.9.9", "install the same one everywhere"],
    "versions of torch": ["different versions of torch", "rank 1: 9.9.9", "install the same one everywhere"],
    "plans": ["different plans", "rank 0: sha256:", "rank 1: sha256:", "give every rank the same plan.json"],
    "notes of plans": ["different plans"],
    "compiled": ["different arguments of compile=: rank 0: None, rank 1: backend='eager'; pass the same on every rank"],
    "compiled so": ["rank 0: backend='eager', dynamic=False, rank 1: backend='eager', dynamic=True"],
    "shapes": ["different models", "build the same model on every rank"],
    "sizes": [
        "the plan (for other) is for another model: the names of the parameters agree, their shapes",
        "first in bucket 0: 40 bytes planned, 8 bytes found, 1.bias (2,); ",
        "bucket 1: 40 bytes planned, 32 bytes found, 1.weight (2, 4)",
        "profile this model again",
    ],
    "dtypes": ["different models", "build the same model on every rank"],
    "models": ["rank 1: the plan (for test) is for another model", "profile this model again"],
    "frozen": ["rank 1: the model has no trainable parameter"],
    "no path": ["rank 1: found a NoneType, expected the path of a file"],
    "file cut": ["PlanMismatch: rank 1: ", "/bad.json: not valid JSON at line", "found the end of the file too early"],
    "file version": ['/bad.json: $.schema: found schema "planner.plan/2", expected "planner.plan/1"'],
    "file other": ["rank 1: the plan (for test) is for another model", "weights.3"],
    "file missing": ["/bad.json: no such file; check the path"],
    "attached": ["rank 1: the model is attached already; call session.detach() first"],
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_ranks_that_disagree_are_told_alike(pair: list[dict[str, Any]], case: str) -> None:
    first, second = (rank["disagreements"][case] for rank in pair)
    assert first == second
    assert first.startswith("PlanMismatch: ")
    for words in DISAGREEMENTS[case]:
        assert words in first


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("shapes", "InputError: ranks hold different models, by the names, shapes and dtypes"),
        ("layers", "InputError: ranks hold different models, by the names, shapes and dtypes"),
        ("wrapped", "InputError: rank 1: the model is wrapped in DistributedDataParallel, expected a plain one"),
        ("frozen", "InputError: rank 1: the model has no trainable parameter"),
    ],
)
def test_a_profile_is_of_one_model(pair: list[dict[str, Any]], case: str, words: str) -> None:
    first, second = (rank["profiles"][case] for rank in pair)
    assert first == second
    assert first.startswith(words)


def test_each_rank_may_have_its_own_deadline(pair: list[dict[str, Any]]) -> None:
    assert [rank["deadlines"] for rank in pair] == [("", 0.5), ("", 0.5)]


def test_ranks_in_groups_of_different_sizes_do_not_hang(pair: list[dict[str, Any]]) -> None:
    """The one that is alone sees it at once; the other one waits for its deadline, 3 s, and not longer."""
    (first, first_s), (second, second_s) = (rank["groups"] for rank in pair)
    assert first.startswith("CommunicationError: rank 0: making a process group, which all ranks do at the same place")
    assert second.startswith("PlanMismatch: the plan was made for 2 ranks, found 1; ")
    assert first_s < 20
    assert second_s < 20


@pytest.mark.parametrize("predicted_us", [1e17, 1e30])
def test_the_deadline_of_an_absurd_prediction_is_one_that_torch_can_hold(predicted_us: float) -> None:
    assert bounded_timeout_s(STEPS_PER_DEADLINE * predicted_us / 1e6) == LONGEST_TIMEOUT_S
