"""Batches of shares: the samples of a job's batches in their order, each once; what has no samples is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planner.jobs.batch_share import BatchShare
from runtime.errors import InputError

ROWS = 6


def numbered(step: int, rank: int, ranks: int = 3, rows: int = ROWS) -> dict[str, Any]:
    """Samples by their number in the order of steps and ranks, with what is no sample."""
    first = (step * ranks + rank) * rows
    x = torch.arange(first, first + rows, dtype=torch.float64)
    return {"x": x[:, None] * torch.ones(4), "pair": (x.long(), "text"), "mask": torch.ones(4, 4), "scale": 0.5}


def share(shares: list[int], rank: int, batch_of: Callable[[int, int], Any], **options: Any) -> BatchShare:
    named = {str(one): count for one, count in enumerate(shares)}
    return BatchShare(named, rank, batch_of, "job.py:job: batch(step, rank)", **options)


@given(shares=st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_steps_take_the_samples_of_all_batches_in_order(shares: list[int]) -> None:
    def batch_of(step: int, rank: int) -> Any:
        return numbered(step, rank, len(shares))

    everyone = [share(shares, rank, batch_of) for rank in range(len(shares))]
    drawn = [one.batch(step) for step in range(4) for one in everyone]
    assert torch.cat([one["pair"][0] for one in drawn]).tolist() == list(range(4 * sum(shares)))
    assert [len(one["x"]) for one in drawn] == shares * 4
    assert all(torch.equal(one["x"][:, 3].long(), one["pair"][0]) for one in drawn)
    assert all(one["mask"].shape == (4, 4) and one["pair"][1] == "text" and one["scale"] == 0.5 for one in drawn)
    assert sum(one.factor for one in everyone) == pytest.approx(len(shares))


def test_equal_shares_of_as_many_samples_are_the_jobs_batches() -> None:
    for rank in range(3):
        mine = share([ROWS] * 3, rank, numbered)
        assert torch.equal(mine.batch(2)["x"], numbered(2, rank)["x"])


@pytest.mark.parametrize(
    ("batch_of", "found", "samples"),
    [
        (lambda step, rank: torch.tensor(1.0), "found no tensor with rows", None),
        (lambda step, rank: torch.ones(4, 8), "found 8 samples in tensors of 4 rows", 8),
        (lambda step, rank: torch.ones(4 + rank, 8), r"found a tensor of shape \(4, 8\) that differs", None),
        (lambda step, rank: torch.ones(4, 8 + rank), r"found samples of unlike shapes, as \(8,\)", None),
        (lambda step, rank: (torch.ones(4), f"names {rank}"), "found a str that differs between batches", None),
        (lambda step, rank: [torch.ones(4)] * (1 + rank), "found batches with unlike numbers of tensors", None),
        (lambda step, rank: torch.ones(4 if step < 2 else 3), "found a batch of 3 samples after one of 4", None),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused(batch_of: Callable[[int, int], Any], found: str, samples: int | None) -> None:
    mine = share([5, 3], 0, batch_of, samples=samples)
    with pytest.raises(InputError, match=rf"job.py:job: batch\(step, rank\): {found}.*samples as rows: give them so"):
        _ = [mine.batch(step) for step in range(3)]
