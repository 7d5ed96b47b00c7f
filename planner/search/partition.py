"""Number partitioning: the split whose largest share is least, by LPT and, where that is not proven best, by CP-SAT.

The bound is the largest item, or an even split of all items. With many items LPT, followed by exchanges between the
largest share and another, comes as near to it as times are measured; with few a constraint program finds the best from
there, one worker for a limit in deterministic time, so that equal inputs give equal answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from planner.model.norms import norm_costs_us
from planner.model.problem import Problem
from runtime.plan.lpt import loads_of, longest_first

TICKS = 2**20
"""The largest share that LPT finds, in ticks; costs are rounded to whole ones."""
NEAR = 1e-4
"""Relative distance from the bound at which the search ends: no time is measured as well as that."""
LIMIT = 0.5
"""Deterministic time of the search: about a second."""
MAX_EXCHANGES = 1000
MAX_BOOLEANS = 20_000
"""Items times parts above which LPT's answer is taken: building the program would take seconds."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    owners: tuple[int, ...]
    """Part of each item."""
    largest: float
    bound: float
    """Lower bound of the largest share of any split."""
    method: str

    @property
    def proven(self) -> bool:
        """Return whether no split is better by more than `NEAR`."""
        return self.largest <= self.bound * (1.0 + NEAR)


@lru_cache(maxsize=16)
def best_partition(costs: tuple[float, ...], parts: int, method: str = "cpsat") -> Partition:
    """Return the split of least largest share, by `cpsat` or the rule `lpt`. Cached: a pass and its notes ask."""
    found = _partition(costs, longest_first(costs, parts), parts, "LPT")
    if method == "lpt" or found.proven or len(costs) * parts > MAX_BOOLEANS:
        return found
    found = _partition(costs, _exchanged(costs, found.owners, parts), parts, "LPT and exchanges")
    return found if found.proven else _solved(costs, parts, found)


def _partition(costs: tuple[float, ...], owners: tuple[int, ...], parts: int, method: str) -> Partition:
    largest = max(loads_of(costs, owners, parts))
    bound = max(max(costs, default=0.0), math.fsum(costs) / parts)
    return Partition(owners=owners, largest=largest, bound=min(bound, largest), method=method)


def _exchanged(costs: tuple[float, ...], owners: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Move an item of the largest share, or exchange it for one elsewhere, while that share gets smaller.

    Every step takes the exchange that leaves the larger one of both shares least, among equals the first.
    """
    owned = np.array(owners)
    items = np.append(np.array(costs), 0.0)  # the last one is none at all: a move
    for _ in range(MAX_EXCHANGES):
        loads = np.bincount(owned, items[:-1], parts)
        full = int(loads.argmax())
        inside = np.flatnonzero(owned == full)
        outside = np.append(np.flatnonzero(owned != full), len(costs))
        best = (loads[full] * (1.0 - NEAR / 10), -1, -1, -1)
        for part in range(parts):
            others = outside[np.append(owned[outside[:-1]] == part, True)]
            if part == full:
                continue
            less = items[inside][:, None] - items[others][None, :]
            worse = np.maximum(loads[full] - less, loads[part] + less)
            at = int(worse.argmin())
            if worse.flat[at] < best[0]:
                best = (worse.flat[at], inside[at // len(others)], others[at % len(others)], part)
        _, gives, takes, part = best
        if gives < 0:
            break
        owned[gives] = part
        if takes < len(costs):
            owned[takes] = full
    return tuple(owned.tolist())


def _solved(costs: tuple[float, ...], parts: int, known: Partition) -> Partition:
    """Return the better of what is known and what the constraint program finds."""
    from ortools.sat.python import cp_model  # noqa: TID251  (takes longer to load than all else here)

    tick = known.largest / TICKS
    ticks = [math.floor(cost / tick) for cost in costs]
    model = cp_model.CpModel()
    largest = model.new_int_var(math.floor(known.bound / tick), TICKS, "largest")
    order = sorted(range(len(costs)), key=lambda item: -costs[item])
    chosen: list[list[Any]] = [[] for _ in costs]
    for place, item in enumerate(order):
        # Parts are alike: the n-th longest item need not look beyond the n-th part.
        chosen[item] = [model.new_bool_var("") for _ in range(min(place + 1, parts))]
        model.add_exactly_one(chosen[item])
    renamed = _renamed(known.owners, order)
    for part in range(parts):
        inside = [(choice[part], ticks[item]) for item, choice in enumerate(chosen) if part < len(choice)]
        model.add(cp_model.LinearExpr.weighted_sum(*map(list, zip(*inside, strict=True))) <= largest)
    for item, choice in enumerate(chosen):
        for part, here in enumerate(choice):
            model.add_hint(here, renamed[item] == part)
    model.minimize(largest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = LIMIT
    solver.parameters.relative_gap_limit = NEAR
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return known
    owners = tuple(next(p for p, here in enumerate(choice) if solver.boolean_value(here)) for choice in chosen)
    found = max(loads_of(costs, owners, parts))
    bound = max(known.bound, solver.best_objective_bound * tick)  # ticks are rounded down: no split is below
    if found >= known.largest:
        owners, found = known.owners, known.largest
    return Partition(owners=owners, largest=found, bound=min(bound, found), method="CP-SAT")


def _renamed(owners: tuple[int, ...], order: list[int]) -> list[int]:
    """Return the same split, its parts numbered in the order in which the longest items come to them."""
    names: dict[int, int] = {}
    for item in order:
        names.setdefault(owners[item], len(names))
    return [names[owner] for owner in owners]


def partition_of(problem: Problem, method: str = "cpsat") -> Partition:
    """Return the split of norms over ranks whose largest share is least."""
    return best_partition(norm_costs_us(problem), problem.ranks, method)
