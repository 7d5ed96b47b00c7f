"""What the halves of an all-reduce cost: reduce-scatter and all-gather."""

from __future__ import annotations

from typing import Any

import pytest
from builders import cluster_document, line_problem, make, profile_document

from planner.cost.collectives import collective_cost
from planner.cost.model import communication_cost
from planner.documents.profile import Link
from planner.model.problem import Problem


def halves(**cluster: Any) -> tuple[float, float, str, str]:
    """Push and pull of 1000 bytes on 4 ranks, and where they come from."""
    problem = make(profile_document([(250, 1.0)]), cluster_document((100.0, 0.1), **cluster))
    assert problem.push.implied == ("half" in problem.push.source)
    return problem.push.curve.at(1000.0), problem.pull.curve.at(1000.0), problem.push.source, problem.pull.source


def test_the_most_specific_cost_of_a_half_counts() -> None:
    half = "half of the all-reduce"
    assert halves() == (100.0, 100.0, half, half)
    line = {"alpha_us": 8.0, "beta_us_per_byte": 0.01, "gamma_us_per_byte": 0.1}
    by_link = "reduce_scatter/ring with link constants", "all_gather/ring with link constants"
    assert halves(inter=line) == (pytest.approx(24 + 7.5 + 75.0), pytest.approx(24 + 7.5), *by_link)
    measured = {"reduce_scatter": [[500, 10.0], [1500, 30.0]], "inter/all_gather": [[1000, 7.0]]}
    document = cluster_document((100.0, 0.1), inter=line) | {"samples": measured}
    problem = make(profile_document([(250, 1.0)]), document)
    assert (problem.push.curve.at(1000.0), problem.pull.curve.at(1000.0)) == (20.0, 7.0)
    document["collectives"] |= {"all_gather": {"alpha_us": 1.0, "beta_us_per_byte": 0.001}}
    del document["samples"]["inter/all_gather"]
    assert make(profile_document([(250, 1.0)]), document).pull.curve.at(1000.0) == pytest.approx(2.0)


def test_half_of_measured_samples_and_nothing_on_one_rank() -> None:
    samples = [[100, 50.0], [200, 40.0], [400, 90.0]]
    problem = make(profile_document([(25, 1.0)]), cluster_document(None, samples))
    for size in (0.0, 150.0, 200.0, 1000.0):
        assert problem.push.curve.at(size) == pytest.approx(problem.cost.all_reduce.at(size) / 2)
    alone = make(profile_document([(25, 1.0)]), cluster_document(None, samples, nodes=1))
    assert (alone.push.curve.at(100.0), alone.push.implied) == (0.0, False)


def test_another_number_of_ranks_has_its_own_halves() -> None:
    """By the link that the measured all-reduce implies: half of a ring's all-reduce is its reduce-scatter."""
    problem = line_problem([(250, 1.0)], 60.0, 0.01)
    there = Problem(profile=problem.profile, cost=communication_cost(problem.cost.cluster, 8))
    link = Link(alpha_us=10.0, beta_us_per_byte=0.01 * 4 / 6)
    cost = collective_cost("reduce_scatter/ring", 8, link)
    assert there.push.curve.at(1000.0) == pytest.approx(cost.start_up_us + 1000.0 * cost.per_byte_us)
