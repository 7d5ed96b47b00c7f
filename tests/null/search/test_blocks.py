"""Blocks of local updaters against trying every way to cut the layers."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.model.modes.local_updaters import BlockProblem, updaters_per_block
from planner.search.blocks import best_blocks


def all_cuts(layers: int, blocks: int) -> list[tuple[int, ...]]:
    return [(*cut, layers) for cut in combinations(range(1, layers), blocks - 1)]


def total_us(problem: BlockProblem, stops: tuple[int, ...], updaters: int) -> float:
    """What all updaters spend in one partial backward each; updater i has block i modulo the number of blocks."""
    spent_us = [problem.cost_us(start, stop) for start, stop in zip((0, *stops), stops, strict=False)]
    return sum(spent_us[updater % len(stops)] for updater in range(updaters))


def large_enough(problem: BlockProblem, stops: tuple[int, ...], updaters: int) -> bool:
    least = sum(problem.weight_us) / (2 * updaters)
    return all(sum(problem.weight_us[a:b]) >= least for a, b in zip((0, *stops), stops, strict=False))


def by_trying_all(problem: BlockProblem, updaters: int) -> tuple[int, float]:
    """(number of blocks, least sum)."""
    layers = len(problem.weight_us)
    for blocks in range(min(updaters, layers), 1, -1):
        allowed = [cut for cut in all_cuts(layers, blocks) if large_enough(problem, cut, updaters)]
        if allowed:
            return blocks, min(total_us(problem, cut, updaters) for cut in allowed)
    return 1, updaters * problem.full_us


def made(inputs: list[int], weights: list[int]) -> BlockProblem:
    """Whole numbers, of which sums are exact."""
    return BlockProblem(input_us=np.cumsum(inputs).tolist(), weight_us=weights)


def check(problem: BlockProblem, updaters: int) -> None:
    stops = best_blocks(problem, updaters)
    blocks, least_us = by_trying_all(problem, updaters)
    assert len(stops) == blocks
    assert list(stops) == sorted(set(stops))
    assert stops[-1] == len(problem.weight_us)
    assert blocks == 1 or large_enough(problem, stops, updaters)
    assert total_us(problem, stops, updaters) == pytest.approx(least_us, rel=1e-9)


@pytest.mark.parametrize(
    ("inputs", "weights"), [([13, 13, 3, 1], [2, 2, 3, 11]), ([3, 2, 2], [1, 0, 5]), ([1, 3, 2], [2, 3, 1])]
)
def test_blocks_of_exactly_the_least_share(inputs: list[int], weights: list[int]) -> None:
    check(made(inputs, weights), 3)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9),
    st.integers(1, 6),
)
def test_small_problems_with_ties(rows: list[tuple[int, int]], updaters: int) -> None:
    check(made([row[0] for row in rows], [row[1] for row in rows]), updaters)


@pytest.mark.parametrize("seed", range(6))
def test_twenty_layers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 1000, (2, 20)).tolist()
    for updaters in (2, 3, 4, 5):
        check(made(rows[0], rows[1]), updaters)


def test_by_hand() -> None:
    """Ten layers of equal cost: the first block is no larger than it has to be, for the second one costs all anyway."""
    problem = made([0, *[1] * 9], [1] * 10)
    assert best_blocks(problem, 2) == (3, 10)  # at least a quarter of ten: 5 + 16 in all
    assert total_us(problem, (3, 10), 2) == 5 + 16
    assert best_blocks(problem, 1) == (10,)


def test_of_equal_answers_the_last_boundary_is_earliest() -> None:
    """Layers that cost nothing may go to either block."""
    assert best_blocks(made([0, 0, 0, 0], [4, 0, 0, 4]), 2) == (1, 4)


def test_one_layer_that_holds_nearly_all() -> None:
    """The others cannot make a block of their own that is large enough: updaters share the only one."""
    assert best_blocks(made([0, 1, 1], [1, 98, 1]), 4) == (3,)
    assert best_blocks(made([0, 1, 1], [1, 50, 49]), 4) == (2, 3)
    assert best_blocks(made([1], [0]), 3) == (1,)
    assert best_blocks(made([0, 0], [0, 0]), 2) == (1, 2)


def test_updaters_of_shared_blocks_count_as_often() -> None:
    assert updaters_per_block(5, 2) == [3, 2]
    assert updaters_per_block(4, 4) == [1, 1, 1, 1]
    assert [sum(updaters_per_block(updaters, blocks)) for updaters, blocks in ((7, 3), (9, 1), (3, 3))] == [7, 9, 3]


def test_ten_thousand_layers() -> None:
    """Of which there are more ways to cut sixteen blocks than could be tried."""
    rng = np.random.default_rng(1)
    problem = made(rng.integers(0, 100, 10_000).tolist(), rng.integers(0, 100, 10_000).tolist())
    stops = best_blocks(problem, 16)
    assert len(stops) == 16
    assert large_enough(problem, stops, 16)
    even = tuple(range(625, 10_001, 625))
    assert total_us(problem, stops, 16) < total_us(problem, even, 16)
