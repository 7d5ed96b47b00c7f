"""What scripts do around an attached model, each against DDP in the same processes; docs/compatibility.md lists it.

Two ranks: bit for bit. Three: up to the order of sums, see `interplay_harness`.
"""

from __future__ import annotations

from typing import Any

import interplay_checks
import pytest

from planner.jobs.launch import LocalWorld, run_ranks


@pytest.fixture(scope="module")
def pair() -> list[dict[str, Any]]:
    """Results of both ranks of two."""
    return run_ranks(LocalWorld(ranks=2), interplay_checks.run, interplay_checks.WITH_TWO)


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    """Results of every rank of three."""
    return run_ranks(LocalWorld(ranks=3), interplay_checks.run, interplay_checks.WITH_THREE)


def check(ranks: list[dict[str, Any]], name: str) -> None:
    """Everything the check found, on every rank, has to hold."""
    for rank, results in enumerate(ranks):
        found = {what: good for what, good in results[name].items() if what != "seconds"}
        assert found
        assert all(good is True for good in found.values()), (rank, found)


@pytest.mark.parametrize("name", interplay_checks.WITH_TWO)
def test_two_ranks_as_with_ddp(pair: list[dict[str, Any]], name: str) -> None:
    check(pair, name)


@pytest.mark.parametrize("name", interplay_checks.WITH_THREE)
def test_three_ranks_as_with_ddp(three: list[dict[str, Any]], name: str) -> None:
    check(three, name)
