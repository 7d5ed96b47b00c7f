"""Times of ranks by their samples, from steps of two sizes; and the times of ranks with them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from planner.documents.catalog import find_profile
from planner.documents.profile import Cluster, Link, Profile, RankCompute
from planner.documents.speeds import on_rank, on_slowest, rank_times
from planner.profile.batches import by_samples, first_rows
from planner.report.tables import profile_lines

WHOLE, HALF = np.array([8.0, 8.0]), np.array([4.0, 4.0])


def times(*ranks: tuple[float, float, float]) -> np.ndarray:
    """Steps of 8 and of 4 samples, and updates, of ranks with (fixed, sample, update)."""
    return np.array([(fixed + 8 * sample, fixed + 4 * sample, update) for fixed, sample, update in ranks])


def test_two_sizes_give_what_does_not_grow_with_samples() -> None:
    ranks = (30.0, 10.0, 7.0), (20.0, 40.0, 9.0)
    found = by_samples(WHOLE, HALF, times(*ranks))
    assert np.array([(one.fixed_us, one.sample_us, one.update_us) for one in found]) == pytest.approx(np.array(ranks))
    assert [one.fixed_us for one in by_samples(WHOLE, None, times(*ranks))] == [0.0, 0.0]


def test_ranks_that_differ_by_little_are_equal() -> None:
    found = by_samples(WHOLE, HALF, times((30.0, 10.0, 7.0), (31.0, 10.1, 7.1)))
    assert found[0] == found[1]


def test_half_a_batch_that_takes_longer_or_nothing_gives_times() -> None:
    slower, nothing = (by_samples(WHOLE, HALF, np.array([[80.0, half, 0.0]] * 2))[0] for half in (99.0, 0.0))
    assert slower.sample_us > 0.0
    assert (nothing.fixed_us, nothing.sample_us) == (0.0, 10.0)


def test_the_first_rows_of_a_batch() -> None:
    class Pair(NamedTuple):
        x: torch.Tensor
        rate: torch.Tensor

    batch = {"pair": Pair(torch.arange(6).view(6, 1), torch.zeros(())), "names": ["a"], "y": [torch.arange(6)]}
    part = first_rows(batch, 6, 3)
    assert (part["pair"].x.tolist(), part["y"][0].tolist(), part["names"]) == ([[0], [1], [2]], [0, 1, 2], ["a"])
    assert len(batch["y"][0]) == 6


def profile() -> Profile:
    found = find_profile("vgg16")
    ranks = (30.0, 10.0, 7.0), (20.0, 40.0, 14.0)
    known = tuple(RankCompute(fixed_us=f, sample_us=s, update_us=u) for f, s, u in ranks)
    return replace(
        found, compute=replace(found.compute, by_rank=known, update_us=140.0),
        world=replace(found.world, batch_per_rank=8),
    )  # fmt: skip


def cluster(ranks: int, *speed: float) -> Cluster:
    return Cluster(nodes=ranks, inter=Link(alpha_us=20.0, beta_us_per_byte=8e-4), speed=speed or None)


def test_a_profile_is_of_its_slowest_rank() -> None:
    compute = profile().compute
    step_us = compute.forward_us + compute.backward_us
    here = rank_times(profile(), cluster(2))
    assert (here.fixed_us + here.batch_us).tolist() == pytest.approx([step_us * 110 / 340, step_us])
    assert here.update_us.tolist() == [70.0, 140.0]
    assert on_slowest(profile(), cluster(2)) == profile()
    (line,) = (one for one in profile_lines(profile()) if "times as long" in one)
    assert line.startswith("rank 1 computes for 3.03 times as long as rank 0, which waits")
    fast = on_rank(profile(), cluster(2), 0, 2.0).compute
    assert fast.forward_us + fast.backward_us == pytest.approx(step_us * 190 / 340)
    assert fast.update_us == 70.0


def test_speeds_of_a_cluster_are_over_the_slowest_rank_that_was_measured() -> None:
    whole = rank_times(profile(), cluster(3)).step_us()
    assert rank_times(profile(), cluster(3, 1.0, 2.0, 0.5)).step_us().tolist() == pytest.approx(
        [whole[0], whole[0] / 2.0, whole[0] * 2.0]
    )
    assert on_rank(profile(), cluster(3, 1.0, 2.0, 0.5), 2).compute.update_us == pytest.approx(280.0)
