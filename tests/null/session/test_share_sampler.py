"""The sampler of shares: no sample is lost or drawn twice, in whole batches, at the end, and after a restart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.utils.data import DataLoader

from runtime.comm.world import World
from runtime.errors import InputError
from runtime.monitor.arrivals import Arrivals
from runtime.monitor.clock import WallClock
from runtime.plan.last_ranks import STRAGGLER_STEPS
from runtime.session.followed_shares import Shares
from runtime.session.share_sampler import ShareSampler

SHARES = [5, 2, 3]


def drawn(samples: int, **options: object) -> list[list[int]]:
    """What each rank draws."""
    return [list(ShareSampler(range(samples), SHARES, rank, **options)) for rank in range(3)]  # type: ignore[arg-type]


@pytest.mark.parametrize("samples", [30, 37, 3, 4])
def test_all_samples_are_drawn_once(samples: int) -> None:
    found = drawn(samples)
    assert sorted(index for one in found for index in one) == list(range(samples))
    assert all(found)  # each rank has one
    assert [len(ShareSampler(range(samples), SHARES, rank)) for rank in range(3)] == [len(one) for one in found]


def test_each_batch_is_a_run_of_the_order_of_the_epoch() -> None:
    whole = list(ShareSampler(range(37), [37], 0, seed=4))
    loaders = [DataLoader(range(37), share, sampler=ShareSampler(range(37), SHARES, rank, seed=4))  # type: ignore[arg-type]
               for rank, share in enumerate(SHARES)]  # fmt: skip
    batches = list(zip(*loaders, strict=True))
    assert [[len(part) for part in batch] for batch in batches] == [SHARES] * 3 + [[3, 1, 3]]
    assert [int(index) for batch in batches for part in batch for index in part] == whole


def test_passes_differ_and_repeat_and_may_be_in_order() -> None:
    sampler = ShareSampler(range(20), SHARES, 0)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(ShareSampler(range(20), SHARES, 1, shuffle=False)) == [5, 6, 15, 16]
    assert [len(one) for one in drawn(29, drop_last=True)] == [10, 4, 6]


def test_a_pass_continues_with_other_shares() -> None:
    before = [ShareSampler(range(40), SHARES, rank) for rank in range(3)]
    states = [sampler.state_dict(batches=2) for sampler in before]
    assert states == [{"epoch": 0, "consumed": 20}] * 3
    had = [index for sampler in before for index in [*sampler][: 2 * sampler.shares[sampler.rank]]]
    after = [ShareSampler(range(40), [1, 9], rank) for rank in range(2)]
    for sampler in after:
        sampler.load_state_dict(states[0])
        sampler.set_epoch(0)
    assert sorted([*had, *(index for sampler in after for index in sampler)]) == list(range(40))
    assert sorted(index for sampler in after for index in sampler) == list(range(40))  # once more: all of the pass
    after[0].load_state_dict(states[0])
    assert after[0].state_dict(batches=1) == {"epoch": 0, "consumed": 30}


@pytest.mark.parametrize(("samples", "shares", "rank"), [(9, [], 0), (9, [1, 0], 0), (9, [1, 2], 2), (1, [1, 2], 0)])
def test_what_cannot_be_shared_is_refused(samples: int, shares: list[int], rank: int) -> None:
    with pytest.raises(InputError, match=r"^ShareSampler: found .*expected"):
        ShareSampler(range(samples), shares, rank)


def test_shares_change_by_times_of_steps_with_them_alone() -> None:
    plan = cast(Any, SimpleNamespace(shares={"0": 6, "1": 6}, largest_shares={"0": 8, "1": 9}))
    weights = cast(Any, SimpleNamespace(gather=lambda _place, mine: [mine]))
    found, asked = Shares(plan, weights, 0), Arrivals(World(rank=0, ranks=2, group=None), WallClock())
    found.begin(12, 2)
    asked._left, asked.compute_us = 1, (1.0, 2.0)
    assert found.next_pass(asked, lambda shares, times_us, most: [most[0], 12 - most[0]]) == (8, 4)
    assert asked._left > STRAGGLER_STEPS  # until as many steps as are looked at have had these shares
    for refused in ((6, 7), (9, 3), (2, 10)):
        with pytest.raises(InputError, match=r"^state of the sampler: found"):
            found.load(refused)
    found.load((5, 7))
    assert found.mine == 5
    with pytest.raises(InputError, match=r"^session.sampler: found a share of 7 samples, expected at most 6"):
        found.begin(12, 2, most=6)
