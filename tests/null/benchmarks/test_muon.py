"""The random cases of the benchmark of Muon's owners."""

from __future__ import annotations

import pytest

from benchmarks.muon import random_problem
from planner.model.operator_costs import operator_costs


@pytest.mark.parametrize("seed", range(8))
def test_random_cases_have_as_many_operators_as_asked_for(seed: int) -> None:
    costs = operator_costs(random_problem(seed, matrices=5, ranks=3))
    assert costs is not None
    assert (costs.count, costs.ranks) == (5, 3)
