"""Buckets and their forms together as a constraint program (OR-tools CP-SAT): a check of the labels, and a bound.

A schedule is a path 0 → … → count whose arcs are buckets in a form: dense or at a density, and on two kinds of link
flat or by phases. Beside each place stand times (when networks are free, how late backward is, when all is unpacked)
with lower limits that only chosen arcs impose. What buckets that stop at a place or later keep a network busy for comes
after the first of them can be ready: that is linear in the arcs, and says most. Arcs that only choices longer than the
best known one hold are left out. Times are whole ticks, rounded down, so that bounds hold; one worker, a fixed seed and
a limit in deterministic time. Nothing of this comes from the labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.search.cpsat import PathModel, Solution
from planner.search.tables import BucketTables, cheapest_to_end_us

MAX_PLACES = 33
"""Places of the largest problem that is worth a try: an arc for each range of gradients and form."""
MAX_LINK_PLACES = 201
"""The same on two kinds of link with the forms of dense buckets alone."""


def fits(tables: BucketTables) -> bool:
    """Return whether the model can take on a problem."""
    dense = tables.two_links and len(tables.cost_us) <= 3
    return len(tables.places) <= (MAX_LINK_PLACES if dense else MAX_PLACES)


def solve_joint(tables: BucketTables, forms: int, known_us: float, limit: float) -> Solution:
    """Return the earliest end over the first `forms` forms, at most the known one; `limit` in deterministic time."""
    model = _LinkModel(tables, forms, known_us) if tables.two_links else _Model(tables, forms, known_us)
    return model.solve(limit)


class _Model(PathModel):
    """Arcs, and by when each place's buckets are selected, sent and unpacked, in ticks, on one network."""

    until_known = 2.0**26
    """Ticks."""
    roundings = 4
    """Most roundings at each place; two more at the end."""

    def __init__(self, tables: BucketTables, forms: int, known_us: float) -> None:
        super().__init__(len(tables.places) - 1, known_us, self.until_known)
        self._tables, self._forms = tables, forms
        for form, start, stop in np.argwhere(self._least_us() <= known_us * (1.0 + 1e-9)).tolist():
            self.arcs[start, stop, form] = self.cp.new_bool_var("")
        self.add_path()
        self._add_loads()
        self._add_times()

    def _ticks(self, time_us: float) -> int:
        return math.floor(time_us / self.tick_us)

    def _least_us(self) -> Any:
        """Return the earliest end of choices with each bucket."""
        tables, forms = self._tables, self._forms
        best_us = tables.cost_us[:forms].min(axis=0)
        free_us, rest_us = np.zeros(self.count + 1), cheapest_to_end_us(best_us)
        for stop in range(1, self.count + 1):
            free_us[stop] = (np.maximum(free_us[:stop], tables.ready_us[stop]) + best_us[:stop, stop]).min()
        before_us, after_us = self._around_us()
        begun_us = np.maximum(tables.ready_us[None, None, :] + before_us, free_us[None, :, None])
        sent_us = begun_us + tables.cost_us[:forms]
        least_us = np.maximum(sent_us + after_us, sent_us + rest_us[None, None, :])
        return np.where(np.tri(self.count + 1, k=-1, dtype=bool).T[None], least_us, np.inf)

    def _around_us(self) -> tuple[Any, Any]:
        """Return a bucket's time before it is on the network, and after that."""
        return self._tables.select_us[: self._forms], self._tables.unpack_us[: self._forms]

    def _loads(self) -> list[Any]:
        """Return how long buckets keep each network busy."""
        return [self._tables.cost_us]

    def _add_loads(self) -> None:
        """Add that buckets which stop at a place or later are ready after it, and keep networks busy."""
        ready = [self._ticks(time_us) for time_us in self._tables.ready_us.tolist()]
        late, after = self._of_places(self._tables.select_us), [self._of_places(load) for load in self._loads()]
        delay: list[Any] = [0]
        for place in range(1, self.count + 1):
            delay.append(self._sum(delay[-1], late[place]))
        for costs in after:
            following: Any = 0
            for place in range(self.count, 0, -1):
                following = self._sum(following, costs[place])
                self.cp.add(self.end >= ready[place] + delay[place] + following)

    def _of_places(self, table: Any, only: Sequence[bool] | None = None) -> list[Any]:
        """Return for each place the ticks of the bucket that stops there; 0 for none, or none of these forms."""
        terms: list[list[Any]] = [[] for _ in range(self.count + 1)]
        for (start, stop, form), arc in self.arcs.items():
            ticks = self._ticks(float(table[form, start, stop]))
            if ticks and (only is None or only[form]):
                terms[stop].append(ticks * arc)
        return [self._sum(*of) if of else 0 for of in terms]

    def _sum(self, *terms: Any) -> Any:
        """Return a sum that stands in many constraints."""
        if all(isinstance(term, int) for term in terms):
            return sum(terms)
        total = self.time()
        self.cp.add(total == sum(terms))
        return total

    def _add_times(self) -> None:
        tables, cp = self._tables, self.cp
        delay, network, arrived = ([self.time() for _ in range(self.count + 1)] for _ in range(3))
        ready = [self._ticks(time_us) for time_us in tables.ready_us.tolist()]
        extra: list[Any] = []
        for (start, stop, form), arc in self.arcs.items():
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
        cp.add(self.end >= self._ticks(tables.compute_end_us) + sum(extra))
        cp.add(self.end >= network[-1])
        cp.add(self.end >= arrived[-1])

    def solve(self, limit: float) -> Solution:
        chosen, bound_us, proven = self.minimize(limit)
        return Solution(
            stops=tuple(int(self._tables.places[stop]) for _, stop, _ in chosen),
            forms=tuple(form for _, _, form in chosen),
            bound_us=bound_us,
            proven=proven,
            error_us=(self.roundings * self.count + 2) * self.tick_us,
        )


class _LinkModel(_Model):
    """The same on two kinds of link, in the simulator's order: inside nodes the gather of a bucket comes after the
    scatter of the next one, and before that of the one after.
    """

    until_known = 2.0**22
    roundings = 8

    def _around_us(self) -> tuple[Any, Any]:
        tables, forms = self._tables, self._forms
        before_us = tables.select_us[:forms] + tables.scatter_us[:forms]
        return before_us, tables.gather_us[:forms] + tables.unpack_us[:forms]

    def _loads(self) -> list[Any]:
        return [self._tables.cost_us, self._tables.scatter_us + self._tables.gather_us]

    def _whether(self, table: Any) -> list[Any]:
        """Return whether the bucket that stops at each place is one by phases with an entry in the table."""
        flags = []
        for place in range(self.count + 1):
            flag = self.cp.new_bool_var("")
            chosen = [
                arc
                for (start, stop, form), arc in self.arcs.items()
                if stop == place and self._tables.phased[form] and table[form, start, stop] > 0.0
            ]
            self.cp.add(flag == sum(chosen))
            flags.append(flag)
        return flags

    def _add_times(self) -> None:
        tables, cp = self._tables, self.cp
        delay, inside, between, arrived = ([self.time() for _ in range(self.count + 1)] for _ in range(4))
        gather, owed = (self._of_places(table, tables.phased) for table in (tables.gather_us, tables.unpack_us))
        pending, owes = self._whether(np.ones_like(tables.cost_us)), self._whether(tables.unpack_us)
        ready = [self._ticks(time_us) for time_us in tables.ready_us.tolist()]
        extra: list[Any] = []
        for (start, stop, form), arc in self.arcs.items():
            at = form, start, stop
            select, scatter, cost, unpack = (
                self._ticks(float(table[at]))
                for table in (tables.select_us, tables.scatter_us, tables.cost_us, tables.unpack_us)
            )
            own = 0 if tables.phased[form] else unpack
            extra.append((select + unpack) * arc)
            free = inside[start]
            cp.add(delay[stop] >= delay[start] + select).only_enforce_if(arc)
            cp.add(between[stop] >= between[start] + cost).only_enforce_if(arc)
            cp.add(between[stop] >= delay[stop] + ready[stop] + scatter + cost).only_enforce_if(arc)
            cp.add(inside[stop] >= free + scatter + gather[start]).only_enforce_if(arc)
            if tables.phased[form]:
                cp.add(between[stop] >= free + scatter + cost).only_enforce_if(arc)
                cp.add(inside[stop] >= delay[stop] + ready[stop] + scatter + gather[start]).only_enforce_if(arc)
            cp.add(inside[stop] >= between[start] + gather[start]).only_enforce_if([arc, pending[start]])
            cp.add(arrived[stop] >= arrived[start] + owed[start] + own).only_enforce_if(arc)
            cp.add(arrived[stop] >= inside[stop] + owed[start] + own).only_enforce_if([arc, owes[start]])
            if own:
                cp.add(arrived[stop] >= between[stop] + own).only_enforce_if(arc)
        cp.add(self.end >= self._ticks(tables.compute_end_us) + sum(extra))
        cp.add(self.end >= arrived[-1] + owed[-1])
        for link in (inside, between):
            cp.add(self.end >= link[-1] + gather[-1] + owed[-1])
