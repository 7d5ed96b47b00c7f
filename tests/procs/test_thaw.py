"""Parameters that are frozen at attach and train later (fine-tuning, layer by layer), on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import thaw_checks
from asked import asked_for
from findings import hold

from planner.jobs.launch import LocalWorld, run_ranks


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    """Results of both ranks of two."""
    return run_ranks(LocalWorld(ranks=2), thaw_checks.run, asked_for(request, "check"))


@pytest.mark.parametrize("check", thaw_checks.CHECKS)
def test_what_trains_later(pair: list[dict[str, dict[str, Any]]], check: str) -> None:
    hold(pair, check)
