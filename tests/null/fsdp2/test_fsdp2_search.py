"""Wrappings for FSDP2: as good as trying all of them, within limits, and never below the bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from fsdp2_cases import chain_of, even, fixed_costs, lines, shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.fsdp2.program import Shape
from planner.fsdp2.search import Choice, Wrappings, groupable_units, least_memory, lower_bound_us, search
from planner.fsdp2.simulator import Costs, Executor


def every_choice(wrappings: Wrappings) -> Iterator[Choice]:
    """All of the class, seen one by one."""
    for starts in wrappings.partitions():
        for ways in product("fkp" if wrappings.node_ranks else "fk", repeat=len(starts)):
            kept, parted = (frozenset(at for at, way in enumerate(ways) if way == one) for one in "kp")
            for ahead in wrappings.aheads:
                yield Choice(starts, kept, ahead, parted)


def best_of_all(wrappings: Wrappings, limit_bytes: float) -> float | None:
    points = map(wrappings.point, every_choice(wrappings))
    return min((point.iteration_us for point in points if point.peak_bytes <= limit_bytes), default=None)


def compare(shape: Shape, costs: Costs, executor: Executor, share: float, node_ranks: int | None = None) -> None:
    """The search beside all wrappings, at a limit between the least and the most that they take."""

    def made() -> Wrappings:
        return Wrappings(shape, costs, executor, node_ranks=node_ranks)

    every = made()
    peaks = [every.point(choice).peak_bytes for choice in every_choice(every)]
    limit = int(min(peaks) + share * (max(peaks) - min(peaks)))
    found = search(made(), limit)
    best_us = best_of_all(every, limit)
    assert found is not None
    assert best_us is not None
    assert found.step.iteration_us == pytest.approx(best_us, rel=1e-8)
    assert found.step.peak_bytes <= limit
    assert found.exact
    assert lower_bound_us(every) <= min(every.point(choice).iteration_us for choice in every_choice(every)) + 1e-6
    assert search(made(), min(peaks) - 1) is None
    assert least_memory(every)[1].peak_bytes <= min(peaks)
    again = search(made(), limit)
    assert again == found


@given(shapes(most=4), lines(), st.sampled_from(["accelerator", "hosts"]), st.floats(0.0, 1.0))
@settings(max_examples=30)
def test_as_good_as_trying_all(shape: Shape, costs: Costs, executor: Executor, share: float) -> None:
    compare(shape, costs, executor, share)


@given(shapes(most=3), lines(), st.floats(0.05, 0.9), st.floats(0.0, 1.0))
@settings(max_examples=20)
def test_as_good_as_trying_all_where_nodes_may_keep_parts(
    shape: Shape, costs: Costs, inside: float, share: float
) -> None:
    """Of four or eight ranks two share a node."""
    shape = replace(shape, ranks=max(4, shape.ranks))
    nearer = replace(costs, gather_inside_us=lambda size: inside * costs.gather_us(size))
    compare(shape, nearer, "accelerator", share, node_ranks=2)


@pytest.mark.long
@pytest.mark.parametrize("executor", ["accelerator", "hosts"])
def test_as_good_as_trying_all_of_eight_units(executor: Executor) -> None:
    rows = [300, 4000, 500, 4000, 100, 2500, 800, 3000]
    times = [30.0, 120.0, 50.0, 90.0, 10.0, 80.0, 45.0, 100.0]
    shape = chain_of(rows, times, [2 * time for time in times], [900 * (1 + index % 3) for index in range(8)])
    costs = replace(
        fixed_costs(0.0, 0.0), gather_us=lambda size: 15 + 0.008 * size, scatter_us=lambda size: 25 + 0.01 * size
    )
    compare(shape, costs, executor, 0.4)


@given(shapes(most=6), lines(), st.sampled_from(["accelerator", "hosts"]), st.sampled_from([None, 0.3]))
@settings(max_examples=25)
def test_the_search_for_many_units_is_close(
    shape: Shape, costs: Costs, executor: Executor, share: float | None
) -> None:
    """What is searched where there are too many units to decide on all, on models small enough to know better."""
    exact = search(Wrappings(shape, costs, executor))
    assert exact is not None
    least = least_memory(Wrappings(shape, costs, executor))[1].peak_bytes
    limit = None if share is None else int(least + share * (exact.step.peak_bytes - least))
    exact = search(Wrappings(shape, costs, executor), limit)
    found = search(Wrappings(shape, costs, executor), limit, exact_units=0)
    if exact is None:
        assert found is None
        return
    assert found is not None
    assert exact.step.iteration_us - 1e-6 <= found.step.iteration_us <= 1.03 * exact.step.iteration_us + 1e-6
    assert found.bound_us <= exact.step.iteration_us + 1e-6


def test_with_costly_starts_groups_are_merged_and_with_none_they_are_not() -> None:
    dear = search(Wrappings(even(5), fixed_costs(500.0, 500.0), "accelerator"))
    assert dear is not None
    assert len(dear.plan.groups) == 1
    costs = replace(fixed_costs(0.0, 0.0), gather_us=lambda size: 0.1 * size, scatter_us=lambda size: 0.1 * size)
    free = search(Wrappings(even(5), costs, "accelerator"))
    assert free is not None
    assert len(free.plan.groups) == 5


def test_tied_units_are_the_roots() -> None:
    shape = even(4)
    weights = shape.units.weights
    tied = replace(shape, units=replace(shape.units, weights=(*weights, replace(weights[0], modules=("u0", "u3")))))
    assert groupable_units(tied) == ("u1", "u2")
    found = search(Wrappings(tied, fixed_costs(10.0, 10.0), "hosts"))
    assert found is not None
    assert {module for group in found.plan.groups for module in group} == {"u1", "u2"}
