"""Plans that send a part of the gradients: what travels, what stays behind, and that nothing is lost."""

from __future__ import annotations

import lossy_policy_checks
import pytest
from findings import hold

from planner.jobs.launch import LocalWorld, run_ranks

Results = list[dict[str, dict[str, bool]]]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def ranks(request: pytest.FixtureRequest) -> Results:
    """What every rank of two and of three found."""
    return run_ranks(LocalWorld(ranks=request.param), lossy_policy_checks.run)


@pytest.mark.parametrize("check", lossy_policy_checks.CHECKS)
def test_on_every_rank(ranks: Results, check: str) -> None:
    hold(ranks, check)
