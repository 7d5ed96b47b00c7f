"""Costs of a sharded step in which whole parameters have owners, as matrix optimizers (Muon, SOAP, Shampoo) need it.

A message takes as long as if every rank had as much of it as the one that has most, or, where nodes have several ranks,
as the cards of the node that has most of it need. The update ends with the rank that has most work. What each
parameter's work takes is measured where the optimizer has an operator without state; else the measured update is
divided by elements, of whole matrices times rows and columns, as their products take them. Where every rank applies the
operator's results itself, these are gathered, and the rest is every rank's own, counted in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

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
    """Return the time of each gradient's update on its owner; computed once for each problem."""
    return _divided(problem)[0]


@lru_cache(maxsize=16)
def applied_bytes(problem: Problem) -> dict[str, int]:
    """Return the bytes of each update that is gathered in place of weights, by gradient."""
    profile, costs = problem.profile.compute.operator, operator_costs(problem)
    named = zip(costs.names, costs.result_bytes, strict=True) if costs and profile and profile.applied else ()
    sizes = {gradient.name: gradient.size_bytes for gradient in problem.profile.compute.gradients}
    return {name: size for name, size in named if size < sizes[name]}


@lru_cache(maxsize=16)
def _divided(problem: Problem, updates: bool = True) -> tuple[list[float], float]:
    """Return the time of each gradient's update on its owner, and of every rank's to apply `updates`, if it does."""
    gradients, costs = problem.profile.compute.gradients, operator_costs(problem)
    if costs is None:
        whole = set(whole_gradients(problem))
        factors = [sum(one.matrix) if one.matrix and index in whole else 1 for index, one in enumerate(gradients)]
        parts = np.array([float(one.numel * factor) for one, factor in zip(gradients, factors, strict=True)])
        divided: list[float] = (parts * (problem.update_us / max(1.0, float(parts.sum())))).tolist()
        return divided, 0.0
    applied = applied_bytes(problem) if updates else {}
    operators = dict(zip(costs.names, costs.operator_us, strict=True))
    rest_us = max(0.0, problem.update_us - costs.replicated_us) / max(1, int(problem.size_bytes.sum()))
    own_us = [
        operators.get(one.name, 0.0) + (0.0 if one.name in applied else rest_us * one.size_bytes) for one in gradients
    ]
    return own_us, sum(rest_us * one.size_bytes for one in gradients if one.name in applied)


def loads_us(problem: Problem, owners: Sequence[int], *, updates: bool = True) -> list[float]:
    """Return the time of each rank's update; `updates`: those in 16 bits are gathered, and applied by every rank."""
    times_us, applied_us = _divided(problem, updates)
    even_us = sum(time_us for time_us, owner in zip(times_us, owners, strict=True) if owner < 0) / problem.ranks
    return [applied_us + even_us + load for load in loads_of(times_us, owners, problem.ranks)]


def longest_us(problem: Problem) -> list[float]:
    """Return the longest update of one whole parameter, which no number of ranks makes shorter; empty without any."""
    times_us = work_us(problem)
    return sorted(times_us[gradient] for gradient in whole_gradients(problem))[-1:]


def message_sizes(
    problem: Problem, buckets: Sequence[Sequence[int]], owners: Owners, *, updates: bool = False,
    length: Callable[[Problem, Sequence[float]], float] | None = None,
) -> list[list[float]]:  # fmt: skip
    """Return, for each bucket, the bytes of its messages: as many from each rank as from the one that has most.

    Args:
        problem: the step.
        buckets: gradients of each.
        owners: of each gradient.
        updates: whether these are gathers that bring updates in place of weights where ranks apply them.
        length: bytes of a message in equal parts in place of one of these bytes of the ranks.
    """
    if owners is None:
        return [[float(size)] for size in problem.bucket_bytes(buckets)]
    found, sizes = [], problem.size_bytes.tolist()
    if updates and (applied := applied_bytes(problem)):
        names = (gradient.name for gradient in problem.profile.compute.gradients)
        sizes = [applied.get(name, size) for name, size in zip(names, sizes, strict=True)]
    for gradients in buckets:
        own: dict[int, list[float]] = {}
        even: dict[int, float] = {}
        for gradient in gradients:
            dtype, owner = int(problem.dtype_ids[gradient]), owners[gradient]
            if owner < 0:
                even[dtype] = even.get(dtype, 0.0) + sizes[gradient]
            else:
                own.setdefault(dtype, [0.0] * problem.ranks)[owner] += sizes[gradient]
        parts = own.values()
        padded = (problem.ranks * max(loads) if length is None else length(problem, loads) for loads in parts)
        found.append([*even.values(), *padded])
    return found


def scattered_bytes(problem: Problem, loads: Sequence[float]) -> float:
    """Return the bytes of a reduce-scatter in equal parts that takes as long as one in which ranks get these bytes."""
    cluster = problem.cost.cluster
    inside = cluster.ranks_per_node
    if 1 in (inside, cluster.nodes):
        return problem.ranks * max(loads)
    # Links between nodes decide: cards of a node carry what all its ranks get, each at least what one of them gets.
    of_node = max(sum(loads[first : first + inside]) for first in range(0, problem.ranks, inside))
    return cluster.nodes * max(min(inside, cluster.nics_per_node) * max(loads), of_node)


def gathered_bytes(problem: Problem, loads: Sequence[float]) -> float:
    """Return the same of an all-gather, padded to equal parts or not, as `runtime.sharded.part` does what is faster."""
    cluster, ranks, padded = problem.cost.cluster, problem.ranks, problem.ranks * max(loads)
    if 1 in (cluster.ranks_per_node, cluster.nodes) or len(set(loads)) == 1:
        return padded
    # To each rank of other nodes a message of its own, where the ring takes the links between nodes once.
    messages = (ranks - cluster.ranks_per_node) / (ranks - 1) * cluster.ranks_per_node
    return min(padded, messages * scattered_bytes(problem, loads))


def costs_us(
    problem: Problem, buckets: Sequence[Sequence[int]], owners: Owners, curve: Curve, *, gathered: bool = False,
    updates: bool = False,
) -> list[float]:  # fmt: skip
    """Return the time of each bucket's messages, by a curve of time over bytes of a reduce-scatter, or (`gathered`) an
    all-gather; `updates`: see `message_sizes`.
    """
    if owners is None:
        return problem.bucket_cost_us(buckets, curve)
    length = gathered_bytes if gathered else scattered_bytes
    sizes = message_sizes(problem, buckets, owners, updates=updates, length=length)
    times_us = iter(curve(np.array([size for of in sizes for size in of], dtype=np.float64)).tolist())
    return [sum(next(times_us) for _ in of) for of in sizes]


def largest_share(problem: Problem, owners: Sequence[int]) -> float:
    """Return the largest part of all elements, and so about of the optimizer's state, that one rank has."""
    sizes: list[float] = problem.size_bytes.tolist()
    loads = loads_of(sizes, owners, problem.ranks)
    return (max(loads) + (sum(sizes) - sum(loads)) / problem.ranks) / max(1.0, sum(sizes))


def notes(problem: Problem, owners: Mapping[str, int], *, updates: bool = True) -> list[str]:
    """Return what owners do, for readers of a plan; nothing where there are none; `updates`: see `loads_us`."""
    if not owners:
        return []
    ranks_of = [owners.get(one.name, -1) for one in problem.profile.compute.gradients]
    loads = loads_us(problem, ranks_of, updates=updates)
    least_us = max([sum(loads) / len(loads), *longest_us(problem)])
    guessed = "" if operator_costs(problem) else ", divided by shapes, for single ones were not timed"
    applied = owners.keys() & applied_bytes(problem).keys() if updates else ()
    gathered = f"; updates of {len(applied)} are gathered in place of weights" if applied else ""
    return [
        f"each of {pluralize(len(owners), 'whole parameter')} is updated by its owner, which alone has its state (of "
        f"each rank estimated by elements): the longest share takes {ms(max(loads))} of {ms(problem.update_us)}, at "
        f"least {ms(least_us)}{guessed}{gathered}"
    ]
