"""Weights that come beside the next forward: never old ones, whoever looks; otherwise as with gathers in the step."""

from __future__ import annotations

from typing import Any

import late_checks
import pytest
from findings import hold

from planner.jobs.launch import LocalWorld, run_ranks

Results = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def ranks(request: pytest.FixtureRequest) -> Results:
    """What every rank of two and three found."""
    return run_ranks(LocalWorld(ranks=request.param), late_checks.run)


@pytest.mark.parametrize("check", late_checks.CHECKS)
def test_on_every_rank(ranks: Results, check: str) -> None:
    hold(ranks, check)


def test_weights_that_do_not_come_are_refused_and_never_old(ranks: Results) -> None:
    if len(ranks) == 2:
        found = ranks[0]["failing"]
        said = found.pop("said")
        assert "CommunicationError: rank 0: gathering the weights that ranks have updated (bucket" in said
        assert "each has to call optimizer.step() did not complete: another rank died, stalled" in said
        assert all(found.values()), found


def test_a_script_that_ends_leaves_others_its_weights() -> None:
    assert run_ranks(LocalWorld(ranks=2), late_checks.ends_early) == [True, True]
