"""Plans that change in the middle of a run: nothing is lost, against DDP that never changed, bit for bit; and runs
whose steps become slower than predicted.
"""

from __future__ import annotations

from typing import Any

import pytest
import switch_checks
from findings import hold

from planner.jobs.launch import LocalWorld, run_ranks


@pytest.fixture(scope="module")
def pair() -> list[dict[str, Any]]:
    """Results of both ranks of two."""
    return run_ranks(LocalWorld(ranks=2), switch_checks.run)


@pytest.mark.parametrize("check", switch_checks.CHECKS)
def test_switching_loses_nothing(pair: list[dict[str, Any]], check: str) -> None:
    hold(pair, check)


@pytest.mark.parametrize("check", switch_checks.DRIFT_CHECKS)
def test_drift_is_noticed_explained_and_adapted_to(pair: list[dict[str, Any]], check: str) -> None:
    hold(pair, check)
