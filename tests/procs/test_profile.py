"""Profiles measured on real processes."""

from __future__ import annotations

from typing import Any

import profile_checks
import pytest

from planner.launch import LocalWorld, run_ranks
from planner.profile.document import Profile, parse_profile


@pytest.fixture(scope="module")
def pair() -> list[dict[str, Any]]:
    """Results of both ranks of two."""
    return run_ranks(LocalWorld(ranks=2), profile_checks.both)


@pytest.fixture(scope="module")
def profile(pair: list[dict[str, Any]]) -> Profile:
    """The profile of the sleepy model."""
    found: Profile = pair[0]["profile"]
    return found


def test_all_ranks_get_one_profile(pair: list[dict[str, Any]]) -> None:
    assert pair[0]["profile"] == pair[1]["profile"]


def test_a_profile_reads_back_from_its_document(profile: Profile) -> None:
    assert parse_profile(profile.to_document()) == profile


def test_gradients_are_those_of_used_trainable_parameters_in_order_of_readiness(profile: Profile) -> None:
    names = [gradient.name for gradient in profile.compute.gradients]
    assert set(names[:2]) == {"third.weight", "third.bias"}
    assert set(names[2:4]) == {"second.weight", "second.bias"}
    assert set(names[4:]) == {"first.weight", "first.bias"}
    assert [g.layer for g in profile.compute.gradients] == [name.split(".")[0] for name in names]


def test_a_known_delay_stands_before_the_gradient_that_it_delays(profile: Profile) -> None:
    times_us = [gradient.backward_us for gradient in profile.compute.gradients]
    delayed = times_us.index(max(times_us))
    assert 20_000 <= times_us[delayed] <= 30_000
    assert profile.compute.gradients[delayed].layer == "second"
    assert sum(times_us) - times_us[delayed] < 10_000


def test_links_are_sampled_up_to_the_size_of_the_model(profile: Profile) -> None:
    cluster = profile.cluster
    assert cluster is not None
    assert cluster.samples is not None
    assert cluster.collectives is not None
    assert (cluster.nodes, cluster.ranks_per_node) == (1, 2)
    assert set(cluster.samples) == {"all_reduce", "reduce_scatter", "all_gather", "broadcast"}
    model_bytes = sum(gradient.size_bytes for gradient in profile.compute.gradients)
    for samples in cluster.samples.values():
        assert samples[0][0] == 1024
        assert samples[-1][0] == model_bytes
        assert all(time_us > 0 for _, time_us in samples)
    assert cluster.back_to_back is not None
    assert set(cluster.collectives) == set(cluster.samples)


def test_a_graph_explains_the_layers(profile: Profile) -> None:
    assert profile.tracing is not None
    assert profile.tracing.method == "export"
    assert profile.layers is not None
    flops = {layer.name: layer.flops for layer in profile.layers}
    assert flops["first"] == 2 * 8 * 64 * 64


def test_profiling_leaves_everything_as_found(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert all(rank["left"].values()), rank["left"]
