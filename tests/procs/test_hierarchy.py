"""Collectives on two kinds of link, on real processes: the contract, error feedback, refusals, a rank that is late."""

from __future__ import annotations

from typing import Any

import hierarchy_checks
import hierarchy_refusals
import pytest

from planner.jobs.launch import LocalWorld, run_ranks

pytestmark = pytest.mark.filterwarnings("default::runtime.AdaptedWarning")


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    """Results of every rank of four."""
    return run_ranks(LocalWorld(ranks=4), hierarchy_checks.everything)


def check_contract(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert all(rank["sums_are_exact"].values()), rank["sums_are_exact"]
        assert all(rank["exchanged"].values()), rank["exchanged"]
        for case, (sums, residuals) in rank["against_algorithm_2"].items():
            assert sums, f"{case}: gradients differ"
            assert residuals, f"{case}: residuals differ"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_dense_ones_sum_exactly_and_sparse_ones_follow_algorithm_2(ranks: int) -> None:
    results = run_ranks(LocalWorld(ranks=ranks), hierarchy_checks.contract)
    check_contract(results)
    assert len(results[0]["against_algorithm_2"]) == {2: 6, 3: 4}[ranks]


def test_the_contract_on_two_nodes_of_two_ranks(four: list[dict[str, Any]]) -> None:
    check_contract(four)
    assert len(four[0]["sums_are_exact"]) == 32


@pytest.mark.parametrize("check", ["weights_stay_equal", "conserved", "resumed", "not_finite", "widened", "overlap"])
def test_training(four: list[dict[str, Any]], check: str) -> None:
    for rank in four:
        assert rank[check]
        assert all(rank[check].values()), rank[check]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("uneven", ["the nodes are uneven: node 0 has 3, node 1 has 1"]),
        ("other number", ["LOCAL_WORLD_SIZE", "has 4 ranks", "2 say", "GROUP_RANK"]),
        ("no number", ["has many ranks", "LOCAL_WORLD_SIZE"]),
        ("other nodes", ["for 4 nodes", "found 2 nodes of 2 ranks"]),
        ("flat mesh", ["1 dimensions", "expected two"]),
        ("other mesh", ["[[1, 2], [3, 4]]", "[0, 1, 2, 3] once"]),
        ("different meshes", ["different meshes", "rank 0: ((0, 2), (1, 3))"]),
        ("by layer", ["bucket 0 is sent by sparse/hitopk", "not from layers"]),
        ("short order", ["phase_order: found 1 pairs", "each of 9 once", "[0, 1]"]),
        ("order", ["found phase 2 of bucket 2 before its phase 0"]),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks_alike(
    four: list[dict[str, Any]], case: str, words: list[str]
) -> None:
    said = [rank["refusals"][case] for rank in four]
    assert len(set(said)) == 1
    assert said[0].startswith("PlanMismatch: ")
    for word in words:
        assert word in said[0]


@pytest.mark.parametrize("case", ["uneven, but it does not matter", "nor for a tree", "torus on one node", "mesh"])
def test_what_fits_is_taken_without_a_word(four: list[dict[str, Any]], case: str) -> None:
    assert [rank["refusals"][case] for rank in four] == [""] * 4


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("one node", "all 4 ranks are on one node, where sparse/hitopk has nothing to leave out: 3 of 3 buckets"),
        ("narrow on one node", "all 4 ranks are on one node, where no links between nodes are: 3 of 3 buckets"),
        ("too few", "bucket 0: a density of 1e-07 is less than one of the 8549 elements of a shard: k = 1 there"),
    ],
)
def test_what_is_done_in_another_form_is_said_once(four: list[dict[str, Any]], case: str, words: str) -> None:
    assert four[0]["refusals"][case].startswith(words)
    assert [rank["refusals"][case] for rank in four[1:]] == [""] * 3


def test_a_late_rank_is_noticed_in_every_group_within_the_deadline() -> None:
    results = run_ranks(LocalWorld(ranks=4), hierarchy_refusals.late_rank)
    for rank, (message, waited_s) in enumerate(results[:3]):
        assert f"rank {rank}: " in message
        assert "of bucket 0 (sparse/hitopk" in message
        assert "deadline 3 s" in message
        assert waited_s < 15.0
