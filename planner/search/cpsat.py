"""The merge problem as a constraint program (OR-tools CP-SAT): an independent check of the programs, and a bound.

A schedule is a path 0 → … → count whose arcs (j, i) are the buckets [j, i). On one network the last bucket ends at the
largest, over the places k, of r_k and what all buckets that stop at k or later cost: none of these begins before r_k,
and where the network last waited, it did so for one of the r_k. So the end is linear in the arcs. Contention, and
phases on two networks (a flow shop), add a few times per place, with lower limits that only chosen arcs impose.

Arcs are left out that only schedules longer than the best known one hold: what leads to an arc, and what follows it,
costs at least as much as the cheapest path there. Nothing of this comes from the dynamic programs.

Deterministic: one worker, a fixed seed, a limit in deterministic time. Times are whole ticks, rounded down, and so are
contention factors, to 2⁻²⁰. Hence bounds hold, and the optimum in ticks lies below the true one by less than
`Solution.error_us`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.model.step import Overlap
from planner.search.local_search import Stops
from planner.search.merge import CostOf, MergeProblem
from planner.search.merge_contended import end_us as contended_end_us
from planner.search.merge_phased import PhasedProblem
from planner.search.tables import cheapest_to_end_us
from runtime.errors import InputError

TIME_LIMIT = 2.0
"""Deterministic time that a solve may take: less than a minute on one core, and the same work on every machine."""
MAX_GRADIENTS = 600
"""Above this the model itself, which may hold an arc for every range of gradients, takes minutes to build."""
TICKS = 2.0**30
"""Ticks until the best known end, or up to half as many."""
COARSE_TICKS = 2.0**22
"""The same where times depend on one another: there the solver may narrow their ranges tick by tick."""
FRACTION = 2**20
"""Contention factors are counted in this share."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Solution:
    stops: Stops
    """Where each bucket stops; empty where nothing was found within the limit."""
    bound_us: float
    """No schedule's last bucket ends earlier."""
    proven: bool
    """Whether the bound is the optimum of the model; `error_us` says how far that may be from the true one."""
    error_us: float
    """By how much the optimum in ticks may lie below the true one."""
    forms: tuple[int, ...] = ()
    """Of the buckets, where they have a choice."""


def solve_merge(
    problem: MergeProblem, hint: Stops, overlap: Overlap | None = None, limit: float = TIME_LIMIT
) -> Solution:
    """The merge problem on one network.

    Args:
        problem: its arrays.
        hint: boundaries to begin with; only schedules that end no later are looked at.
        overlap: contention factors. With them the model may let the network wait although a bucket is ready, which no
            schedule does: its optimum is a bound, and now and then lies below that of all schedules.
        limit: deterministic time.

    Raises:
        InputError: more gradients than this solver can take on.
    """
    free = Overlap(1.0, 1.0, float(problem.ready_us[-1]))
    known_us = contended_end_us(problem, overlap or free, hint)
    model = _MergeModel(problem.ready_us, [problem.cost_us], known_us, COARSE_TICKS if overlap else TICKS)
    model.add_buckets([_Load(model.costs[0])], hint)
    if overlap is None:
        return model.solve(limit, error_us=(problem.count + 1) * model.tick_us)
    _add_contention(model, overlap)
    # Eight roundings a bucket at the most, and factors that are too small by 1 / FRACTION, of both resources.
    return model.solve(limit, error_us=8 * (problem.count + 1) * model.tick_us + 4 * model.known_us / FRACTION)


def solve_two_links(problem: PhasedProblem, hint: Stops, limit: float = TIME_LIMIT) -> Solution:
    """The merge problem with phases inside, between, and again inside nodes. See `solve_merge`.

    The networks take their tasks as in the simulator: sorted by bucket + phase, then bucket.
    """
    if len(set(problem.links)) == 1:  # nothing overlaps: one network
        return solve_merge(MergeProblem(problem.ready_us, problem.total_us, problem.non_decreasing), hint, None, limit)
    model = _MergeModel(problem.ready_us, problem.cost_us, problem.end_us(hint), COARSE_TICKS)
    scatter, between, gather = model.costs
    inside = _Load(scatter + gather)
    model.add_buckets([inside, _Load(between, first=float(scatter.min()), last=float(gather[:, -1].min()))], hint)
    _add_flow_shop(model)
    return model.solve(limit, error_us=(3 * model.count + 1) * model.tick_us)


class _Load:
    """A network that buckets keep busy for `cost` ticks each; at least `first` pass before that and `last` after it."""

    def __init__(self, cost: Floats, first: float = 0.0, last: float = 0.0) -> None:
        self.cost, self.around, self.count = cost, first + last, len(cost) - 1

    def earliest(self, ready: Floats) -> Floats:
        """Lower limits of when prefixes end: the largest, over places k, of r_k and the cheapest path from there."""
        path = np.zeros((self.count + 1, self.count + 1))
        for stop in range(1, self.count + 1):
            path[1 : stop + 1, stop] = (path[1 : stop + 1, :stop] + self.cost[:stop, stop]).min(axis=1)
        reached = np.triu(np.ones_like(path, dtype=bool))
        reached[0] = False
        ends: Floats = np.where(reached, ready[:, None] + path, 0.0).max(axis=0)
        return ends


class PathModel:
    """Boolean arcs that form one path through the places 0 … count, and when the last bucket ends, in whole ticks.

    Args:
        count: number of places behind the first.
        known_us: when a known schedule ends; only those that end no later are looked at.
        ticks: until then, or up to half as many.
    """

    def __init__(self, count: int, known_us: float, ticks: float) -> None:
        from ortools.sat.python import cp_model  # noqa: TID251  (takes longer to load than all else here)

        self._ortools: Any = cp_model
        self.cp: Any = cp_model.CpModel()
        self.count, self.known_us = count, known_us
        self.tick_us = 2.0 ** math.ceil(math.log2(known_us)) / ticks if known_us > 0.0 else 1.0
        self.known = math.floor(known_us / self.tick_us)
        self.least = 0
        self.arcs: dict[tuple[int, ...], Any] = {}
        """By (start, stop) and, where a bucket has a choice, its form."""
        self.end = self.time()

    def time(self) -> Any:
        """A time until the best known end, in ticks."""
        return self.cp.new_int_var(0, self.known, "")

    def add_path(self) -> None:
        """A schedule takes one path through the arcs."""
        for place in range(self.count + 1):
            into = [arc for key, arc in self.arcs.items() if key[1] == place] if place else [1]
            out = [arc for key, arc in self.arcs.items() if key[0] == place] if place < self.count else [1]
            self.cp.add(sum(into) == sum(out))
            if place:
                self.cp.add_at_most_one(into)

    def minimize(self, limit: float, **parameters: int) -> tuple[list[tuple[int, ...]], float, bool]:
        """(the chosen arcs in order, or none; the bound in microseconds; whether it is the optimum)."""
        self.cp.minimize(self.end)
        solver = self._ortools.CpSolver()
        # One worker and a limit in deterministic time: equal inputs give equal plans on every machine.
        given = {"num_workers": 1, "random_seed": 0, "max_deterministic_time": limit, "linearization_level": 2}
        for name, value in (given | parameters).items():
            setattr(solver.parameters, name, value)
        status = solver.solve(self.cp)
        found = status in (self._ortools.OPTIMAL, self._ortools.FEASIBLE)
        if not found and status != self._ortools.UNKNOWN:
            raise AssertionError(
                f"the solver cpsat ended with {solver.status_name(status)} although a schedule is known"
            )
        chosen = sorted(key for key, arc in self.arcs.items() if solver.boolean_value(arc)) if found else []
        bound_us = max(float(self.least), solver.best_objective_bound) * self.tick_us
        return chosen, bound_us, status == self._ortools.OPTIMAL


class _MergeModel(PathModel):
    """Buckets in one form each, and what the networks' loads say of the end."""

    def __init__(self, ready_us: Floats, costs_us: Sequence[CostOf], known_us: float, ticks: float) -> None:
        if len(ready_us) > MAX_GRADIENTS:
            raise InputError(
                f"the solver cpsat: found {len(ready_us)} gradients, expected at most {MAX_GRADIENTS}; use the solver "
                f"dp, which has no such limit"
            )
        super().__init__(len(ready_us), known_us, ticks)
        self.ready = np.append(0.0, np.floor(ready_us / self.tick_us))
        self.costs = [self._table(cost_us) for cost_us in costs_us]

    def _table(self, cost_us: CostOf) -> Floats:
        """Ticks of every bucket; infinite where there is none."""
        table = np.full((self.count + 1, self.count + 1), np.inf)
        for stop in range(1, self.count + 1):
            table[:stop, stop] = np.floor(cost_us(slice(0, stop), stop) / self.tick_us)
        return table

    def add_buckets(self, loads: Sequence[_Load], hint: Stops) -> None:
        """The arcs that may be in a schedule, which takes one path through them; the end as the networks' loads say."""
        kept = self.ready[None, :] + sum(self.costs) <= self.known
        for load in loads:
            ends = load.earliest(self.ready)
            begins = np.maximum(ends[:, None], self.ready[None, :])
            kept &= begins + load.cost + cheapest_to_end_us(load.cost)[None, :] + load.around <= self.known
            self.least = max(self.least, int(ends[-1] + load.around))
        self.cp.add(self.end >= self.least)
        chosen = set(zip((0, *hint[:-1]), hint, strict=True))
        for start, stop in np.argwhere(kept).tolist():
            self.arcs[start, stop] = self.cp.new_bool_var("")
            self.cp.add_hint(self.arcs[start, stop], (start, stop) in chosen)
        self.add_path()
        for load in loads:
            self._add_load(load)

    def _add_load(self, load: _Load) -> None:
        after: Any = 0
        costs = self.of_places(load.cost)
        for place in range(self.count, 0, -1):
            total = self.time()
            self.cp.add(total == costs[place] + after)
            self.cp.add(self.end >= total + int(self.ready[place] + load.around))
            after = total

    def of_places(self, cost: Floats) -> list[Any]:
        """For each place the cost of the bucket that stops there; 0 where none does."""
        terms: list[list[Any]] = [[] for _ in range(self.count + 1)]
        weights: list[list[int]] = [[] for _ in range(self.count + 1)]
        for (start, stop), arc in self.arcs.items():
            terms[stop].append(arc)
            weights[stop].append(int(cost[start, stop]))
        weighted_sum = self._ortools.LinearExpr.weighted_sum
        values = [self.time() for _ in range(self.count + 1)]
        for place, value in enumerate(values):
            self.cp.add(value == weighted_sum(terms[place], weights[place]))
        return values

    def solve(self, limit: float, error_us: float) -> Solution:
        # Which arcs exclude one another is in the model already; looking for more takes longer than solving it.
        chosen, bound_us, proven = self.minimize(limit, cp_model_probing_level=0, symmetry_level=0)
        return Solution(tuple(stop for _, stop in chosen), bound_us, proven, error_us)


def _add_contention(model: _MergeModel, overlap: Overlap) -> None:
    """Beside the end of each prefix, how late compute is by then: wall time less progress.

    A bucket shares the machine with the rest of backward for min(rest · compute, cost · network); this much more time,
    times 1 − 1/network, the network takes, and times 1 − 1/compute, compute is later. A product is allowed to be too
    small by as much as rounding takes off, so that whole ticks satisfy what the true times do.
    """
    cp, slack = model.cp, FRACTION - 1
    compute, network = (math.floor(factor * FRACTION) for factor in (overlap.compute, overlap.network))
    delay, stretch = (math.floor((1.0 - 1.0 / factor) * FRACTION) for factor in (overlap.compute, overlap.network))
    costs = model.of_places(model.costs[0])
    begin, late_before, shared, late, end = ([model.time() for _ in costs] for _ in range(5))
    for place in range(1, model.count + 1):
        rest = int(model.ready[-1]) + late_before[place] - begin[place] - 1
        all_shared = cp.new_bool_var("")
        cp.add(begin[place] >= late_before[place] + int(model.ready[place]))
        cp.add(FRACTION * shared[place] >= network * costs[place] - slack).only_enforce_if(all_shared)
        cp.add(FRACTION * shared[place] >= compute * rest - slack).only_enforce_if(~all_shared)
        cp.add(FRACTION * (late[place] - late_before[place]) >= delay * shared[place] - slack)
        cp.add(FRACTION * (end[place] - begin[place] - costs[place]) >= stretch * shared[place] - slack)
    for (start, stop), arc in model.arcs.items():
        if start:
            cp.add(begin[stop] >= end[start]).only_enforce_if(arc)
            cp.add(late_before[stop] >= late[start]).only_enforce_if(arc)
    cp.add(model.end >= end[-1])


def _add_flow_shop(model: _MergeModel) -> None:
    """When the network inside the nodes is free for the next scatter, when the one between them, and what is pending.

    A bucket's exchange between nodes, and the gather of the bucket before, wait for that one's exchange and this one's
    scatter. Which is what `planner.search.merge_phased` says, too, written as lower limits.
    """
    cp = model.cp
    scatter, between, gather = (model.of_places(cost) for cost in model.costs)
    scattered, begun, inside_free, between_free = ([model.time() for _ in scatter] for _ in range(4))
    for place in range(1, model.count + 1):
        cp.add(scattered[place] >= scatter[place] + int(model.ready[place]))
        cp.add(begun[place] >= scattered[place])
        cp.add(inside_free[place] >= scattered[place])
        cp.add(between_free[place] >= begun[place] + between[place])
    for (start, stop), arc in model.arcs.items():
        if start:
            cp.add(scattered[stop] >= inside_free[start] + scatter[stop]).only_enforce_if(arc)
            cp.add(begun[stop] >= between_free[start]).only_enforce_if(arc)
            cp.add(inside_free[stop] >= begun[stop] + gather[start]).only_enforce_if(arc)
    cp.add(model.end >= inside_free[-1] + gather[-1])
    cp.add(model.end >= between_free[-1] + gather[-1])
