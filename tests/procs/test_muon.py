"""Owners compute the operators of matrix optimizers: the bits of DDP in every state of a run; and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import muon_checks
import pytest

from planner.jobs.launch import LocalWorld, run_ranks


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """Of both ranks."""
    return run_ranks(LocalWorld(ranks=2), muon_checks.everything)


def test_shared_operators_give_the_bits_of_ddp(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert all(rank["as ddp"].values()), rank["as ddp"]
        assert rank["switched"]
        assert rank["resumed"]
        assert rank["newton_schulz"]
        assert rank["raised"]
        assert rank["taken once"]
        assert rank["replanned"]


def test_equal_shapes_are_stacks_where_all_ranks_find_equal_bits(results: list[dict[str, Any]]) -> None:
    check_stacks([rank["stacked"] for rank in results])


@pytest.mark.parametrize(("ranks", "nodes"), [(3, 0), (4, 2)])
def test_stacks_on_more_ranks_and_inside_of_nodes(ranks: int, nodes: int) -> None:
    check_stacks(run_ranks(LocalWorld(ranks=ranks), partial(muon_checks.stacked, nodes)))


def check_stacks(results: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(results):
        same, stacks, said = zip(*(found[name] for name in ("Muon", "Signs", "OtherBits")), strict=True)
        assert all(same)
        assert said[1] == []
        assert len(said[2]) == (rank == 0)
        assert all("is computed one matrix at a time: found a stack" in text for text in said[2])
        assert stacks[1] > stacks[2]
        assert len(found["raised"]) == 4
        assert all("rank 1: the operator of" in text and "raised TypeError" in text for text in found["raised"])


@pytest.mark.parametrize("ranks", [3, 4])
def test_on_more_ranks_weights_are_those_of_ddp_in_another_order_of_sums(ranks: int) -> None:
    for found in run_ranks(LocalWorld(ranks=ranks), muon_checks.in_another_order):
        assert found.keys() == muon_checks.MAKERS.keys()
        assert max(found.values()) < 1e-12, found


def test_messages_inside_of_nodes_have_the_bits_of_every_rank_repeating() -> None:
    assert run_ranks(LocalWorld(ranks=4), muon_checks.inside_nodes) == [True] * 4


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("rank", "updates.operator.owners: found rank 2 for 'up.weight'; expected ranks from 0 to 1"),
        ("name", "updates.operator.owners: found 'no.weight', which is no trainable parameter"),
        ("gathers", "updates.operator.gathers: found 'up.weight' 2 times; expected each parameter with an owner once"),
        ("vector", "shares the operator of up.bias, but found AdamW for it, which has no operator without state"),
        ("local rank", "updates.operator.inside: found rank 1 for 'up.weight'; expected ranks from 0 to 0"),
        ("message", "updates.operator.inside: found message 1 of 1; expected places in gathers"),
        ("unowned", "updates.operator.batched: found 'side.weight', which has no owner"),
        ("inexact", "updates.operator.tolerance: found 0.01 in an exact plan"),
        ("twice", "optimizers: found embed.weight in two of them, SGD at position 0 and Adam at 1"),
        ("empty", "optimizer: found an empty list, expected an optimizer, or None"),
        ("none inside", "optimizer: found a list with a NoneType, expected a torch.optim.Optimizer"),
    ],
)
def test_what_cannot_be_shared_is_refused_on_all_ranks(results: list[dict[str, Any]], case: str, words: str) -> None:
    for rank in results:
        assert words in rank["refused"][case]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("PerRank", "rank 1 has another result of up.weight than rank 0"),
        ("Backwards", "its step calls its operator 3 times for 3 parameters, or in another order"),
    ],
)
def test_operators_that_ranks_cannot_share_stay_on_every_rank(
    results: list[dict[str, Any]], kind: str, words: str
) -> None:
    (said,) = results[0]["fallback"][kind]
    assert words in said
    assert results[1]["fallback"][kind] == []
