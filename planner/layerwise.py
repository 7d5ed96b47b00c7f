"""Eq. 19 of LAGS-SGD (Shi et al., ECAI 2020): of each layer, as little compression as hides.

A layer's message has to hide behind the backward of the layer that comes next, selection included; the last layer in
backward has nothing to hide behind. A layer whose dense all-reduce hides stays dense. Otherwise the most elements whose
gather hides are sent, but never fewer than 1/c_u of them.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from planner.ir import Bucket, Schedule
from planner.problem import Problem
from planner.selection import sparse_bucket


def layer_wise(problem: Problem, limits: NDArray[np.float64], *, by_layer: bool = False) -> Schedule:
    """Every layer by Eq. 19.

    Args:
        problem: the step.
        limits: c_u of each gradient. Gradients with 1, and those without elements, stay dense in buckets of their own,
            and the rest of their layer has the less to hide behind.
        by_layer: whether each k is told by the layers that gradients' names tell, as plans need it.
    """
    runs = problem.layer_runs
    budgets_us = [_backward_us(problem, run) for run in runs[1:]] + [0.0]
    buckets = [
        bucket
        for run, budget_us in zip(runs, budgets_us, strict=True)
        for bucket in _layer(problem, run, budget_us, limits, by_layer)
    ]
    return Schedule(buckets=tuple(buckets))


def _backward_us(problem: Problem, run: tuple[int, int]) -> float:
    gradients = problem.profile.compute.gradients[slice(*run)]
    return math.fsum(gradient.backward_us for gradient in gradients)


def _layer(
    problem: Problem, run: tuple[int, int], budget_us: float, limits: NDArray[np.float64], by_layer: bool
) -> list[Bucket]:
    """The buckets of one layer, with `budget_us` to hide behind: one, where all of it has one limit."""
    if int(problem.numel[slice(*run)].sum()) == 0 or float(problem.range_cost_us(*run)) <= budget_us:
        return [Bucket(gradients=tuple(range(*run)))]
    if not by_layer:
        return [_sparse(tuple(range(*run)), _count(problem, run, budget_us, float(limits[run[0]])))]
    pieces = _pieces(problem, run, limits)
    dense = [piece for piece, limit in pieces if limit == 1.0]
    left_us = budget_us - sum(float(problem.range_cost_us(*piece)) for piece in dense)
    buckets = []
    for piece, limit in pieces:
        members = tuple(range(*piece))
        if limit == 1.0:
            buckets.append(Bucket(gradients=members))
            continue
        elements = problem.layer_elements(Bucket(gradients=members))
        k = _count(problem, piece, left_us, limit)
        bucket = sparse_bucket(members, apportion(k, elements, limit))
        left_us -= _sent_us(problem, bucket)
        buckets.append(bucket)
    return buckets


def _pieces(problem: Problem, run: tuple[int, int], limits: NDArray[np.float64]) -> list[tuple[tuple[int, int], float]]:
    """A layer cut where limits change."""
    pieces: list[tuple[tuple[int, int], float]] = []
    for index in range(*run):
        limit = float(limits[index]) if problem.numel[index] else 1.0
        if pieces and pieces[-1][1] == limit:
            pieces[-1] = ((pieces[-1][0][0], index + 1), limit)
        else:
            pieces.append(((index, index + 1), limit))
    return pieces


def apportion(k: int, elements: list[int], limit: float) -> list[int]:
    """k shared by the elements of runs, none with fewer than its limit asks for; in all k, or what the limits need."""
    total, shares, before = sum(elements), [], 0
    for numel in elements:
        after = before + numel
        shares.append(max(math.ceil(numel / limit), k * after // total - k * before // total))
        before = after
    return shares


def _count(problem: Problem, piece: tuple[int, int], budget_us: float, limit: float) -> int:
    """Eq. 19's k of a piece that does not hide dense."""
    numel = int(problem.numel[slice(*piece)].sum())
    return max(math.ceil(numel / limit), _most_that_hide(problem, tuple(range(*piece)), numel, budget_us))


def _sparse(members: tuple[int, ...], k: int) -> Bucket:
    return Bucket(gradients=members, collective="sparse", algorithm="flat", compressor="topk", k=k)


def _sent_us(problem: Problem, bucket: Bucket) -> float:
    """Time on the network, selection and unpacking."""
    spent_us = sum(problem.selection_us(bucket, field) for field in ("sparsify", "unpack"))
    return spent_us + sum(time_us for _, _, time_us in problem.phase_times(bucket))


def _most_that_hide(problem: Problem, members: tuple[int, ...], numel: int, budget_us: float) -> int:
    """The largest k whose gather and selection fit into the budget; 0 if none does."""

    def fits(k: int) -> bool:
        return _sent_us(problem, _sparse(members, k)) <= budget_us

    low, high = 0, numel
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
