"""Every model of the zoo is profiled, gets a plan and trains with it; nearly all come through a graph."""

from __future__ import annotations

import math

import pytest

from planner.jobs.launch import LocalWorld, run_ranks

from . import walk as walking
from .registry import ZOO
from .walk import LEAST_GRAPHS, Visit


@pytest.fixture(scope="module", params=[6, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
def pair(request: pytest.FixtureRequest) -> list[list[Visit]]:
    """What both ranks of two found of every sixth model, and of all."""
    return run_ranks(LocalWorld(ranks=2), walking.walk, list(ZOO)[:: request.param], True)


def test_the_zoo_is_varied() -> None:
    assert len(ZOO) >= 30
    assert len({member.family for member in ZOO.values()}) >= 15
    assert sum(member.data_dependent for member in ZOO.values()) >= 3
    assert {member.factory.__module__.partition(".foreign")[1] for member in ZOO.values()} == {"", ".foreign"}


def test_every_model_gets_a_plan_and_trains(pair: list[list[Visit]]) -> None:
    assert len(pair[0]) >= 12
    assert {visit.name: visit.error for visits in pair for visit in visits if visit.error} == {}
    assert [visit.name for visit in pair[0] if not visit.buckets or not math.isfinite(visit.loss)] == []


def test_nearly_every_model_comes_through_a_graph(pair: list[list[Visit]]) -> None:
    without = {visit.name: visit.failures for visit in pair[0] if not visit.graph}
    assert len(without) <= (1 - LEAST_GRAPHS) * len(pair[0]), without
    assert all(ZOO[name].data_dependent for name in without), without


def test_a_graph_of_one_path_is_told_from_one_of_all(pair: list[list[Visit]]) -> None:
    """What depends on data has no graph of all paths."""
    visits = {visit.name: visit for visit in pair[0]}
    free = [name for name in visits if ZOO[name].data_dependent]
    assert free
    assert [name for name in free if visits[name].graph and not visits[name].one_path] == []


def test_ranks_agree(pair: list[list[Visit]]) -> None:
    """On the method, and on the weights after a step with different batches."""
    first, second = ([(v.name, v.method, v.weights_sha256) for v in visits] for visits in pair)
    assert first == second


def test_gradients_belong_to_layers_that_ran(pair: list[list[Visit]]) -> None:
    """But for layers that other batches use: the forward of one batch is traced, gradients are measured with four."""
    steady = [visit for visit in pair[0] if not ZOO[visit.name].data_dependent and not visit.one_path]
    found = {visit.name: visit.attributed / visit.gradients for visit in steady}
    assert [(name, share) for name, share in found.items() if share < 0.95] == []
