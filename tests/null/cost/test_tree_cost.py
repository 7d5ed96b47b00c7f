"""What trees and NaiveAG cost: formulas against the rounds that the runtime goes through, message by message."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from builders import cluster_document, make, profile_document

from benchmarks.hierarchy import crossover
from benchmarks.marked import marks
from planner.cost.curve import CostCurve
from planner.cost.phases import PHASES
from planner.cost.sparse import SPARSE_PHASES
from planner.cost.tree import CHUNK_BYTES, MOST_CHUNKS, chunks_of, double_binary_tree, rounds, tree_curve
from planner.decide.strategies import make_schedule
from planner.documents.catalog import find_cluster
from planner.documents.profile import Cluster, Link, parse_cluster
from planner.model.modes import simulate_schedule, step_us
from runtime.comm.collectives import tree as runtime_tree
from runtime.comm.collectives.tree import tree_rounds
from runtime.errors import InputError
from runtime.plan.transports import FLAT, NAIVE_ALL_GATHER, TREE

DOCUMENT = Path(__file__).parents[3] / "docs" / "results" / "hierarchy.md"
FAST, SLOW = Link(alpha_us=2.0, beta_us_per_byte=1e-5), Link(alpha_us=20.0, beta_us_per_byte=4e-4)


def sent_us(nodes: int, per_node: int, chunks: int, size_bytes: float, intra: Link = FAST, inter: Link = SLOW) -> float:
    """Round by round: a round is as long as its slowest transfer, and chunks on one card follow one another."""
    part_bytes, total_us = size_bytes / chunks, 0.0
    for transfers in tree_rounds(nodes * per_node, chunks):
        out, come = [0] * nodes, [0] * nodes
        for transfer in transfers:
            source, target = transfer.source // per_node, transfer.target // per_node
            if source != target:
                out[source] += 1
                come[target] += 1
        busiest = max(out + come)
        link = inter if busiest else intra
        total_us += link.alpha_us + max(1, busiest) * link.beta_us_per_byte * part_bytes
    return total_us


@pytest.mark.parametrize("chunks", [2, 4, 8, 16])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 8, 12, 15, 16, 17, 24, 31, 32, 33, 64, 100, 128])
def test_rounds_on_one_kind_of_link(ranks: int, chunks: int) -> None:
    found, true = rounds(ranks, 1, chunks), len(tree_rounds(ranks, chunks))
    assert found.inside == 0.0
    assert found.between == found.on_cards == pytest.approx(true, rel=0.22, abs=4.0)
    assert rounds(1, ranks, chunks).inside == found.between
    if ranks in (4, 8, 16, 32, 64, 128) and chunks == 2:
        assert found.between == true


@pytest.mark.parametrize("size_bytes", [1e3, 1e6, 1e8])
@pytest.mark.parametrize("shape", [(2, 2), (4, 2), (2, 4), (4, 4), (8, 4), (4, 8), (8, 8), (16, 8)])
def test_messages_where_ranks_share_a_card(shape: tuple[int, int], size_bytes: float) -> None:
    chunks = chunks_of(size_bytes)
    line = double_binary_tree(*shape, chunks, FAST, SLOW)
    ours_us = line.start_up_us + line.per_byte_us * size_bytes
    assert ours_us == pytest.approx(sent_us(*shape, chunks, size_bytes), rel=0.15)
    assert tree_curve(*shape, FAST, SLOW).at(size_bytes) == pytest.approx(ours_us)


def test_measured_on_emulated_hosts() -> None:
    """docs/results/hierarchy.md: 16 MB on 2 × 2 ranks, 200 Mbit/s a host, took 1,766 ms; this is the part on cards."""
    line = double_binary_tree(2, 2, MOST_CHUNKS, FAST, Link(alpha_us=100.0, beta_us_per_byte=8 / 200))
    assert (line.start_up_us + line.per_byte_us * 16e6) / 1e3 == pytest.approx(1766, rel=0.1)


def test_chunks_are_the_runtimes() -> None:
    assert (CHUNK_BYTES, MOST_CHUNKS) == (runtime_tree.CHUNK_BYTES, runtime_tree.MAX_CHUNKS)
    sizes = (0, 1, CHUNK_BYTES, 3 * CHUNK_BYTES - 1, 3 * CHUNK_BYTES, 100 * CHUNK_BYTES)
    assert [chunks_of(size) for size in sizes] == [2, 2, 2, 2, 3, 16]


def test_more_cards_carry_more_at_once() -> None:
    times = [tree_curve(8, 8, FAST, SLOW, cards).at(1e8) for cards in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0] / 1.5


def test_phases_of_trees() -> None:
    flat = CostCurve.from_samples([(1.0, 1.0)])
    machines = Cluster(name="c", nodes=4, ranks_per_node=2, intra=FAST, inter=SLOW)
    of = PHASES[TREE]
    [phase] = of(machines, flat, None)
    assert (phase.name, phase.link, phase.share) == ("all_reduce", "inter", 1.0)
    assert of(replace(machines, nodes=1, ranks_per_node=1), flat, None) == ()
    [inside] = of(replace(machines, nodes=1, inter=None), flat, None)
    assert inside.link == "intra"
    [implied] = of(Cluster(name="c", nodes=4, ranks_per_node=1), flat, SLOW)
    assert implied.time_us(1e6) == pytest.approx(tree_curve(4, 1, None, SLOW).at(1e6))
    with pytest.raises(InputError, match="no cost for the links inside a node"):
        of(replace(machines, intra=None), flat, SLOW)


def test_trees_win_where_ranks_are_many_and_messages_small() -> None:
    """128 ranks, one a node: 26 rounds against a ring's 254; with 64 MB the ring sends half as many bytes."""
    machines = cluster_document(None, nodes=128, inter={"alpha_us": 20.0, "beta_us_per_byte": 4e-4})
    small, large = (make(profile_document([(numel, 10.0)]), machines) for numel in (100, 16_000_000))
    times = [
        {name: simulate_schedule(of, make_schedule(of, name)).iteration_us for name in ("tree", "single")}
        for of in (small, large)
    ]
    assert times[0]["tree"] < 0.2 * times[0]["single"]
    assert times[1]["tree"] > 1.5 * times[1]["single"]
    assert [len(make_schedule(make(profile_document([(100, 1.0)] * 9), machines), "tree").buckets)] == [1]


def test_naive_all_gather_starts_up_twice() -> None:
    """The same bytes: log2(P) more start-ups, nothing else; from measured gathers, two of half the size."""
    machines = Cluster(name="c", nodes=8, ranks_per_node=1, inter=SLOW)
    [naive] = SPARSE_PHASES[NAIVE_ALL_GATHER](machines, None)
    [flat] = SPARSE_PHASES[FLAT](machines, None)
    for selected in (1, 1000, 10**6):
        assert naive.time_us(selected, 0.0) == pytest.approx(flat.time_us(selected, 0.0) + 3 * SLOW.alpha_us)
    curve = [[100, 10.0], [1000, 30.0], [10_000, 100.0]]
    measured = parse_cluster(cluster_document((1.0, 0.1), nodes=2) | {"samples": {"all_gather": curve}})
    [naive] = SPARSE_PHASES[NAIVE_ALL_GATHER](measured, None)
    assert naive.time_us(125, 0.0) == 2 * CostCurve.from_samples(curve).at(1000)
    link = {"alpha_us": 20.0, "beta_us_per_byte": 4e-4}
    of = make(profile_document([(10_000, 10.0)]), cluster_document(None, nodes=8, inter=link))
    made = [make_schedule(of, name) for name in ("slgs:0.01", "naive_all_gather:0.01")]
    slgs_us, naive_us = (simulate_schedule(of, schedule).iteration_us for schedule in made)
    assert naive_us == step_us(of, made[1]) == pytest.approx(slgs_us + 60.0)


def test_the_document_has_the_crossovers_as_predicted() -> None:
    begin, end = marks("crossover")
    written = DOCUMENT.read_text("utf-8").partition(begin)[2].partition(end)[0]
    found = "\n".join(crossover.lines())
    assert written.strip() == found.strip(), (
        "python -m benchmarks.hierarchy --part crossover --output docs/results/hierarchy.md"
    )
    starts = {name: dict(crossover.crossings(find_cluster(name), crossover.DENSE)) for name in crossover.CLUSTERS}
    assert {starts[name][crossover.SMALLEST] for name in starts} == {"tree"}
    assert {list(starts[name].values())[-1] for name in starts} == {"torus_2d"}
