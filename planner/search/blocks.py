"""Blocks of LPP-SGD: contiguous runs of layers, one for each local updater, whose partial backwards cost least in sum.

A partial backward brings gradients of inputs from the loss down to its block, and forms gradients of weights inside it.
Updaters have no barrier, so the sum of what they spend counts, not the longest. Where nothing else is asked, all blocks
but the last would be as small as can be; so each has to hold a share of what all gradients of weights cost.

With prefix sums the cost of the block [i, j) is input(j) + weight(j) − weight(i): what depends on i and what depends
on j add up. So the best beginning of a block that ends at j is a running minimum over those that leave it large enough,
and an exact program over (blocks, layers) is linear in both. Costs are counted in 2⁻⁴⁰ of all backward, as integers:
sums are exact, and of equal answers the one is taken whose last boundary is earliest, then the one before it, and so
on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.ir import TIE
from planner.model.modes.local_updaters import BlockProblem, updaters_per_block

TICKS = 2**40
"""Ticks of all backward; the largest sum is some thousands of times that."""
NONE = np.int64(2**62)


def best_blocks(problem: BlockProblem, updaters: int) -> tuple[int, ...]:
    """Return the ends of blocks, in layers: one block for each updater, or as many as are possible.

    With fewer blocks than updaters, the first ones have an updater more than the last ones, and count as often.

    Args:
        problem: what backward spends.
        updaters: U; each block holds at least 1/(2U) of what all gradients of weights cost.

    Returns:
        The stops of the blocks, the last one the number of layers. Their number is the largest for which blocks can be
        so large; their costs, each as often as it has updaters, have the least sum.
    """
    whole_us = problem.full_us
    scale = TICKS / whole_us if whole_us > 0.0 else 0.0
    input_ticks = np.rint(np.asarray(problem.input_us) * scale).astype(np.int64)
    weight = np.concatenate([[0], np.cumsum(np.rint(np.asarray(problem.weight_us) * scale).astype(np.int64))])
    latest = _latest_starts(np.concatenate([[0.0], np.cumsum(problem.weight_us)]), updaters)
    return _solve(input_ticks, weight, latest, updaters_per_block(updaters, _most_blocks(latest, updaters)))


def _latest_starts(weight: NDArray[np.float64], updaters: int) -> NDArray[np.int64]:
    """Return for each end the last start that leaves a block large enough and not empty; -1: none. Shape (L + 1,).

    A block that holds exactly its share is large enough, however sums are rounded.
    """
    most = weight - weight[-1] * (1.0 / (2 * updaters) - TIE)
    latest = np.searchsorted(weight, most, side="right") - 1
    starts: NDArray[np.int64] = np.minimum(latest, np.arange(len(weight)) - 1)
    return starts


def _most_blocks(latest: NDArray[np.int64], updaters: int) -> int:
    """Return the largest number of blocks, each as small as it may be."""
    blocks, start, layers = 0, 0, len(latest) - 1
    while blocks < updaters:
        start = int(np.searchsorted(latest, start))  # `latest` grows: the first end that leaves enough behind `start`
        if start > layers:
            break
        blocks += 1
    return max(1, blocks)


def _solve(
    input_ticks: NDArray[np.int64], weight: NDArray[np.int64], latest: NDArray[np.int64], counts: Sequence[int]
) -> tuple[int, ...]:
    """Return the stops of blocks with these numbers of updaters."""
    layers = len(input_ticks)
    best = np.full(layers + 1, NONE)
    best[0] = 0
    end = np.concatenate([[0], input_ticks]) + weight
    starts: list[NDArray[np.int64]] = []
    for count in counts:
        lowest = np.minimum.accumulate(np.where(best < NONE, best - count * weight, NONE))
        improves = np.concatenate([[True], lowest[1:] < lowest[:-1]])
        first = np.maximum.accumulate(np.where(improves, np.arange(layers + 1), 0))
        possible = (latest >= 0) & (lowest[latest] < NONE)
        starts.append(np.where(possible, first[latest], -1))
        best = np.where(possible, lowest[latest] + count * end, NONE)
    stops = [layers]
    for begins in reversed(starts[1:]):
        stops.append(int(begins[stops[-1]]))
    return tuple(reversed(stops))
