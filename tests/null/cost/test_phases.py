"""Collectives of several phases against numbers worked out by hand, and what they cost on shared network cards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.cost.collectives import Coefficients
from planner.cost.curve import CostCurve
from planner.cost.model import resize
from planner.cost.phases import PHASES
from planner.cost.sparse import selected_elements, sparse_us
from planner.documents.profile import Cluster, Line, Link
from runtime.errors import InputError
from runtime.plan.transports import FLAT, HITOPK, TORUS_2D

CLUSTER = Cluster(
    name="two links",
    nodes=4,
    ranks_per_node=2,
    intra=Link(alpha_us=1.0, beta_us_per_byte=0.01, gamma_us_per_byte=0.002),
    inter=Link(alpha_us=10.0, beta_us_per_byte=0.1, gamma_us_per_byte=0.02),
)
SIZE_BYTES = 8000
CURVE = CostCurve.from_line(Coefficients(5.0, 0.25))


def times(cluster: Cluster, size_bytes: float = SIZE_BYTES) -> list[tuple[str, str, float]]:
    """(link, phase, time) of a 2D-torus all-reduce."""
    phases = PHASES[TORUS_2D](cluster, CURVE)
    return [(phase.link, phase.name, pytest.approx(phase.time_us(size_bytes))) for phase in phases]


def test_torus_by_hand() -> None:
    # Two ranks share one card, so β between nodes is 0.2; each sums half of the bytes there.
    assert times(CLUSTER) == [
        ("intra", "reduce_scatter", 1 * 1.0 + 0.5 * (0.01 + 0.002) * 8000),
        ("inter", "all_reduce", 6 * 10.0 + (1.5 * 0.2 + 0.75 * 0.02) * 4000),
        ("intra", "all_gather", 1 * 1.0 + 0.5 * 0.01 * 8000),
    ]


@pytest.mark.parametrize(("cards", "beta"), [(1, 0.2), (2, 0.1), (4, 0.1)])
def test_ranks_of_a_node_share_its_network_cards(cards: int, beta: float) -> None:
    [(_, _, time_us)] = [t for t in times(replace(CLUSTER, nics_per_node=cards)) if t[0] == "inter"]
    assert time_us == 60.0 + (1.5 * beta + 0.75 * 0.02) * 4000


def test_terms_of_a_single_rank_or_node_vanish() -> None:
    assert [phase for _, phase, _ in times(replace(CLUSTER, nodes=1))] == ["reduce_scatter", "all_gather"]
    assert times(replace(CLUSTER, ranks_per_node=1)) == [("inter", "all_reduce", 5.0 + 0.25 * 8000)]
    assert times(replace(CLUSTER, nodes=1, ranks_per_node=1)) == []


def test_measured_phases_win_over_link_constants() -> None:
    measured = replace(
        CLUSTER,
        samples={"inter/all_reduce": ((0.0, 7.0), (4000.0, 47.0))},
        collectives={"intra/all_gather": Line(alpha_us=3.0, beta_us_per_byte=0.001)},
    )
    assert times(measured)[1:] == [("inter", "all_reduce", 47.0), ("intra", "all_gather", 11.0)]
    # On other numbers of ranks they do not hold; inside a node nothing has changed.
    larger = resize(CLUSTER, 16)
    assert times(resize(measured, 16))[1:] == [times(larger)[1], ("intra", "all_gather", 11.0)]


@pytest.mark.parametrize(("missing", "words"), [("intra", "inside a node"), ("inter", "between nodes")])
def test_a_missing_link_is_named(missing: str, words: str) -> None:
    lacking: dict[str, Any] = {missing: None}
    with pytest.raises(
        InputError, match=f'two links: no cost for the links {words}; expected the constants "{missing}"'
    ):
        PHASES[TORUS_2D](replace(CLUSTER, **lacking), CURVE)


def test_sparse_flat_by_hand() -> None:
    # 8 ranks, 10 elements each of 8 bytes, three doublings over shared cards.
    assert sparse_us(FLAT, CLUSTER, 1000, 0.01, 4) == (("inter", pytest.approx(30.0 + 7 / 8 * 0.2 * 640)),)
    one_node = replace(CLUSTER, nodes=1)
    assert sparse_us(FLAT, one_node, 1000, 0.01, 4) == (("intra", pytest.approx(1.0 + 0.5 * 0.01 * 160)),)
    assert sparse_us(FLAT, replace(one_node, ranks_per_node=1), 1000, 0.01, 4) == ()


def test_sparse_hitopk_by_hand() -> None:
    # Shards of 500 elements, 5 selected of each; 4 nodes gather 4 · 5 · 8 bytes, the node 2 · 4 · 5 · 8.
    assert sparse_us(HITOPK, CLUSTER, 1000, 0.01, 4) == (
        ("intra", pytest.approx(1.0 + 0.5 * 0.012 * 4000)),
        ("inter", pytest.approx(20.0 + 0.75 * 0.2 * 160)),
        ("intra", pytest.approx(1.0 + 0.5 * 0.01 * 320)),
    )


def test_hitopk_gathers_no_more_than_the_dense_tensor() -> None:
    assert sparse_us(HITOPK, CLUSTER, 1000, 1.0, 4)[2] == ("intra", pytest.approx(1.0 + 0.5 * 0.01 * 4000))


@pytest.mark.parametrize(("density", "numel", "expected"), [(0.001, 10, 1), (0.5, 9, 4), (1.0, 7, 7), (2.0, 7, 7)])
def test_selected_elements(density: float, numel: int, expected: int) -> None:
    assert selected_elements(density, numel) == expected
