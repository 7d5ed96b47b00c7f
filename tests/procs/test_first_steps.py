"""Plans whose first steps are exact, and buckets that are compressed again after harm."""

from __future__ import annotations

import first_steps_checks
import pytest
from findings import hold

from planner.jobs.launch import LocalWorld, run_ranks

Results = list[dict[str, dict[str, bool]]]


@pytest.fixture(scope="module")
def ranks() -> Results:
    """What every rank of two found."""
    return run_ranks(LocalWorld(ranks=2), first_steps_checks.run)


@pytest.mark.parametrize("check", first_steps_checks.CHECKS)
def test_on_every_rank(ranks: Results, check: str) -> None:
    hold(ranks, check)
