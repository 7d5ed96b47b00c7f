"""Costs against numbers worked out by hand, and the rules that choose between samples, lines and formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
from builders import cluster_document
from hypothesis import given
from hypothesis import strategies as st

from planner.cost import sparse
from planner.cost.collectives import COLLECTIVE_COSTS, Coefficients, collective_cost, solve_link
from planner.cost.curve import CostCurve, fit_line, merge_duplicates
from planner.cost.halves import half
from planner.cost.model import CommunicationCost, communication_cost, resize, scale
from planner.documents.profile import Cluster, Link, parse_cluster
from runtime.errors import InputError

LINK = Link(alpha_us=10.0, beta_us_per_byte=0.5, gamma_us_per_byte=0.25)
MESSAGE_BYTES = 1200

BY_HAND = {
    # P:                             1    2      3       4       8
    "all_gather/recursive_doubling": [0, 310.0, 420.0, 470.0, 555.0],
    "all_gather/ring": [0, 310.0, 420.0, 480.0, 595.0],
    "all_reduce/binary_tree": [0, 1520.0, 3040.0, 3040.0, 4560.0],
    "all_reduce/halving_doubling": [0, 770.0, 1040.0, 1165.0, 1372.5],
    "all_reduce/recursive_doubling": [0, 910.0, 1820.0, 1820.0, 2730.0],
    "all_reduce/ring": [0, 770.0, 1040.0, 1185.0, 1452.5],
    "reduce_scatter/ring": [0, 460.0, 620.0, 705.0, 857.5],
}
"""Times of 1200 bytes with α = 10, β = 0.5, γ = 0.25 on 1, 2, 3, 4 and 8 ranks."""


@pytest.mark.parametrize("name", COLLECTIVE_COSTS)
def test_formula_by_hand(name: str) -> None:
    costs = [collective_cost(name, ranks, LINK) for ranks in (1, 2, 3, 4, 8)]
    times_us = [cost.start_up_us + cost.per_byte_us * MESSAGE_BYTES for cost in costs]
    assert times_us == pytest.approx(BY_HAND[name], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "steps", "beta", "gamma"),
    [
        ("all_reduce/ring", lambda p: 2 * (p - 1), lambda p: 2 * (p - 1) / p, lambda p: (p - 1) / p),
        ("all_reduce/recursive_doubling", lambda p: _log(p), lambda p: _log(p), lambda p: _log(p)),
        ("all_reduce/halving_doubling", lambda p: 2 * _log(p), lambda p: 2 - 2 / p, lambda p: 1 - 1 / p),
        ("all_reduce/binary_tree", lambda p: 2 * _log(p), lambda p: 2 * _log(p), lambda p: _log(p)),
        ("reduce_scatter/ring", lambda p: p - 1, lambda p: (p - 1) / p, lambda p: (p - 1) / p),
        ("all_gather/ring", lambda p: p - 1, lambda p: (p - 1) / p, lambda _: 0),
        ("all_gather/recursive_doubling", lambda p: _log(p), lambda p: (p - 1) / p, lambda _: 0),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3, 5, 7, 8, 9, 16, 63, 64, 65, 1000])
def test_formula_term_by_term(name: str, ranks: int, steps: Any, beta: Any, gamma: Any) -> None:
    """α, β and γ each on their own."""
    assert collective_cost(name, ranks, Link(alpha_us=1, beta_us_per_byte=0)) == (steps(ranks), 0)
    assert collective_cost(name, ranks, Link(alpha_us=0, beta_us_per_byte=1)) == pytest.approx((0, beta(ranks)))
    only_gamma = Link(alpha_us=0, beta_us_per_byte=0, gamma_us_per_byte=1)
    assert collective_cost(name, ranks, only_gamma) == pytest.approx((0, gamma(ranks)))


def _log(ranks: int) -> int:
    """⌈log2 ranks⌉, by doubling."""
    steps = 0
    while 2**steps < ranks:
        steps += 1
    return steps


def test_published_ring_start_up() -> None:
    """α = 45.26 µs of the MG-WFBP paper."""
    link = Link(alpha_us=45.26, beta_us_per_byte=0.0)
    start_ups = [collective_cost("all_reduce/ring", ranks, link).start_up_us for ranks in (2, 4, 8)]
    assert start_ups == pytest.approx([90.52, 271.56, 633.64], abs=0.005)


def test_unknown_formula_lists_the_known() -> None:
    with pytest.raises(InputError, match=r"no cost formula 'all_reduce/star'; known: .*all_reduce/ring"):
        collective_cost("all_reduce/star", 4, LINK)


@given(st.sampled_from(sorted(COLLECTIVE_COSTS)), st.integers(2, 300), st.floats(0, 1e6), st.floats(0, 1e3))
def test_solve_link_inverts(name: str, ranks: int, alpha_us: float, beta_us_per_byte: float) -> None:
    measured = collective_cost(name, ranks, Link(alpha_us=alpha_us, beta_us_per_byte=beta_us_per_byte))
    link = solve_link(name, ranks, measured)
    assert (link.alpha_us, link.beta_us_per_byte) == pytest.approx((alpha_us, beta_us_per_byte), rel=1e-12, abs=1e-300)
    assert link.gamma_us_per_byte == 0.0


def test_curve_between_and_beyond_samples() -> None:
    curve = CostCurve.from_samples([(400, 90), (100, 30), (200, 70)])
    sizes = [0, 50, 100, 150, 200, 300, 400, 500]
    assert curve(sizes).tolist() == pytest.approx([0, 10, 30, 50, 70, 80, 90, 100])
    assert curve.at(150) == 50


def test_curve_is_flat_beyond_falling_ends() -> None:
    """A slope below 0 at an end is taken as 0."""
    curve = CostCurve.from_samples([(100, 50), (200, 20), (300, 60), (400, 40)])
    assert curve([0, 100, 150, 200, 250, 400, 10**9]).tolist() == pytest.approx([50, 50, 35, 20, 40, 40, 40])
    assert not curve.non_decreasing


def test_curve_is_never_below_zero() -> None:
    curve = CostCurve.from_samples([(1000, 1), (1001, 100)])
    assert curve([0, 999, 1000]).tolist() == [0, 0, 1]


def test_duplicate_samples_count_by_their_median() -> None:
    assert merge_duplicates([(8, 3), (8, 100), (8, 5), (4, 1), (4, 2)]) == {8.0: 5.0, 4.0: 1.5}
    assert CostCurve.from_samples([(8, 3), (8, 100), (8, 5), (4, 1), (4, 2)]).at(6) == pytest.approx(3.25)


def test_single_sample_is_a_constant() -> None:
    curve = CostCurve.from_samples([(100, 7)])
    assert curve([0, 100, 10**6]).tolist() == [7, 7, 7]
    assert curve.line == Coefficients(7.0, 0.0)
    assert curve.non_decreasing


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 1e4)), min_size=1, max_size=8),
    st.lists(st.floats(0, 3000), min_size=1, max_size=8),
)
def test_curve_equals_reference(samples: list[tuple[int, float]], sizes: list[float]) -> None:
    expected = [reference.interpolate(samples, size) for size in sizes]
    found = CostCurve.from_samples(samples)(sizes)
    assert (found >= 0.0).all()
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(st.floats(0, 1e4), st.floats(1e-3, 10), st.integers(2, 8))
def test_fitted_line_of_a_line(start_up_us: float, per_byte_us: float, count: int) -> None:
    samples = [(100.0 * i**2, start_up_us + per_byte_us * 100.0 * i**2) for i in range(count)]
    assert fit_line(samples) == pytest.approx((start_up_us, per_byte_us), rel=1e-6, abs=1e-6)


def test_fitted_line_is_least_squares_and_never_negative() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.uniform(0, 1e6, 20)
    times = 100.0 + 0.01 * sizes + rng.normal(0, 50, 20)
    slope, intercept = np.polyfit(sizes, times, 1)
    assert fit_line(np.column_stack([sizes, times]).tolist()) == pytest.approx((intercept, slope))
    assert fit_line([(0, 10), (10, 5)]) == (7.5, 0.0)
    assert fit_line([(10, 0), (20, 10)]) == (0.0, 1.0)


def cost(ranks: int | None = None, **document: Any) -> CommunicationCost:
    return communication_cost(parse_cluster(cluster_document(**document)), ranks)


INTER = {"alpha_us": 45.0, "beta_us_per_byte": 8e-4}
INTRA = {"alpha_us": 5.0, "beta_us_per_byte": 1e-4}
SAMPLES = [[1024, 700.0], [2048, 900.0]]


def test_most_specific_source_wins() -> None:
    everything = cost(samples=SAMPLES, line=(50.0, 0.01), inter=INTER)
    assert everything.all_reduce.at(1536) == 800.0
    assert everything.all_reduce.start_up_us == 50.0  # of the line that was fitted to the samples
    assert everything.source == "2 measured samples"
    in_a_queue = {"all_reduce": [[1024, 800.0], [2048, 1000.0]]}
    queued = cost(samples=SAMPLES, line=(50.0, 0.01), inter=INTER, back_to_back=in_a_queue)
    assert (queued.all_reduce.at(1536), queued.source) == (900.0, "2 measured samples, back to back")
    assert cost(samples=SAMPLES, line=None, inter=INTER).all_reduce.start_up_us == pytest.approx(500.0)
    fitted = cost(line=(50.0, 0.01), inter=INTER)
    assert fitted.all_reduce.at(1000) == 60.0
    assert fitted.source == "fitted line"
    links = cost(line=None, inter=INTER)
    assert links.all_reduce.at(1000) == pytest.approx(6 * 45.0 + 1.5 * 8e-4 * 1000)
    assert links.source == "all_reduce/ring with link constants"
    assert [source.extrapolated for source in (everything, queued, fitted, links)] == [False] * 4


@pytest.mark.parametrize(("algorithm", "start_up_us"), [("binary_tree", 180.0), ("recursive_doubling", 90.0)])
def test_algorithm_of_the_library(algorithm: str, start_up_us: float) -> None:
    assert cost(line=None, inter=INTER, all_reduce_algorithm=algorithm).all_reduce.start_up_us == start_up_us


def test_link_of_a_flat_all_reduce() -> None:
    """Over several nodes it is `inter`, within one node `intra`."""
    two_nodes = {"line": None, "nodes": 2, "ranks_per_node": 4, "intra": INTRA, "inter": INTER}
    assert cost(**two_nodes).all_reduce.start_up_us == pytest.approx(14 * 45.0)
    assert cost(ranks=4, **two_nodes).all_reduce.start_up_us == pytest.approx(6 * 5.0)
    assert cost(ranks=16, **two_nodes).all_reduce.start_up_us == pytest.approx(30 * 45.0)
    assert cost(**{**two_nodes, "nodes": 1}).all_reduce.start_up_us == pytest.approx(6 * 5.0)


PCIE, CARD = {"alpha_us": 2.5, "beta_us_per_byte": 1 / 6e3}, {"alpha_us": 5.0, "beta_us_per_byte": 1 / 25e3}


@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling", "halving_doubling", "binary_tree"])
def test_a_slow_link_inside_nodes_sets_the_pace_of_flat_collectives(algorithm: str) -> None:
    """Two nodes of 8 on PCIe of 6 GB/s, joined by 25 GB/s: all hops of a ring but two cross PCIe."""
    two = {"line": None, "nodes": 2, "ranks_per_node": 8, "inter": CARD, "all_reduce_algorithm": algorithm}
    found = cost(**two, intra=PCIE)
    by_hand = collective_cost(f"all_reduce/{algorithm}", 16, Link(alpha_us=5.0, beta_us_per_byte=1 / 6e3))
    assert found.all_reduce.line == by_hand
    for name in ("reduce_scatter", "all_gather"):
        assert half(found, name).curve.line == pytest.approx((15 * 5.0, 15 / 16 / 6e3))
    # The exchanges of a gather of selected elements share a card: 25 / 8 GB/s are less than PCIe has.
    assert sparse.flat(found.cluster)[0].curve.line.per_byte_us == pytest.approx(15 / 16 * 8 / 25e3)
    roomy = replace(found.cluster, nics_per_node=8)
    assert sparse.flat(roomy)[0].curve.line.per_byte_us == pytest.approx(15 / 16 / 6e3)
    assert cost(**two, intra={**PCIE, "beta_us_per_byte": 1 / 26e3}).all_reduce.line == (
        collective_cost(f"all_reduce/{algorithm}", 16, Link(alpha_us=5.0, beta_us_per_byte=1 / 25e3))
    )


@given(st.lists(st.floats(0.0, 100.0), min_size=4, max_size=4), st.floats(1.0, 10.0), st.sampled_from(range(4)))
def test_a_slower_link_never_makes_a_flat_collective_faster(values: list[float], factor: float, which: int) -> None:
    """As long as messages start up no slower inside nodes than between them, as everywhere."""
    slower = [value * (factor if at == which else 1.0) for at, value in enumerate(values)]

    def curve(constants: list[float]) -> CostCurve:
        first_us, inside, second_us, between = constants
        return cost(
            line=None, nodes=2, ranks_per_node=4,
            intra={"alpha_us": min(first_us, second_us), "beta_us_per_byte": inside},
            inter={"alpha_us": second_us, "beta_us_per_byte": between},
        ).all_reduce  # fmt: skip

    for size in (0.0, 1.0, 1e6):
        assert curve(slower).at(size) >= curve(values).at(size)


def test_links_measured_apart() -> None:
    line = {"alpha_us": 7.0, "beta_us_per_byte": 0.0}
    collectives = {"inter/all_reduce": line, "intra/all_reduce": {**line, "alpha_us": 3.0}}
    assert cost(line=None, collectives=collectives).all_reduce.start_up_us == 7.0
    one_node = {"line": None, "nodes": 1, "ranks_per_node": 4, "collectives": collectives}
    assert cost(**one_node).all_reduce.start_up_us == 3.0


def test_other_ranks_use_links_and_are_marked() -> None:
    eight = cost(ranks=8, samples=SAMPLES, inter=INTER)
    assert eight.all_reduce.start_up_us == pytest.approx(14 * 45.0)
    assert eight.extrapolated
    assert not cost(ranks=4, samples=SAMPLES, inter=INTER).extrapolated
    assert not cost(ranks=8, line=None, inter=INTER).extrapolated


@pytest.mark.parametrize("source", ["line", "samples"])
def test_other_ranks_use_the_link_that_the_fit_implies(source: str) -> None:
    """633.64 µs on 8 ranks are 14 steps of 45.26 µs; on 4 ranks there are 6."""
    samples = [[size, 633.64 + 0.0016 * size] for size in (0, 1000, 5000, 100000)]
    measured = {"line": (633.64, 0.0016)} if source == "line" else {"line": None, "samples": samples}
    four = cost(ranks=4, nodes=8, **measured)
    assert four.all_reduce.line == pytest.approx((271.56, 0.0016 / (7 / 4) * (3 / 2)))
    assert four.extrapolated
    assert four.source == "all_reduce/ring with link solved from 8 ranks"


@given(st.integers(2, 8), st.integers(2, 8), st.floats(1.0, 1e3), st.floats(1e-4, 1.0), st.booleans())
def test_a_scaled_line_is_the_formula_on_the_new_ranks(
    before: int, after: int, alpha_us: float, per_byte_us: float, one_node: bool
) -> None:
    link = Link(alpha_us=alpha_us, beta_us_per_byte=per_byte_us)
    start_up_us, slope = collective_cost("all_reduce/ring", before, link)
    samples = [[size, start_up_us + slope * size] for size in (1024, 4096, 65536)]
    shape = {"nodes": 1, "ranks_per_node": before} if one_node else {"nodes": before}
    cluster = parse_cluster(cluster_document((start_up_us, slope), samples, **shape))
    scaled = scale(cluster, 1 if one_node else after, after if one_node else 1)
    found, expected = communication_cost(scaled), collective_cost("all_reduce/ring", after, link)
    assert scaled.ranks == after
    for size in (1024, 10000, 65536, 10**6):
        assert found.all_reduce.at(size) == pytest.approx(expected.start_up_us + expected.per_byte_us * size, rel=1e-3)
    assert found.extrapolated
    assert found.source == f"3 measured samples, scaled from {before} ranks"
    assert communication_cost(scale(scaled, 8, 1)).source.endswith(f"scaled from {before} ranks")


def test_a_scaled_curve_keeps_its_shape() -> None:
    """On 3 ranks instead of 2 a ring has twice the start-ups and 4/3 of the bytes; the jump at 2 KiB stays."""
    queued = [[1024, 200.0], [2048, 600.0], [1_000_000, 10_000.0]]
    cluster = parse_cluster(
        cluster_document((100.0, 0.01), nodes=2, back_to_back={"all_reduce": queued}, contention=(1.5, 2.0))
    )
    scaled = scale(cluster, 3, 1)
    assert scaled.back_to_back is not None
    times_us = [time_us for _, time_us in scaled.back_to_back["all_reduce"]]
    lines = [(200.0 + 0.04 / 3 * size) / (100.0 + 0.01 * size) for size, _ in queued]
    assert times_us == pytest.approx([time_us * factor for (_, time_us), factor in zip(queued, lines, strict=True)])
    assert scaled.contention == cluster.contention


def test_what_was_not_measured_is_not_scaled() -> None:
    with pytest.raises(InputError, match="found no all-reduce that was measured on two ranks or more"):
        scale(parse_cluster(cluster_document(None, inter=INTER)), 8, 1)
    with pytest.raises(InputError, match="found no all-reduce that was measured on two ranks or more"):
        scale(parse_cluster(cluster_document(nodes=1)), 2, 1)


def test_one_rank_sends_nothing() -> None:
    for document in ({"samples": SAMPLES}, {"line": None, "inter": INTER}):
        assert cost(ranks=1, **document).all_reduce.at(10**9) == 0.0
    assert cost(line=None, nodes=1).all_reduce.at(10**9) == 0.0


def test_resize_keeps_ranks_per_node() -> None:
    cluster = parse_cluster(cluster_document(nodes=2, ranks_per_node=4))
    shapes = {ranks: (resize(cluster, ranks).nodes, resize(cluster, ranks).ranks_per_node) for ranks in (1, 2, 4, 16)}
    assert shapes == {1: (1, 1), 2: (1, 2), 4: (1, 4), 16: (4, 4)}
    for ranks in (0, -4, 6, 9):
        with pytest.raises(InputError, match=rf"{ranks} ranks do not fill nodes of 4; expected a multiple of 4"):
            resize(cluster, ranks)


@pytest.mark.parametrize("ranks", [10**8, 10**400], ids=["many", "more than a float holds"])
def test_absurd_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(InputError, match="found more than 10000000 ranks"):
        cost(ranks=ranks)


def test_no_cost_says_what_to_measure() -> None:
    with pytest.raises(InputError, match=r"cluster \(unnamed\): no cost for an all-reduce on 4 ranks") as caught:
        cost(line=None)
    for hint in ("samples.all_reduce", "collectives.all_reduce", '"inter"', "`planner profile`"):
        assert hint in str(caught.value)
    with pytest.raises(InputError, match=r'cluster k80: no cost .*"intra"'):
        cost(line=None, name="k80", nodes=1, ranks_per_node=4, inter=INTER)


def test_huge_messages_stay_finite() -> None:
    assert math.isfinite(cost(line=(1e15, 1e12)).all_reduce.at(2.0**60))


def test_gathers_of_compressed_buckets_cost_what_they_do_in_a_queue() -> None:
    alone, queued = (((1024.0, each), (4096.0, 2.0 * each)) for each in (500.0, 800.0))
    described = Cluster(nodes=4, samples={"all_gather": alone}, back_to_back={"all_gather": queued})
    [phase] = sparse.flat(described)
    assert phase.curve.at(1024) == 800.0
    [phase] = sparse.flat(replace(described, back_to_back=None))
    assert phase.curve.at(1024) == 500.0
