"""The curve over ranks that a plan carries, and the words on where its numbers came from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from builders import cluster_document, make, profile_document, random_problem, usual_document, usual_profile

from planner import optimize, simulate
from planner.decide.scaling import scaling_curve
from planner.decide.strategies import BASELINES
from planner.documents.profile import parse_cluster, parse_profile
from planner.documents.text import first_part, first_part_with_source, format_significant
from planner.emit.sources import describe_sources
from runtime.plan.predicted import ScalingPoint

LINK = {"alpha_us": 5.0, "beta_us_per_byte": 1e-3}


def curve(cluster: dict[str, Any], count: int = 3) -> tuple[ScalingPoint, ...]:
    """The curve of a few gradients on a cluster."""
    rows = [(1000, 50.0)] * count
    return optimize(parse_profile(profile_document(rows)), parse_cluster(cluster)).scaling or ()


def test_the_curve_is_what_simulate_says() -> None:
    plan = optimize(usual_profile())
    points = plan.scaling or ()
    assert [point.ranks for point in points] == [1, 2, 4, 8, 16, 32, 64]
    for point in points:
        results = simulate(usual_profile(), strategies=("optimal", *BASELINES), ranks=[point.ranks])
        assert {result.strategy: result.iteration_us for result in results} == pytest.approx(dict(point.iteration_us))
        assert point.basis == ("measured" if point.ranks == 4 else "extrapolated")
        assert point.source == results[0].cost_source
    assert plan.predicted is not None
    assert points[2].iteration_us["optimal"] == plan.predicted.iteration_us


@pytest.mark.parametrize(
    ("cluster", "ranks"),
    [
        (cluster_document(None, nodes=3, inter=LINK), [1, 2, 3, 4, 8, 16, 32, 64]),
        (cluster_document(None, nodes=2, ranks_per_node=6, intra=LINK, inter=LINK), [1, 2, 4, 6, 12, 24, 48, 96, 192]),
        (cluster_document(None, nodes=2, ranks_per_node=4, inter=LINK), [1, 8, 16, 32, 64, 128]),
        (cluster_document(None, nodes=1), None),
    ],
    ids=["three nodes", "six a node", "no cost inside a node", "no cost at all"],
)
def test_ranks_that_the_cluster_allows(cluster: dict[str, Any], ranks: list[int] | None) -> None:
    """Powers of two of ranks in a node and of nodes, where there are costs for them; always the plan's own number."""
    points = curve(cluster)
    assert [point.ranks for point in points] == (ranks or [1])
    assert {point.basis for point in points} == {"formula"}


def test_largest_clusters() -> None:
    points = curve(cluster_document(None, nodes=16384, inter=LINK))
    assert [point.ranks for point in points] == [2**exponent for exponent in range(15)]


def test_large_problems_get_fewer_points() -> None:
    """The plan's own always; so deciding stays quick."""
    rng = np.random.default_rng(0)
    counts = {}
    for count in (100, 10_000, 20_000):
        problem = random_problem(rng, count, "line")
        here = dict.fromkeys(("optimal", *BASELINES), 1.0)
        ranks = [point.ranks for point in scaling_curve(problem, here)]
        assert problem.ranks in ranks
        counts[count] = len(ranks)
    assert counts == {100: 7, 10_000: 4, 20_000: 2}


def test_sources_name_samples_and_contention() -> None:
    samples = [[1024, 100.0], [1048576, 900.0]]
    problem = make(usual_document(), cluster_document(None, samples, (1.07, 1.12), name="lab", inter=LINK))
    words = describe_sources(problem)
    assert set(words) == {"model", "tensors", "cluster", "compute", "communication", "planner"}
    assert words["cluster"] == "lab: 4 nodes × 1 rank; between nodes 5 µs start-up and 1 GB/s"
    assert words["communication"] == (
        "all-reduce on 4 ranks: 2 measured samples, messages of 1,024 to 1,048,576 bytes; while both are busy, compute "
        "takes 1.07 × and the network 1.12 × as long"
    )
    assert words["compute"] == "profile of 4 ranks, without a date"


def test_sources_say_what_documents_say_of_themselves() -> None:
    document = usual_document() | {"source": "a paper", "notes": ["forward is half of backward", "no update"]}
    document["world"] |= {"device": "cuda", "accelerator": "Tesla V100", "batch_per_rank": 32}
    words = describe_sources(make(document, cluster_document(name="lab", notes=["ring"], source="another", inter=LINK)))
    assert words["compute"] == (
        "profile of 4 ranks (Tesla V100, batch of 32 a rank), without a date; source: a paper; "
        "note: forward is half of backward; note: no update"
    )
    assert words["cluster"].endswith("; source: another; note: ring")
    assert first_part_with_source(words["cluster"]) == "lab: 4 nodes × 1 rank; source: another"
    assert [first_part(words[name]) for name in ("cluster", "compute")] == [
        "lab: 4 nodes × 1 rank",
        "profile of 4 ranks (Tesla V100, batch of 32 a rank), without a date",
    ]


def test_three_digits_are_never_an_exponent_where_people_look() -> None:
    values = [0.0, 0.02875, 0.6, 12.34, 999.4, 999.6, 1459.2, 1234567.8]
    texts = ["0", "0.0288", "0.6", "12.3", "999", "1,000", "1,459", "1,234,568"]
    assert [format_significant(value) for value in values] == texts
