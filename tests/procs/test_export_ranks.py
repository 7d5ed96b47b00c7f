"""Exported arguments give the plan's buckets in torch's own DDP, after it has rebuilt them."""

from __future__ import annotations

import export_checks
import pytest
import torch

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


def test_the_module_sends_narrow_buckets_in_bfloat16_and_others_whole() -> None:
    """The last layer's gradients are DDP's, bit for bit; the others are numbers of bfloat16 near them."""
    for module, ddp in run_ranks(LocalWorld(ranks=2), export_checks.hooked):
        last = 10 * 300 + 10
        assert torch.equal(module[-last:], ddp[-last:])
        narrow, wide = module[:-last], ddp[:-last]
        assert torch.equal(narrow, narrow.bfloat16().float())
        assert not torch.equal(narrow, wide)
        assert torch.allclose(narrow, wide, rtol=2.0**-7, atol=float(wide.abs().max()) * 2.0**-8)
