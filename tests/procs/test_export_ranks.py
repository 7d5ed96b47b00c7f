"""Exported arguments give the plan's buckets in torch's own DDP, after it has rebuilt them."""

from __future__ import annotations

import export_checks
import pytest

from planner.jobs.launch import LocalWorld, run_ranks


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[tuple[list[list[str]], list[list[str]]]]]]:
    return run_ranks(LocalWorld(ranks=2), export_checks.run)


@pytest.mark.parametrize("model", export_checks.MODELS)
def test_ddp_makes_the_plans_buckets(
    ranks: list[dict[str, list[tuple[list[list[str]], list[list[str]]]]]], model: str
) -> None:
    for found in ranks:
        assert all(len(planned) > 1 for planned, _ in found[model])
        for planned, sent in found[model]:
            assert sent == planned
