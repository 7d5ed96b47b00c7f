"""Each matrix has an owner, which alone keeps its state and updates it: the bits of DDP; and what is refused."""

from __future__ import annotations

from typing import Any

import owned_checks
import pytest
from muon_checks import STEPS

from benchmarks.owned_memory import MOST, memory
from planner.jobs.launch import LocalWorld, run_ranks

Results = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 3, pytest.param(4, marks=pytest.mark.long)])
def ranks(request: pytest.FixtureRequest) -> Results:
    """What every rank found."""
    return run_ranks(LocalWorld(ranks=request.param), owned_checks.everything)


def test_owners_give_the_bits_of_ddp(ranks: Results) -> None:
    for rank in ranks:
        assert all(rank["equal"].values()), rank["equal"]
        assert all(rank["resumed"].values()), rank["resumed"]
        assert rank.get("late", True)


def test_updates_of_16_bits_are_gathered_and_applied_by_every_rank(ranks: Results) -> None:
    """With weights in the first step, which are compared; where they differ, weights stay what is gathered."""
    for number, rank in enumerate(ranks):
        for kind, (equal, sizes, said) in rank.get("sent", {}).items():
            assert equal, kind
            buckets = len(sizes) // (STEPS + 1)
            narrow, wide = sizes[: 2 * buckets : 2], sizes[1 : 2 * buckets : 2]
            assert [2 * size for size in narrow] == wide
            wrong = kind == "Forgetful"
            assert sizes[2 * buckets :] == (wide if wrong else narrow) * (STEPS - 1)
            assert ["gives other weights than its step" in text for text in said] == [True] * (wrong and number == 0)


def test_gathers_of_uneven_parts_are_padded_on_nodes_of_several_ranks() -> None:
    assert run_ranks(LocalWorld(ranks=4), owned_checks.in_nodes) == [[True] * 3] * 4


@pytest.mark.long
def test_a_users_own_optimizer_is_planned() -> None:
    assert run_ranks(LocalWorld(ranks=2), owned_checks.planned) == [True, True]


def test_optimizers_of_a_package_have_owners() -> None:
    """With state in lists, in objects, and by element of a square matrix."""
    pytest.importorskip("pytorch_optimizer")
    for rank in run_ranks(LocalWorld(ranks=2), owned_checks.of_package):
        assert all(rank.values()), rank


def test_state_exists_once(ranks: Results) -> None:
    assert sum(rank["bytes"][0] for rank in ranks) == ranks[0]["bytes"][1]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("rank", "updates.step.owners: found rank 2 for 'up.weight'; expected ranks from 0 to 1"),
        ("grouped", "never.weight in group 0 of Muon at position 0, rank 1: never.weight in group 1 of AdamW"),
        ("name", "updates.step.owners: found 'no.weight', which is no trainable parameter"),
        ("cut", "which orthogonalizes whole matrices; expected an owner of down.weight (updates.step.owners)"),
        ("unknown", "found Adafactor, which keeps sums over rows and columns"),
        ("unapplied", "Unapplied: found update_dtype = torch.bfloat16 without apply; expected a method apply(self,"),
        ("skipped", "and a result in its shape and torch.bfloat16: call it in every step, or leave out update_dtype"),
        ("rounded", "updates.step.weights: found bfloat16 in a plan with owners of whole parameters"),
    ],
)
def test_what_cannot_be_owned_is_refused(ranks: Results, case: str, words: str) -> None:
    for rank in ranks:
        assert words in rank.get("refused", {case: words})[case]


def test_each_of_four_ranks_keeps_about_a_quarter_of_the_state() -> None:
    """With the owners that planner chooses, against one rank that has everything."""
    text, shares = memory()
    assert max(shares) <= MOST, text
    assert sum(shares) == pytest.approx(1.0)
