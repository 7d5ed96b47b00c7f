"""Sessions that a script lets go of without `detach`: everything of them is given back."""

from __future__ import annotations

from typing import Any

import dropped_checks
import pytest
from findings import hold

from planner.jobs.launch import LocalWorld, run_ranks

Results = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks() -> Results:
    """What each of two ranks found."""
    return run_ranks(LocalWorld(ranks=2), dropped_checks.run)


@pytest.mark.skipif(not dropped_checks.COUNTED, reason="counts what Linux says of a process")
@pytest.mark.parametrize("check", [*dropped_checks.ATTACHES, "session alone"])
def test_on_every_rank(ranks: Results, check: str) -> None:
    hold(ranks, check)
