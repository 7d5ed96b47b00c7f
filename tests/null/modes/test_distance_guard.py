"""The guard of plans with delay or outer steps: what it measures distances by, and when workers are too far."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from runtime.comm.topology import Topology
from runtime.errors import AccuracyWarning
from runtime.modes.distance_guard import MOVEMENT_BOUND, PULLS, SHARE_BOUND, WINDOWS, DistanceGuard


def warmed(steps: int, k: int, moves: dict[int, float]) -> DistanceGuard:
    """After a warm-up in which one weight moves by 1 in each step, and by something else in some."""
    weight, watched = nn.Parameter(torch.zeros(1)), DistanceGuard()
    for step in range(steps):
        with torch.no_grad():
            weight += moves.get(step, 1.0)
        watched.see_warmup({"w": weight}, 0.5, left=steps - step - 1, steps=k)
    return watched


def told(distance: float, share: float) -> torch.Tensor:
    """Two workers that say the same."""
    return torch.tensor([[1.0, distance, share]] * 2, dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_warm_up_is_measured_over_several_windows(k: int) -> None:
    """Per unit of learning rate: steps of 1 at a rate of 0.5 are 2; one step that stands still hardly matters."""
    assert warmed(12 * k, k, {}).state()["base"] == pytest.approx(2.0)
    still = warmed(12 * k, k, {12 * k - 1: 0.0}).state()
    assert still["base"] == pytest.approx(2.0 * (1.0 - 1.0 / (WINDOWS * k)))
    assert still["snapshot"] is None
    assert warmed(k, k, {}).state()["base"] is None  # nothing to compare with: the first pull will do


def test_a_state_in_the_warm_up_goes_on() -> None:
    weight, watched = nn.Parameter(torch.zeros(1)), DistanceGuard()
    for step in range(12):
        if step == 7:
            again = DistanceGuard()
            again.load(watched.state())
            watched = again
        with torch.no_grad():
            weight += 1.0
        watched.see_warmup({"w": weight}, 0.5, left=11 - step, steps=1)
    assert watched.state()["base"] == pytest.approx(2.0)


def test_workers_are_too_far_by_both_measures_for_some_pulls() -> None:
    for far, share in ((2.1 * MOVEMENT_BOUND, SHARE_BOUND / 2), (MOVEMENT_BOUND, 10 * SHARE_BOUND)):
        watched = warmed(40, 4, {})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [watched.judge(told(far, share), step, 4) for step in range(10)] == [4] * 10
    watched = warmed(40, 4, {})
    far = told(2.1 * MOVEMENT_BOUND, 2 * SHARE_BOUND)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [watched.judge(far, step, 4) for step in range(PULLS - 1)] == [4] * (PULLS - 1)
        assert watched.judge(told(1.0, 2 * SHARE_BOUND), PULLS, 4) == 4  # and from the beginning again
        assert [watched.judge(far, step, 4) for step in range(PULLS - 1)] == [4] * (PULLS - 1)
    with pytest.warns(AccuracyWarning, match=f"expected at most {MOVEMENT_BOUND:g} or 5% of the weights"):
        assert watched.judge(far, 99, 4) == 2


def test_owners_are_counted_by_place() -> None:
    assert Topology(((0, 1), (2, 3), (4, 5))).owners == (0, 3, 1, 4, 2, 5)
    assert Topology(((0, 3), (1, 2))).owners == (0, 1, 2, 3)
    assert Topology.of_one_rank_each(3).owners == (0, 1, 2)
