"""Costs of a sharded step in which whole parameters have owners, as matrix optimizers (Muon, SOAP, Shampoo) need it.

A message's reduce-scatter and all-gather take as long as if every rank had as much of it as the one that has most. The
update ends with the rank that has most work. What each parameter's work takes is measured where the optimizer has an
operator without state; else the measured update is divided by elements times rows and columns, as products of matrices
take them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from planner.documents.text import ms, pluralize
from planner.model.operator_costs import operator_costs
from planner.model.problem import Curve, Problem
from runtime.plan.lpt import loads_of

Owners = Sequence[int] | None
"""The rank that updates each gradient's parameter, −1: equal parts of all ranks; None: −1 for all."""


def whole_gradients(problem: Problem) -> tuple[int, ...]:
    """Return the gradients whose parameters the optimizer updates whole; none of an elementwise one."""
    optimizer = problem.profile.compute.optimizer
    names = set((optimizer.matrices or ()) if optimizer is not None else ())
    return tuple(index for index, one in enumerate(problem.profile.compute.gradients) if one.name in names)


def work_us(problem: Problem) -> list[float]:
    """Return the time of each gradient's update, together the measured one; computed once for each problem."""
    known: Any = vars(problem)
    if "_work_us" not in known:
        known["_work_us"] = _work_us(problem)
    found: list[float] = known["_work_us"]
    return found


def _work_us(problem: Problem) -> list[float]:
    gradients, costs = problem.profile.compute.gradients, operator_costs(problem)
    if costs is None:
        parts = np.array([float(one.numel * (sum(one.matrix) if one.matrix else 1)) for one in gradients])
        divided: list[float] = (parts * (problem.update_us / max(1.0, float(parts.sum())))).tolist()
        return divided
    operators = dict(zip(costs.names, costs.operator_us, strict=True))
    rest_us = max(0.0, problem.update_us - costs.replicated_us) / max(1, int(problem.size_bytes.sum()))
    return [operators.get(one.name, 0.0) + rest_us * one.size_bytes for one in gradients]


def loads_us(problem: Problem, owners: Sequence[int]) -> list[float]:
    """Return the time of each rank's update."""
    times_us = work_us(problem)
    even_us = sum(time_us for time_us, owner in zip(times_us, owners, strict=True) if owner < 0) / problem.ranks
    owned = [(time_us, owner) for time_us, owner in zip(times_us, owners, strict=True) if owner >= 0]
    loads = loads_of([time_us for time_us, _ in owned], [owner for _, owner in owned], problem.ranks)
    return [even_us + load for load in loads]


def longest_us(problem: Problem) -> list[float]:
    """Return the longest update of one whole parameter, which no number of ranks makes shorter; empty without any."""
    times_us = work_us(problem)
    return sorted(times_us[gradient] for gradient in whole_gradients(problem))[-1:]


def message_sizes(problem: Problem, buckets: Sequence[Sequence[int]], owners: Owners) -> list[list[float]]:
    """Return, for each bucket, the bytes of its messages: as many from each rank as from the one that has most."""
    if owners is None:
        return [[float(size)] for size in problem.bucket_bytes(buckets)]
    found, sizes = [], problem.size_bytes.tolist()
    for gradients in buckets:
        own: dict[int, list[float]] = {}
        even: dict[int, float] = {}
        for gradient in gradients:
            dtype, owner = int(problem.dtype_ids[gradient]), owners[gradient]
            if owner < 0:
                even[dtype] = even.get(dtype, 0.0) + sizes[gradient]
            else:
                own.setdefault(dtype, [0.0] * problem.ranks)[owner] += sizes[gradient]
        found.append([*even.values(), *(problem.ranks * max(loads) for loads in own.values())])
    return found


def costs_us(problem: Problem, buckets: Sequence[Sequence[int]], owners: Owners, curve: Curve) -> list[float]:
    """Return the time of each bucket's messages, by a curve of time over bytes."""
    if owners is None:
        return problem.bucket_cost_us(buckets, curve)
    sizes = message_sizes(problem, buckets, owners)
    times_us = iter(curve(np.array([size for of in sizes for size in of], dtype=np.float64)).tolist())
    return [sum(next(times_us) for _ in of) for of in sizes]


def largest_share(problem: Problem, owners: Sequence[int]) -> float:
    """Return the largest part of all elements, and so about of the optimizer's state, that one rank has."""
    sizes: list[float] = problem.size_bytes.tolist()
    own = [(size, owner) for size, owner in zip(sizes, owners, strict=True) if owner >= 0]
    loads = loads_of([size for size, _ in own], [owner for _, owner in own], problem.ranks)
    return (max(loads) + (sum(sizes) - sum(loads)) / problem.ranks) / max(1.0, sum(sizes))


def notes(problem: Problem, owners: Mapping[str, int]) -> list[str]:
    """Return what owners do, for readers of a plan; nothing where there are none."""
    if not owners:
        return []
    ranks_of = [owners.get(one.name, -1) for one in problem.profile.compute.gradients]
    loads = loads_us(problem, ranks_of)
    least_us = max([sum(loads) / len(loads), *longest_us(problem)])
    guessed = "" if operator_costs(problem) else ", divided by shapes, for single ones were not timed"
    return [
        f"each of {pluralize(len(owners), 'whole parameter')} is updated by its owner, which alone has its state: the "
        f"longest share takes {ms(max(loads))} of {ms(problem.update_us)}, at least {ms(least_us)}{guessed}"
    ]
