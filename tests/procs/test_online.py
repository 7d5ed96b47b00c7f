"""`planner.attach(model, optimizer)` on two ranks: DDP's weights bit for bit, whatever planning does beside."""

from __future__ import annotations

import online_checks
import pytest
from asked import asked_for

from planner.jobs.launch import LocalWorld, run_ranks


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> list[dict[str, dict[str, bool]]]:
    """Results of both ranks of two."""
    return run_ranks(LocalWorld(ranks=2), online_checks.run, asked_for(request, "check"))


@pytest.mark.parametrize("check", online_checks.CHECKS)
def test_a_run_without_a_plan(pair: list[dict[str, dict[str, bool]]], check: str) -> None:
    for rank, results in enumerate(pair):
        assert results[check]
        assert not [what for what, good in results[check].items() if good is not True], rank
