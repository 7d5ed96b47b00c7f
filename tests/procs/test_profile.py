"""Profiles measured on real processes."""

from __future__ import annotations

from typing import Any

import profile_checks
import pytest

from planner import optimize
from planner.documents.profile import Profile, parse_profile
from planner.jobs.launch import LocalWorld, run_ranks
from runtime.errors import InputError
from runtime.sparse.compressors.wire import WIRE_DTYPES


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
    assert set(cluster.samples) == {"all_reduce"}  # no optimizer whose step could be shared
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


def test_what_only_riskier_plans_need_is_added_later(pair: list[dict[str, Any]], profile: Profile) -> None:
    relaxed: Profile = pair[0]["relaxed"]
    assert pair[1]["relaxed"] == relaxed
    before, after = profile.cluster, relaxed.cluster
    assert before is not None
    assert after is not None
    assert (before.measured_for, before.sparsify, before.local_update) == ("exact", None, None)
    assert after.measured_for == "relaxed"
    assert set(after.samples or {}) == {"all_reduce", "reduce_scatter", "all_gather", "two_shot", "native"}
    assert after.sparsify is not None
    assert after.encode is not None
    assert after.decode is not None
    assert after.encode.keys() == after.decode.keys() == WIRE_DTYPES.keys()
    assert set(after.low_rank or {}) == {"1", "4"}
    assert {gradient.matrix for gradient in profile.compute.gradients} >= {None, (64, 64)}
    assert after.local_update is not None
    assert (relaxed.compute, relaxed.layers) == (profile.compute, profile.layers)
    assert before.back_to_back is not None
    assert after.back_to_back is not None
    assert set(after.back_to_back) == {"all_reduce", "all_gather", "two_shot", "native"}
    assert after.back_to_back["all_reduce"] == before.back_to_back["all_reduce"]
    for accuracy in ("bounded", "relaxed"):
        with pytest.raises(InputError, match=f"--for {accuracy} --add-to"):
            optimize(profile, accuracy=accuracy)  # type: ignore[arg-type]
        assert optimize(relaxed, accuracy=accuracy).predicted is not None  # type: ignore[arg-type]


def test_nothing_is_added_to_a_profile_of_another_model_or_class(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert "the profile to add to is of another model (Sleepy)" in rank["refused"][0]
        assert "found a profile for 'fast' plans" in rank["refused"][1]
        assert "measured with compile=None, found compile='eager'" in rank["refused"][2]


def test_phases_are_said_where_output_goes_into_a_pipe(pair: list[dict[str, Any]]) -> None:
    """By the first rank alone, one line each, also in a script that has not configured `logging`."""
    first, second = (rank["said"] for rank in pair)
    assert second == ""
    lines = first.splitlines()
    assert all(line.startswith("profile: ") for line in lines)
    assert "Sleepy on 2 ranks, for exact plans: " in lines[0]
    begun = [line.split(": ")[1] for line in lines if "/4 " in line]
    assert [text[:3] for text in begun] == ["1/4", "2/4", "3/4", "4/4"]


def test_profiling_leaves_everything_as_found(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert all(rank["left"].values()), rank["left"]
