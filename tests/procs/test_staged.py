"""Messages that a thread carries, as where ranks share a device over gloo: here with the host as the device."""

from __future__ import annotations

from typing import Any

import pytest
import staged_checks

from planner.jobs.launch import LocalWorld, run_ranks


@pytest.fixture(scope="module")
def pair() -> list[dict[str, Any]]:
    return run_ranks(LocalWorld(ranks=2), staged_checks.checks)


def test_sessions_train_as_they_do_without(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert rank["sessions"].pop("threads that are left") == 0
        assert all(rank["sessions"].pop("delayed").values())
        assert all(rank["sessions"].values()), rank["sessions"]


def test_messages_go_in_order_and_can_be_waited_for_one_by_one(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert rank["in order"] == {
            "first": 2.0, "all": [2.0, 4.0, 6.0, 8.0], "in order": True
        }  # fmt: skip


def test_a_rank_that_does_not_come_is_told_of(pair: list[dict[str, Any]]) -> None:
    told = pair[0]["lost"]
    assert told.startswith("rank 0: bucket 0 (a … b) did not complete: another rank died")
