"""`planner.attach(model, optimizer)` on two ranks: DDP's weights bit for bit, whatever planning does beside."""

from __future__ import annotations

from pathlib import Path

import online_checks
import pytest
from asked import asked_for
from findings import hold, wrong

from planner.jobs.launch import LocalWorld, run_ranks


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> list[dict[str, dict[str, bool]]]:
    """Results of both ranks of two."""
    return run_ranks(LocalWorld(ranks=2), online_checks.run, asked_for(request, "check"))


@pytest.mark.parametrize("check", online_checks.CHECKS)
def test_a_run_without_a_plan(pair: list[dict[str, dict[str, bool]]], check: str) -> None:
    hold(pair, check)


@pytest.mark.parametrize("good", [True, False])
def test_two_ranks_begin_with_what_three_measured(tmp_path: Path, good: bool) -> None:
    folder = str(tmp_path / "cache")
    for ranks, measured_on, kept in ((3, None, True), (2, 3, good)):
        found = run_ranks(LocalWorld(ranks=ranks), online_checks.other_ranks, folder, measured_on, kept)
        for rank, results in enumerate(found):
            assert wrong(results) == {}, (ranks, rank)
    assert len(list((tmp_path / "cache").glob("*.json"))) == 2
