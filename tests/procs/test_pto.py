"""Ranks share the norms of layers: the same bits as alone, in every state of a run; and what is refused."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pto_checks
import pytest

from planner.jobs.launch import LocalWorld, run_ranks
from runtime.errors import EnvironmentFailure


@pytest.fixture(scope="module", params=[3])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Of every rank."""
    return run_ranks(LocalWorld(ranks=request.param), pto_checks.everything)


def test_shared_norms_give_the_same_bits(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert len(rank["bits_as_alone"]) == 30
        assert all(rank["bits_as_alone"].values()), rank["bits_as_alone"]
        assert rank["states_know_nothing_of_it"]


def test_the_largest_share_is_small_and_one_message_travels(results: list[dict[str, Any]]) -> None:
    """Of 6000, 1728, 2500, 0, 1 and 7000 elements on three ranks."""
    first = results[0]["shares"]
    assert first["owners"] == (1, 2, 2, 2, 2, 0)
    assert [rank["shares"]["owners"] for rank in results] == [first["owners"]] * 3
    mine = sorted(item for rank in results for item in rank["shares"]["mine"])
    assert mine == list(range(6))
    assert first["bytes"] == 3 * 4 * 2 * 4  # ranks, rows of the most layers, two norms, float32
    assert "norms are shared already; call stop_sharing() first" in first["again"]
    assert first["none"]


def test_parallel_tensor_operations(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert all(rank["operations"].values()), rank["operations"]
        assert all(rank["elements"].values()), rank["elements"]


def test_an_operation_that_raises_on_one_rank_ends_on_all(results: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(results):
        found = rank["one_raises"]
        expected = (
            "InputError: no such norm"
            if number == 2
            else f"CommunicationError: rank {number}: a parallel tensor operation raised on rank 2, "
        )
        assert found["tensors"].startswith(expected)
        assert found["elements"].startswith(expected)
        assert found["after"] == [9.0, 4.0, 5.0]
        assert found["took_s"] < 30.0
        assert "split: found 'layers', expected one of 'tensors', 'elements'" in found["split"]
        assert "each rank has a part of every item" in found["owners of elements"]
        assert "tensors[0]: found tensors of [9, 4] elements" in found["sizes"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("layers", "InputError: ranks 0 and 1 adapt other layers (6 and 5 of other sizes), expected the same"),
        ("tensors", "PlanMismatch: ranks called parallel_tensor_op with different tensors or owners"),
        ("owner", "InputError: owners: found rank 7, expected ranks from 0 to 2"),
        ("owners", "InputError: owners: found 2 for 1 tensors, expected one for each"),
        ("rows", "expected a tensor with one row for each item, (1,), torch.float32 on cpu"),
        ("deadline", "timeout_s: found 0, expected a deadline"),
    ],
)
def test_what_cannot_be_shared_is_refused_on_all_ranks(results: list[dict[str, Any]], case: str, words: str) -> None:
    for rank in results:
        assert words in rank["misfits"][case]


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_plans_turn_sharing_on_and_off(results: list[dict[str, Any]], name: str) -> None:
    for rank in results:
        found = rank["sessions"]
        assert found[name], "weights differ"
        assert found[f"{name} on"]
        assert found[f"{name} report"] == ("norms of 4 layers, shared by ranks", True)
        assert (found[f"{name} switched False"], found[f"{name} switched True"]) == (True, False)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "optimizer",
            "shares norms of layers between ranks, but found SGD, which has none to share; expected",
        ),
        ("none", "but found no optimizer"),
        ("ranks", "updates.norms.shares: found 1 for 3 ranks; expected one for each"),
        ("unknown", "found 'nowhere', which is no trainable parameter of the model"),
        ("twice", "twice; expected each parameter in one share"),
    ],
)
def test_plans_that_do_not_fit(results: list[dict[str, Any]], case: str, words: str) -> None:
    for rank in results:
        assert rank["plan_misfits"][case].startswith("PlanMismatch: ")
        assert words in rank["plan_misfits"][case]


def test_what_the_user_chose_is_left_alone(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert all(rank["users_choice"].values()), rank["users_choice"]


def test_profiles_time_norms_and_reports_say_what_they_took(results: list[dict[str, Any]]) -> None:
    for rank in results:
        found = rank["profiled"]
        assert found["as found"]
        assert (found["optimizer"], found["times"]) == ("LARS", True)
        assert len(found["layers"]) == 4
        assert found["shared"]
        assert re.fullmatch(
            r"  norms of 4 layers, shared by ranks: [0-9.]+, predicted [0-9.]+, by every rank [0-9.]+ ms", found["said"]
        )


def test_the_death_of_a_rank_is_an_error_on_the_others(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailure, match="rank 1 was killed by SIGKILL"):
        run_ranks(LocalWorld(ranks=2), partial(pto_checks.one_dies, str(tmp_path)))
    said = (tmp_path / "rank0").read_text()
    assert "CommunicationError: rank 0: the exchange of what a parallel tensor operation computed" in said
    assert "rank 1 died or did not answer within 3 s" in said
