"""Which ranks measure which kind of link together, and what constants follow."""

from __future__ import annotations

import pytest

from planner.cost.collectives import collective_cost
from planner.documents.profile import Line, Link
from planner.profile.links import implied_link, parts_of


@pytest.mark.parametrize(
    ("nodes", "inside", "between"),
    [
        ("aabb", [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        ("abab", [[0, 2], [1, 3]], [[0, 1], [2, 3]]),
        ("aaabbb", [[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]),
        ("aabbcc", [[0, 1], [2, 3], [4, 5]], [[0, 2, 4], [1, 3, 5]]),
    ],
)
def test_ranks_by_node_and_by_place(nodes: str, inside: list[list[int]], between: list[list[int]]) -> None:
    assert parts_of(list(nodes)) == (inside, between)


@pytest.mark.parametrize("nodes", ["a", "aaaa", "abcd", "aab", "aaab"])
def test_one_kind_of_link_or_uneven_nodes_are_not_measured_apart(nodes: str) -> None:
    assert parts_of(list(nodes)) is None


@pytest.mark.parametrize(("ranks", "sharing"), [(2, 1), (2, 4), (5, 3)])
def test_the_constants_give_back_what_was_measured(ranks: int, sharing: int) -> None:
    """The concurrent rings of a node share its link, so that alone one would take 1/sharing per byte."""
    link = implied_link(Line(alpha_us=120.0, beta_us_per_byte=0.5), ranks, sharing)
    shared = Link(alpha_us=link.alpha_us, beta_us_per_byte=link.beta_us_per_byte * sharing)
    cost = collective_cost("all_reduce/ring", ranks, shared)
    assert cost.start_up_us == pytest.approx(120.0, rel=1e-4)
    assert cost.per_byte_us == pytest.approx(0.5, rel=1e-4)
