"""Plans that change in the middle of a run: nothing is lost, against DDP that never changed, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import switch_checks

from planner.launch import LocalWorld, run_ranks


@pytest.fixture(scope="module")
def pair() -> list[dict[str, Any]]:
    """Results of both ranks of two."""
    return run_ranks(LocalWorld(ranks=2), switch_checks.run)


@pytest.mark.parametrize("check", switch_checks.CHECKS)
def test_switching_loses_nothing(pair: list[dict[str, Any]], check: str) -> None:
    for rank, results in enumerate(pair):
        assert results[check]
        assert not [what for what, good in results[check].items() if good is not True], rank
