"""Costs of the layer norms of LARS and LAMB: where every rank computes all of them, and where ranks share.

Shared, a step waits for the largest share and then for one all-gather of all norms; that this may run beside other work
of the update is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.documents.text import ms
from planner.model.problem import Problem
from runtime.plan import UpdatePlan
from runtime.plan.lpt import loads_of


def norm_costs_us(problem: Problem) -> tuple[float, ...]:
    """Return the time of each layer's norms, in the order of `Problem.norm_layers`."""
    return tuple(layer.norm_us for layer in problem.norm_layers)


def replicated_us(problem: Problem) -> float:
    """Return the time where every rank computes all norms."""
    return sum(norm_costs_us(problem))


def message_bytes(problem: Problem, owners: Sequence[int]) -> int:
    """Return the gathered bytes: from each rank as many norms as the most that one of them has."""
    norms = problem.profile.compute.norms
    most = max((owners.count(rank) for rank in set(owners)), default=0)
    return 0 if norms is None else problem.ranks * most * norms.row_bytes


def gather_us(problem: Problem, owners: Sequence[int]) -> float:
    size_bytes = np.array([float(message_bytes(problem, owners))])
    return float(problem.all_gather.curve(size_bytes)[0])


def shared_us(problem: Problem, owners: Sequence[int]) -> float:
    """Return the time of the largest share and of the all-gather."""
    return max(loads_of(norm_costs_us(problem), owners, problem.ranks)) + gather_us(problem, owners)


def saved_us(problem: Problem, owners: Sequence[int] | None) -> float:
    """Return what sharing the norms saves of the update; negative where it costs."""
    return 0.0 if owners is None else replicated_us(problem) - shared_us(problem, owners)


def most_saved_us(problem: Problem) -> float:
    """Return an upper bound of `saved_us`: norms are split evenly, as far as the largest layer allows."""
    costs_us = norm_costs_us(problem)
    if not costs_us or problem.ranks == 1:
        return 0.0
    even = [index % problem.ranks for index in range(len(costs_us))]
    least_us = max(*costs_us, sum(costs_us) / problem.ranks) + gather_us(problem, even)
    return max(0.0, replicated_us(problem) - least_us)


def describe_norms(problem: Problem, updates: UpdatePlan | None) -> list[str]:
    """Return what the reader of a plan should know about norms; nothing where there are none."""
    norms = updates.norms if updates else None
    profile = problem.profile.compute.norms
    if norms is None or profile is None or norms.replicated_us is None or norms.shared_us is None:
        return []
    alone, shared, gather = (ms(time_us) for time_us in (norms.replicated_us, norms.shared_us, norms.gather_us or 0.0))
    layers = f"{profile.optimizer}'s norms of {len(problem.norm_layers)} layers take {alone} by every rank"
    if norms.shares is None:
        return [f"{layers}, and would take {shared} shared, {gather} of it the all-gather: every rank computes all"]
    largest_us, bound_us = norms.shared_us - (norms.gather_us or 0.0), norms.bound_us or 0.0
    over = largest_us / bound_us - 1.0 if bound_us > 0.0 else 0.0
    best = "the least possible" if over <= 1e-3 else f"at most {over:.1%} above the least possible"
    gathered = f"and one all-gather of {norms.message_bytes} B, {gather}"
    return [f"{layers} and {shared} shared (PTO): the largest share, {best}, {gathered}"]
