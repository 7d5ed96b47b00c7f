"""Plans with outer steps: against a reference that plays all workers, compressed, resumed, switched and disturbed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import outer_checks
import outer_lives_checks
import post_local_script
import pytest
import torch
from asked import asked_for
from findings import hold, wrong
from torch import nn

from planner.jobs.launch import LocalWorld, run_ranks
from runtime.errors import EnvironmentFailure

Results = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def ranks(request: pytest.FixtureRequest) -> Results:
    """What every rank of two or three found."""
    return run_ranks(LocalWorld(ranks=request.param), outer_checks.run, asked_for(request, "check"))


@pytest.mark.parametrize("check", outer_checks.CHECKS)
def test_on_every_rank(ranks: Results, check: str) -> None:
    hold(ranks, check)


@pytest.mark.parametrize(("ranks", "per_node"), [(2, 1), (4, 2), pytest.param(3, 1, marks=pytest.mark.long)])
def test_random_lives_lose_nothing(ranks: int, per_node: int) -> None:
    for rank, results in enumerate(
        run_ranks(LocalWorld(ranks=ranks), outer_lives_checks.run, list(range(6)), per_node)
    ):
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


def post_local_sgd(workers: int, steps: int) -> list[nn.Module]:
    """Models of all workers, by the algorithm of Lin et al. (arXiv 1808.07217): as it is written, in one process."""
    models, optimizers = zip(*(post_local_script.made() for _ in range(workers)), strict=True)
    for step in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            post_local_script.loss_of(model, rank, step - 1).backward()
        local = step - post_local_script.WARMUP
        if local <= 0:
            average([[p.grad for p in model.parameters()] for model in models])
        for optimizer in optimizers:
            optimizer.step()
        if local > 0 and local % post_local_script.EVERY == 0:
            average([[p.data for p in model.parameters()] for model in models])
    return list(models)


def average(tensors: Sequence[Sequence[Any]]) -> None:
    """Give those of all workers their mean."""
    for same in zip(*tensors, strict=True):
        mean = torch.stack(same).mean(dim=0)
        for one in same:
            one.copy_(mean)


def test_post_local_sgd_is_a_plan_of_a_script_that_resumes(tmp_path: Path) -> None:
    """It ends in the warm-up, between rounds, and just before one."""
    for steps in (2, 9, 12, 15):
        run_ranks(LocalWorld(ranks=2), post_local_script.train, tmp_path, steps)
        for rank, expected in enumerate(post_local_sgd(2, steps)):
            found = torch.load(tmp_path / f"{rank}.pt")["model"]
            for name, value in expected.state_dict().items():
                torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
