"""Where to cut both halves of the all-reduce: reduce-scatters beside backward, all-gathers beside the next forward.

*Two windows, one recursion.* Reduce-scatters of buckets [j, k) of gradients in readiness order end at
f(k) = max(f(j), r(k)) + T(j, k), r being ready times (`planner.search.merge`). All-gathers go one after the other from
the start of forward, what is ready last first, and forward waits at each layer for its weights. So forward ends at

    max(forward, max over groups g of  (costs of g and of all groups before it) + (forward − need(g))),

for a chain with release times ends with the longest path through one of them. Read backwards, from the end of forward,
that is the end of a backward: φ(k) = max(φ(i), q(k)) + C(i, k), where group [i, k) is "ready" at q(k), what is left of
forward when its first layer is reached. Every exact statement on merging holds for both.

*They meet in their boundaries alone.* Forward needs all weights, so when it ends the network is idle; the owners'
update waits for all reduce-scatters, so when the next forward begins it is idle again. A step therefore is

    (end of forward) + (from there to the last reduce-scatter) + update,

the first a function of groups of gathers alone, the second of buckets alone. What couples them: a group is one or
several whole buckets, so the cuts of gathers are among those of reduce-scatters. Without that condition both programs
are solved apart, and the sum of their optima is a lower bound of every plan (`TwoWindowSolution.bounds_us`).

*With it.* Plans are made of both optima: each completes the other's cuts by its own exact program. Where one of them
reaches the bound, it is optimal. Else a program over prefixes keeps labels (f, φ, start of the open group): a bucket
more, and with it the group closed or left open. A label may be dropped without loss where (1) its f or φ is later than
any with which the rest can end below the best known plan, given the other window's optimum; (2) its f plus the cheapest
rest, and its φ plus the cheapest rest, together are no better than that plan; (3) another label of the same prefix is
no later in f and φ and its open group starts no earlier, where C does not fall with more gradients (else: at the same
place): every continuation of the first is one of the second, and no recursion falls when an argument grows. f is
counted no earlier than r of the next gradient, and φ than q of it, before which nothing can begin. So the result is
optimal unless a prefix had more labels than it may keep, which `exact` tells.

*Order of launch.* The program has gathers in the reverse of readiness order. That is the best where needs are ordered
that way: it is by due date, which minimizes the largest lateness of jobs released together (Jackson, 1955). Where they
are not, the program takes the least need of all that is ready later, which is safe, the bound the largest need of all
that is ready earlier, for which that order is by due date, and the model sorts groups by need.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.ir import TIE
from planner.search.labels import Columns, pareto
from planner.search.local_search import local_search
from planner.search.merge import CostOf, MergeProblem, finish_times, merge_exact, walk

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Stops = tuple[int, ...]

MAX_PLACES = 1024
"""Places at which buckets may stop; where gradients are more, these are spread evenly, beside the optima's."""
LABELS_AT_ALL = 8_000
"""Labels that all prefixes may keep together …"""
FEW_LABELS, MANY_LABELS = 8, 256
"""… and each of them, at the least and at the most."""
LOCAL_WORK = 6_000
"""Buckets that a local search may evaluate where labels were not all kept."""
DROPPED = 128
"""Cuts up to which each is tried to be left out."""


@dataclass(frozen=True)
class TwoWindows:
    """Both programs over one step's gradients.

    Args:
        scatters: backward; ready times from the start of forward.
        gathers: forward read backwards; "ready" is what is left of forward when the layer is reached.
        relaxed: the same with "ready" times that are early enough for any order of launch.
        forward_us: forward alone.
    """

    scatters: MergeProblem
    gathers: MergeProblem
    relaxed: MergeProblem
    forward_us: float

    @classmethod
    def of(cls, ready_us: Floats, scatter: CostOf, need_us: Floats, gather: CostOf, forward_us: float) -> TwoWindows:
        """Of gradients that are ready then and needed then, in readiness order."""
        left_us = forward_us - need_us
        late_us = np.maximum.accumulate(left_us)
        early_us = np.minimum.accumulate(left_us[::-1])[::-1]
        return cls(
            MergeProblem(ready_us, scatter, non_decreasing=False),
            MergeProblem(late_us, gather, non_decreasing=False),
            MergeProblem(early_us, gather, non_decreasing=False),
            forward_us,
        )

    @property
    def ordered(self) -> bool:
        """Whether the order of launch is the best."""
        return bool(np.array_equal(self.gathers.ready_us, self.relaxed.ready_us))

    def end_us(self, buckets: Stops, groups: Stops) -> float:
        """When the last reduce-scatter ends, from the start of a forward that waits for its weights."""
        return self.scatters.end_us(buckets) + self.late_us(self.gathers.end_us(groups))

    def late_us(self, forward_end_us: float) -> float:
        """How long forward waits."""
        return max(0.0, forward_end_us - self.forward_us)

    def on(self, places: Ints) -> TwoWindows:
        """The same where buckets may stop at these places alone, the first of them 0; costs from tables."""
        at = places[1:] - 1
        scatter, gather = (_Table.of(window.cost_us, places) for window in (self.scatters, self.gathers))
        return replace(
            self,
            scatters=MergeProblem(self.scatters.ready_us[at], scatter, non_decreasing=False),
            gathers=MergeProblem(self.gathers.ready_us[at], gather, non_decreasing=False),
            relaxed=MergeProblem(self.relaxed.ready_us[at], gather, non_decreasing=False),
        )


@dataclass(frozen=True)
class _Table:
    """Costs between places, looked up."""

    values: Floats
    """Shape (places, places): from, to; infinite where a bucket would end before it begins."""

    @classmethod
    def of(cls, cost_us: CostOf, places: Ints) -> _Table:
        starts, stops = np.triu_indices(len(places), 1)
        values = np.full((len(places), len(places)), np.inf)
        values[starts, stops] = cost_us(places[starts], places[stops])
        return cls(values)

    def __call__(self, starts: slice | int | Ints, stops: slice | int | Ints) -> Floats:
        found: Floats = self.values[starts, stops]
        return found


@dataclass(frozen=True, kw_only=True)
class TwoWindowSolution:
    """Where buckets stop and where groups of gathers do, which is where buckets do."""

    buckets: Stops
    groups: Stops
    bounds_us: tuple[float, float]
    """Earlier ends no choice's last reduce-scatter, were weights there at once, nor a forward that waits for them, in
    whatever order gathers go.
    """
    sums_us: tuple[float, float]
    """Reduce-scatters, and gathers, take no less in all; 0 where that is not known."""
    exact: bool
    """Whether no other choice ends earlier, with gathers in the reverse of readiness order."""


def two_windows(windows: TwoWindows, known: Iterable[Stops] = (), labels: int | None = None) -> TwoWindowSolution:
    """Return the best cuts; never worse than those `known`, of whose buckets the best groups are made.

    `labels`: how many a prefix may keep; default: by the number of places.
    """
    count = windows.scatters.count
    places = np.arange(count + 1)
    if count <= MAX_PLACES:
        windows = windows.on(places)
    ends = [finish_times(window) for window in (windows.scatters, windows.relaxed)]
    bounds_us = float(ends[0][0][-1]), max(windows.forward_us, float(ends[1][0][-1]))
    sums_us = 0.0, 0.0
    if count <= MAX_PLACES:
        sums_us = float(_cheapest_rest(windows.scatters)[0]), float(_cheapest_rest(windows.gathers)[0])
    else:
        known = [stops for stops in known if len(stops) <= MAX_PLACES // 4]
        grid = places[:: -(-count // (MAX_PLACES // 2))]
        walked = [walk(before, count) for _, before in ends]
        places = np.unique(np.concatenate([grid, *map(np.array, walked), *map(np.array, known)]))
        windows = windows.on(places)
        known = [tuple(np.searchsorted(places, stops).tolist()) for stops in known]
    best, goal_us = _from_optima(windows, known)
    exact = windows.end_us(*best) <= goal_us * (1.0 + TIE)
    if not exact:
        best, exact = _improved(windows, best, labels)
    if not exact:
        best = _searched(windows, best)
    buckets, groups = _with_fewer(windows, *best)
    return TwoWindowSolution(
        buckets=tuple(places[list(buckets)].tolist()),
        groups=tuple(places[list(groups)].tolist()),
        bounds_us=bounds_us,
        sums_us=sums_us,
        exact=exact and len(places) == count + 1,
    )


Cuts = tuple[Stops, Stops]


def _from_optima(windows: TwoWindows, known: Iterable[Stops]) -> tuple[Cuts, float]:
    """The best of plans made of each window's optimum, and the sum of both."""
    buckets, groups = merge_exact(windows.scatters), merge_exact(windows.gathers)
    goal_us = buckets.end_us + windows.late_us(groups.end_us)
    both = tuple(sorted({*buckets.stops, *groups.stops}))
    made: list[Cuts] = [(both, groups.stops)]
    finer = _containing(windows.scatters, groups.stops)
    for stops in dict.fromkeys([buckets.stops, finer, both, *known]):
        coarser = _among(windows.gathers, stops)
        made += [(stops, coarser), (_containing(windows.scatters, coarser), coarser)]
    made.append((finer, groups.stops))
    return min(made, key=lambda cuts: (windows.end_us(*cuts), len(cuts[0]) + len(cuts[1]))), goal_us


def _among(window: MergeProblem, stops: Stops) -> Stops:
    """The best cuts among these."""
    places = np.array((0, *stops))
    part = MergeProblem(window.ready_us[places[1:] - 1], _Table.of(window.cost_us, places), non_decreasing=False)
    return tuple(stops[stop - 1] for stop in merge_exact(part).stops)


def _containing(window: MergeProblem, stops: Stops) -> Stops:
    """The cuts that end earliest of those that have these among them."""
    finish_us, found = 0.0, list[int]()
    for start, stop in zip((0, *stops[:-1]), stops, strict=True):
        # Within one group of them: f from its start.
        ends_us, before = np.full(stop - start + 1, np.inf), np.zeros(stop - start + 1, dtype=np.int64)
        ends_us[0] = finish_us
        for at in range(start + 1, stop + 1):
            costs_us = np.maximum(ends_us[: at - start], window.ready_us[at - 1]) + window.cost_us(slice(start, at), at)
            before[at - start] = int(costs_us.argmin())
            ends_us[at - start] = costs_us[before[at - start]]
        finish_us, at, inside = float(ends_us[-1]), stop - start, []
        while at > 0:
            inside.append(start + at)
            at = int(before[at])
        found += reversed(inside)
    return tuple(found)


def _latest(window: MergeProblem, end_us: float) -> Floats:
    """By prefix: the latest end of it with which the rest can end by `end_us`; −∞ where none can."""
    latest_us = np.full(window.count + 1, -np.inf)
    latest_us[-1] = end_us
    for stop in range(window.count, 0, -1):
        before_us = latest_us[stop] - window.cost_us(slice(0, stop), stop)
        usable = before_us >= window.ready_us[stop - 1] - TIE * end_us
        np.maximum(latest_us[:stop], np.where(usable, before_us, -np.inf), out=latest_us[:stop])
    return latest_us


def _cheapest_rest(window: MergeProblem) -> Floats:
    """By prefix: what the messages of the rest take at the least."""
    rest_us = np.zeros(window.count + 1)
    for start in range(window.count - 1, -1, -1):
        stop = slice(start + 1, window.count + 1)
        rest_us[start] = float((window.cost_us(start, stop) + rest_us[stop]).min())
    return rest_us


@dataclass
class _Labels(Columns):
    """What prefixes end with, one prefix after the other."""

    f: Floats
    """When the last reduce-scatter ends, or the next one's first gradient is ready."""
    phi: Floats
    """The same of groups that are closed."""
    opened: Ints
    """Where the open group starts: at the prefix's end where none is open."""
    far: Ints
    """The last place at which it can be closed in time."""
    place: Ints
    origin: Ints


@dataclass(frozen=True)
class _Limits:
    """What labels have to keep to that may lead to something better than what is known."""

    most_us: float
    """f and φ together, at the end."""
    least_us: tuple[float, float]
    """Both windows' optima."""
    latest_us: tuple[Floats, Floats]
    """By prefix: f and φ with which the rest can end in time, were the other window at its optimum."""
    rest_us: tuple[Floats, Floats]
    """By prefix: what the messages of the rest take at the least."""

    @classmethod
    def of(cls, windows: TwoWindows, best: Cuts) -> _Limits:
        both = windows.scatters, windows.gathers
        f, phi = (float(finish_times(window)[0][-1]) for window in both)
        least_us = f, max(phi, windows.forward_us)
        most_us = (windows.end_us(*best) + windows.forward_us) * (1.0 - TIE)
        latest_us = _latest(both[0], most_us - least_us[1]), _latest(both[1], most_us - least_us[0])
        return cls(most_us, least_us, latest_us, (_cheapest_rest(both[0]), _cheapest_rest(both[1])))


def _improved(windows: TwoWindows, best: Cuts, width: int | None) -> tuple[Cuts, bool]:
    """The program over labels: the best cuts, and whether no label was lost."""
    count, falls = windows.scatters.count, _falls(windows.gathers)
    width = width or max(FEW_LABELS, min(MANY_LABELS, LABELS_AT_ALL // count))
    limits, complete = _Limits.of(windows, best), True
    zero = np.zeros(1, dtype=np.int64)
    reach = _reach(windows.gathers, limits.latest_us[1], 0, 0.0)
    every = last = _Labels(windows.scatters.ready_us[:1], windows.gathers.ready_us[:1], zero, zero + reach, zero, zero)
    for stop in range(1, count + 1):
        last = _sent(windows, limits, every, stop)
        last = last.take(np.lexsort((-last.opened, last.phi, last.f)))
        # f is in order. Where costs may fall with more gradients, groups that start elsewhere are not comparable.
        columns: list[Floats | Ints] = [last.phi, -last.opened, *([last.opened] if falls else [])]
        kept, all_kept = pareto(columns, np.arange(last.f.size), width)
        complete &= all_kept
        last = last.take(kept)
        if stop < count:
            for index in np.flatnonzero(last.opened == stop).tolist():
                last.far[index] = _reach(windows.gathers, limits.latest_us[1], stop, float(last.phi[index]))
        every = every.join(last)
    if last.f.size:
        label = every.f.size - last.f.size
        label += int((last.f + np.maximum(last.phi, windows.forward_us)).argmin())
        best = min([_cuts(every, label), best], key=lambda cuts: windows.end_us(*cuts))
    return best, complete


def _sent(windows: TwoWindows, limits: _Limits, every: _Labels, stop: int) -> _Labels:
    """Every label with a bucket from there to `stop`, its group left open, and closed; those within the limits."""
    scatters, gathers = windows.scatters, windows.gathers
    origin = np.flatnonzero(every.far >= stop)
    f = np.maximum(every.f[origin], scatters.ready_us[stop - 1])
    f += scatters.cost_us(slice(0, stop), stop)[every.place[origin]]
    in_time = f <= limits.latest_us[0][stop] * (1.0 + TIE)
    origin, f = origin[in_time], f[in_time]
    before = every.take(origin)
    phi = np.maximum(before.phi, gathers.ready_us[stop - 1]) + gathers.cost_us(slice(0, stop), stop)[before.opened]
    if stop < windows.scatters.count:  # nothing of the rest begins before
        f, phi = np.maximum(f, scatters.ready_us[stop]), np.maximum(phi, gathers.ready_us[stop])
    place = np.full(f.size, stop)
    left_open = _Labels(f, before.phi, before.opened, before.far, place, origin)
    closed = _Labels(f, phi, place, before.far, place, origin)
    found = left_open.take(np.flatnonzero(before.far > stop))
    found = found.join(closed.take(np.flatnonzero(phi <= limits.latest_us[1][stop] * (1.0 + TIE))))
    least_us = np.maximum(found.f + limits.rest_us[0][stop], limits.least_us[0])
    least_us += np.maximum(found.phi + limits.rest_us[1][found.opened], limits.least_us[1])
    return found.take(np.flatnonzero(least_us <= limits.most_us))


def _cuts(every: _Labels, label: int) -> Cuts:
    buckets: list[int] = []
    groups: list[int] = []
    while label > 0:
        buckets.append(int(every.place[label]))
        if every.opened[label] == every.place[label]:
            groups.append(buckets[-1])
        label = int(every.origin[label])
    return tuple(reversed(buckets)), tuple(reversed(groups))


def _falls(window: MergeProblem) -> bool:
    """Whether a bucket with more gradients before it may cost less."""
    return any(
        bool((np.diff(costs_us := window.cost_us(slice(0, stop), stop)) > TIE * costs_us[1:]).any())
        for stop in range(1, window.count + 1)
    )


def _reach(window: MergeProblem, latest_us: Floats, start: int, begun_us: float) -> int:
    """The last place at which a group that starts there, behind others that end then, can end in time; 0: none."""
    if start == window.count:
        return 0
    stops = slice(start + 1, window.count + 1)
    ends_us = np.maximum(begun_us, window.ready_us[start:]) + window.cost_us(start, stops)
    in_time = np.flatnonzero(ends_us <= latest_us[stops] * (1.0 + TIE))
    return 0 if in_time.size == 0 else start + 1 + int(in_time[-1])


def _searched(windows: TwoWindows, best: Cuts) -> Cuts:
    """Cuts moved, dropped, and made ones of both windows or of one, while that ends earlier."""

    def judge(choice: Sequence[tuple[int, int]]) -> float:
        return windows.end_us(*cuts_of(choice))

    closes = set(best[1])
    choice = tuple((stop, int(stop in closes)) for stop in best[0])
    return cuts_of(local_search(choice, judge, LOCAL_WORK, forms=2, then="stay", reach=windows.scatters.count))


def cuts_of(choice: Sequence[tuple[int, int]]) -> Cuts:
    """Buckets and groups of (stop, whether a group stops there); the last group does."""
    groups = [stop for stop, closes in choice[:-1] if closes]
    return tuple(stop for stop, _ in choice), (*groups, choice[-1][0])


def _with_fewer(windows: TwoWindows, buckets: Stops, groups: Stops) -> Cuts:
    """Fewer gathers, then fewer buckets, as long as that ends no later: the first of them first."""
    if len(buckets) > DROPPED:
        return buckets, groups
    limit_us = windows.end_us(buckets, groups) * (1.0 + TIE)
    for stop in groups[:-1]:
        fewer = tuple(one for one in groups if one != stop)
        if windows.end_us(buckets, fewer) <= limit_us:
            groups = fewer
    for stop in buckets[:-1]:
        fewer = tuple(one for one in buckets if one != stop)
        if stop not in groups and windows.end_us(fewer, groups) <= limit_us:
            buckets = fewer
    return buckets, groups
