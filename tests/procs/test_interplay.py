"""What scripts do around an attached model, each against DDP in the same processes.

docs/compatibility.md and docs/refused.md have a sentence on each.

Two ranks: bit for bit. Three: up to the order of sums, see `interplay_harness`.
"""

from __future__ import annotations

from typing import Any

import interplay_checks
import pytest
from asked import asked_for

from planner.jobs.launch import LocalWorld, run_ranks


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Results of both ranks of two."""
    return run_ranks(LocalWorld(ranks=2), interplay_checks.run, asked_for(request, "with_two"))


@pytest.fixture(scope="module")
def three(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Results of every rank of three."""
    return run_ranks(LocalWorld(ranks=3), interplay_checks.run, asked_for(request, "with_three"))


def check(ranks: list[dict[str, Any]], name: str) -> None:
    """Everything the check found, on every rank, has to hold."""
    for rank, results in enumerate(ranks):
        found = {what: good for what, good in results[name].items() if what != "seconds"}
        assert found
        assert all(good is True for good in found.values()), (rank, found)


def rows(names: list[str], long: set[str]) -> list[Any]:
    """The names, of which some are marked as long."""
    return [pytest.param(name, marks=pytest.mark.long if name in long else ()) for name in names]


@pytest.mark.parametrize("with_two", rows(interplay_checks.WITH_TWO, interplay_checks.LONG))
def test_two_ranks_as_with_ddp(pair: list[dict[str, Any]], with_two: str) -> None:
    check(pair, with_two)


@pytest.mark.parametrize("with_three", rows(interplay_checks.WITH_THREE, interplay_checks.LONG_WITH_THREE))
def test_three_ranks_as_with_ddp(three: list[dict[str, Any]], with_three: str) -> None:
    check(three, with_three)
