"""Merging and densities together as a constraint program (OR-tools CP-SAT): a check of the labels, and a bound.

A schedule is a path 0 → … → count whose arcs are buckets in a form, dense or at a density. Beside each place stand the
times that `planner.merging.joint` has in its labels, with lower limits that only chosen arcs impose. Times are whole
ticks, rounded down, so that bounds hold; one worker, a fixed seed and a limit in deterministic time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.merging.joint import JointTables

MAX_PLACES = 33
"""Places of the largest problem that is worth a try: an arc for each range of gradients and form."""
TICKS = 2.0**26
"""Ticks until the best known end, or up to half as many."""


@dataclass(frozen=True)
class JointBound:
    """What the solver found (nothing: empty), and what it proved."""

    stops: tuple[int, ...]
    forms: tuple[int, ...]
    bound_us: float
    """No choice ends earlier."""
    proven: bool
    error_us: float
    """By how much the optimum in ticks may lie below the true one."""


def solve_joint(tables: JointTables, forms: int, known_us: float, limit: float) -> JointBound:
    """The choice among the first `forms` forms that ends earliest.

    Args:
        tables: the buckets.
        forms: dense, and the densities that may be used.
        known_us: when a known choice ends; only choices that end no later are looked at.
        limit: deterministic time.
    """
    model = _Model(tables, forms, known_us)
    return model.solve(limit)


class _Model:
    """Arcs, and by when each place's buckets are selected, sent and unpacked, in ticks."""

    def __init__(self, tables: JointTables, forms: int, known_us: float) -> None:
        from ortools.sat.python import cp_model  # noqa: TID251  (takes longer to load than all else here)

        self._ortools: Any = cp_model
        self._cp: Any = cp_model.CpModel()
        self._tables, self._forms = tables, forms
        self._known_us = known_us
        self._tick_us = 2.0 ** math.ceil(math.log2(known_us)) / TICKS if known_us > 0.0 else 1.0
        self._known = math.floor(known_us / self._tick_us)
        self._count = len(tables.places) - 1
        self._arcs: dict[tuple[int, int, int], Any] = {}
        self._end = self._time()
        self._add_arcs()
        self._add_times()

    def _time(self) -> Any:
        return self._cp.new_int_var(0, self._known, "")

    def _ticks(self, time_us: float) -> int:
        return math.floor(time_us / self._tick_us)

    def _add_arcs(self) -> None:
        tables, cp = self._tables, self._cp
        for start in range(self._count):
            for stop in range(start + 1, self._count + 1):
                for form in range(self._forms):
                    least_us = tables.ready_us[stop] + tables.select_us[form, start, stop]
                    if least_us + tables.cost_us[form, start, stop] <= self._known_us * (1.0 + 1e-9):
                        self._arcs[start, stop, form] = cp.new_bool_var("")
        for place in range(self._count + 1):
            into = [arc for (_, stop, _), arc in self._arcs.items() if stop == place] if place else [1]
            out = [arc for (start, _, _), arc in self._arcs.items() if start == place] if place < self._count else [1]
            cp.add(sum(into) == sum(out))
            if place:
                cp.add_at_most_one(into)

    def _add_times(self) -> None:
        tables, cp = self._tables, self._cp
        delay, network, arrived = ([self._time() for _ in range(self._count + 1)] for _ in range(3))
        ready = [self._ticks(time_us) for time_us in tables.ready_us.tolist()]
        extra: list[Any] = []
        for (start, stop, form), arc in self._arcs.items():
            at = form, start, stop
            select, cost, unpack = (
                self._ticks(float(table[at])) for table in (tables.select_us, tables.cost_us, tables.unpack_us)
            )
            cp.add(delay[stop] >= delay[start] + select).only_enforce_if(arc)
            cp.add(network[stop] >= delay[stop] + ready[stop] + cost).only_enforce_if(arc)
            cp.add(network[stop] >= network[start] + cost).only_enforce_if(arc)
            cp.add(arrived[stop] >= arrived[start] + unpack).only_enforce_if(arc)
            if unpack:
                cp.add(arrived[stop] >= network[stop] + unpack).only_enforce_if(arc)
            extra.append((select + unpack) * arc)
        cp.add(self._end >= self._ticks(tables.compute_end_us) + sum(extra))
        cp.add(self._end >= network[-1])
        cp.add(self._end >= arrived[-1])
        cp.minimize(self._end)

    def solve(self, limit: float) -> JointBound:
        """Finds the earliest end."""
        solver = self._ortools.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = limit
        solver.parameters.linearization_level = 2
        status = solver.solve(self._cp)
        found = status in (self._ortools.OPTIMAL, self._ortools.FEASIBLE)
        if not found and status != self._ortools.UNKNOWN:
            raise AssertionError(f"the solver cpsat ended with {solver.status_name(status)} although a choice is known")
        chosen = sorted(key[1:] for key, arc in self._arcs.items() if solver.boolean_value(arc)) if found else []
        bound_us = max(0.0, float(solver.best_objective_bound)) * self._tick_us
        return JointBound(
            stops=tuple(int(self._tables.places[stop]) for stop, _ in chosen),
            forms=tuple(form for _, form in chosen),
            bound_us=max(bound_us, 0.0) if np.isfinite(bound_us) else 0.0,
            proven=status == self._ortools.OPTIMAL,
            # Each place rounds at most four times, and the end twice.
            error_us=(4 * self._count + 2) * self._tick_us,
        )
