"""Plans with outer steps: against a reference that plays all workers, compressed, resumed, switched and disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import outer_checks
import outer_lives_checks
import pytest
from asked import asked_for
from findings import wrong

from planner.jobs.launch import LocalWorld, run_ranks
from runtime.errors import EnvironmentFailure

Results = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def ranks(request: pytest.FixtureRequest) -> Results:
    """What every rank of two or three found."""
    return run_ranks(LocalWorld(ranks=request.param), outer_checks.run, asked_for(request, "check"))


@pytest.mark.parametrize("check", outer_checks.CHECKS)
def test_on_every_rank(ranks: Results, check: str) -> None:
    for rank, results in enumerate(ranks):
        assert results[check]
        assert wrong(results[check]) == {}, rank


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.long)])
def test_random_lives_lose_nothing(workers: int) -> None:
    for rank, results in enumerate(run_ranks(LocalWorld(ranks=workers), outer_lives_checks.run, list(range(6)))):
        assert wrong(results) == {}, rank


def test_a_round_that_waits_in_vain_says_what_to_do() -> None:
    for rank, results in enumerate(run_ranks(LocalWorld(ranks=2), outer_checks.waits_in_vain)):
        assert wrong(results) == {}, rank


def test_memory_of_four_workers_and_two_nodes() -> None:
    for rank, results in enumerate(run_ranks(LocalWorld(ranks=4), outer_checks.four_ranks)):
        assert wrong(results) == {}, rank


def test_a_lost_worker_ends_the_run_which_fewer_resume(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailure, match="rank 1 was killed by SIGKILL") as caught:
        run_ranks(LocalWorld(ranks=3), outer_checks.loses_a_worker, tmp_path)
    assert caught.value.exit_code == 3
    for rank, results in enumerate(run_ranks(LocalWorld(ranks=2), outer_checks.continues_without_it, tmp_path, 3)):
        assert wrong(results) == {}, rank
