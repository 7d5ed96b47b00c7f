"""Shares of a batch: the least longest time, against every division of small batches, and its bound."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np

from planner.search.shares import follow_shares, share_batch


def divisions(total: int, most: list[int]) -> Iterator[tuple[int, ...]]:
    """Every way to give each rank at least one sample."""
    for shares in itertools.product(*(range(1, one + 1) for one in most)):
        if sum(shares) == total:
            yield shares


def test_no_division_is_shorter() -> None:
    chance = random.Random(0)
    for _ in range(150):
        ranks = chance.randint(1, 4)
        most = [chance.randint(1, 7) for _ in range(ranks)]
        total = chance.randint(ranks, sum(most))
        fixed = np.array([chance.choice((0.0, 3.0, 10.0)) for _ in range(ranks)])
        sample = np.array([chance.choice((1.0, 1.5, 2.0, 7.3)) for _ in range(ranks)])
        found = share_batch(total, fixed, sample, np.array(most))
        assert sum(found.shares) == total
        assert all(1 <= share <= limit for share, limit in zip(found.shares, most, strict=True))
        best = min(float((fixed + np.array(one) * sample).max()) for one in divisions(total, most))
        assert found.slowest_us == best
        assert found.bound_us <= best
        assert found.bound_us >= best - float(sample.max())


def test_equal_ranks_get_equal_shares_and_halves_get_half() -> None:
    none, most = np.zeros(4), np.full(4, 100)
    assert share_batch(64, none, np.ones(4), most).shares == (16,) * 4
    assert share_batch(96, none, np.array([1.0, 1.0, 2.0, 2.0]), most).shares == (32, 32, 16, 16)


def test_a_thousand_ranks_of_eight_speeds() -> None:
    slow = 1.0 + np.arange(1024) % 8 / 4.0
    found = share_batch(64 * 1024, 500.0 * slow, 100.0 * slow, np.full(1024, 2**16))
    assert sum(found.shares) == 64 * 1024
    assert found.slowest_us <= found.bound_us + 100.0 * slow.max()


def test_shares_that_follow_come_to_where_ranks_take_equally_long() -> None:
    fixed, sample = np.array([50.0, 10.0, 0.0]), np.array([1.0, 2.0, 4.0])
    shares = np.array([40, 40, 40])
    best = share_batch(120, fixed, sample, np.full(3, 120)).slowest_us
    seen = []
    for _ in range(6):
        seen.append(float((fixed + shares * sample).max()))
        shares = follow_shares(shares, fixed + shares * sample, 120, 0.02)
    assert shares.sum() == 120
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] <= 1.05 * best
    assert follow_shares(shares, fixed + shares * sample, 120, 0.02).tolist() == shares.tolist()


def test_shares_follow_no_noise_and_no_further_than_memory() -> None:
    shares = np.array([10, 10])
    assert follow_shares(shares, np.array([100.0, 104.0]), 20, 0.05).tolist() == [10, 10]
    assert follow_shares(shares, np.array([100.0, 0.0]), 20, 0.05).tolist() == [10, 10]
    assert follow_shares(shares, np.array([100.0, 300.0]), 20, 0.05).tolist() == [15, 5]
    assert follow_shares(shares, np.array([100.0, 300.0]), 12, 0.05).tolist() == [12, 8]
