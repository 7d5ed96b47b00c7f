"""Merging and densities together on one network without contention, by labels.

After a prefix of buckets the step is in a state: when the network is free, how far selection has delayed backward, by
when what has arrived could be unpacked, and what unpacking adds after backward. Less of each is never worse, so a
prefix keeps the labels that none dominates; with a bound on their number it is a heuristic. Places that buckets may
stop at are a grid, and so are densities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.ir import TIE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EXACT_PLACES = 16
"""Up to so many gradients labels also tell apart what they leave out, so that ties are broken exactly."""
EXACT_LABELS = 256
"""Labels that a prefix may keep there; more is beyond the exact search."""
LABELS = 40
"""Labels that a prefix may keep otherwise."""

_DENSITY_UNIT = 2.0**30
_ORDER_BITS, _BUCKET_BITS = EXACT_PLACES + 1, 5


@dataclass(frozen=True, kw_only=True)
class BucketTables:
    """Every bucket between two places of a grid, in every form. Tables have shape (forms, places, places).

    Where a bucket cannot have a form, its cost is infinite.
    """

    places: Ints
    """From 0 to the number of gradients."""
    ready_us: Floats
    """When all gradients before each place are ready, without selection. Shape (places,)."""
    compute_end_us: float
    cost_us: Floats
    """On the network; of two kinds of link, on those between nodes."""
    select_us: Floats
    """Compute time before the bucket is sent."""
    unpack_us: Floats
    """Compute time after backward and after it has arrived."""

    @property
    def unpacks(self) -> bool:
        return bool(self.unpack_us.any())


@dataclass(frozen=True, kw_only=True)
class JointTables(BucketTables):
    """On one network. Form 0 is dense; the others are densities, from the least compression to the most."""

    densities: Floats
    """Summed over the gradients of the bucket."""


@dataclass(frozen=True)
class JointSolution:
    """Where buckets stop and their forms; whether no other choice on the grid is better."""

    stops: tuple[int, ...]
    forms: tuple[int, ...]
    end_us: float
    exact: bool


@dataclass
class _Labels:
    """Labels of all prefixes, one prefix after the other."""

    network_us: Floats
    delay_us: Floats
    """What selection has added to backward."""
    arrived_us: Floats
    """By when all that has arrived could be unpacked, were compute free."""
    extra_us: Floats
    """What selection and unpacking add to compute."""
    key: Ints
    """Order among labels of equal times: the largest sum of densities, fewest buckets, earliest boundaries."""
    place: Ints
    origin: Ints
    form: Ints

    @classmethod
    def first(cls) -> _Labels:
        """Nothing is sent yet."""
        zero, none = np.zeros(1), np.zeros(1, dtype=np.int64)
        return cls(zero, zero, zero, zero, none, none, none - 1, none)

    def take(self, indices: Ints) -> _Labels:
        return _Labels(*(column[indices] for column in vars(self).values()))

    def join(self, other: _Labels) -> _Labels:
        columns = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Labels(*(np.concatenate(pair) for pair in columns))


def least_ends_us(tables: JointTables, forms: int) -> float:
    """No choice among the first `forms` forms ends compute and network earlier: selection and unpacking are free."""
    finish_us = np.zeros(len(tables.places))
    best_us = tables.cost_us[:forms].min(axis=0)
    for stop in range(1, len(tables.places)):
        finish_us[stop] = (np.maximum(finish_us[:stop], tables.ready_us[stop]) + best_us[:stop, stop]).min()
    return max(float(finish_us[-1]), tables.compute_end_us)


def search(tables: JointTables, forms: int, deadline_us: float, labels: int = LABELS) -> JointSolution | None:
    """The choice among the first `forms` forms that ends earliest; None where none found ends by the deadline.

    Args:
        tables: the buckets.
        forms: dense, and the densities that may be used.
        deadline_us: when a known choice ends.
        labels: to keep for each prefix where not all are.
    """
    count = int(tables.places[-1])
    exact = count <= EXACT_PLACES and len(tables.places) == count + 1
    rest_us, last_us = _rest(tables, forms)
    latest_us, complete = deadline_us * (1.0 + TIE), True
    all_labels = last = _Labels.first()
    for stop in range(1, len(tables.places)):
        ends = _send(tables, all_labels, stop, forms, exact)
        ends_us = np.maximum(tables.compute_end_us + ends.extra_us, np.maximum(ends.arrived_us, ends.network_us))
        if stop < len(tables.places) - 1:
            ends_us = np.maximum(ends_us, ends.network_us + rest_us[stop])
            ends_us = np.maximum(ends_us, tables.ready_us[-1] + ends.delay_us + last_us)
        hopeful = np.flatnonzero(ends_us <= latest_us)
        ends, ends_us = ends.take(hopeful), ends_us[hopeful]
        kept = _exact_frontier(ends, tables.unpacks) if exact else _some_frontier(ends, ends_us, tables.unpacks, labels)
        complete &= exact and kept.size < EXACT_LABELS
        last = ends.take(kept)
        all_labels = all_labels.join(last)
    if last.key.size == 0:
        return None
    return _read(tables, all_labels, last, complete)


def _rest(tables: JointTables, forms: int) -> tuple[Floats, float]:
    """The least that the network has to do after each place, and the least that the last bucket takes."""
    best_us = tables.cost_us[:forms].min(axis=0)
    rest_us = np.zeros(len(tables.places))
    for start in range(len(tables.places) - 2, -1, -1):
        rest_us[start] = (best_us[start, start + 1 :] + rest_us[start + 1 :]).min()
    return rest_us, float(best_us[:-1, -1].min())


def _send(tables: JointTables, labels: _Labels, stop: int, forms: int, exact: bool) -> _Labels:
    """Every label with every bucket from there to `stop`, in every form."""
    columns, ready_us = [], tables.ready_us[stop]
    for form in range(forms):
        possible = np.flatnonzero(np.isfinite(tables.cost_us[form, :stop, stop])[labels.place])
        if possible.size == 0:
            continue
        of = labels.place[possible]
        delay_us, extra_us = labels.delay_us[possible], labels.extra_us[possible]
        arrived_us = labels.arrived_us[possible]
        if form:
            select_us, unpack_us = tables.select_us[form, :stop, stop][of], tables.unpack_us[form, :stop, stop][of]
            delay_us, extra_us = delay_us + select_us, extra_us + select_us + unpack_us
        cost_us = tables.cost_us[form, :stop, stop][of]
        network_us = np.maximum(labels.network_us[possible], ready_us + delay_us) + cost_us
        if form and tables.unpacks:
            arrived_us = np.maximum(arrived_us, network_us) + unpack_us
        key = labels.key[possible]
        if exact:
            key = key + _keys(tables, form, stop)[of]
        columns.append(
            (network_us, delay_us, arrived_us, extra_us, key, np.full(of.size, stop), possible, np.full(of.size, form))
        )
    return _Labels(*(np.concatenate(parts) for parts in zip(*columns, strict=True)))


def _keys(tables: JointTables, form: int, stop: int) -> Ints:
    """What a bucket adds to the order among labels of equal times."""
    densities = np.rint(tables.densities[form, :stop, stop] * _DENSITY_UNIT).astype(np.int64)
    early = 1 << (EXACT_PLACES - int(tables.places[stop]))
    return np.asarray(-densities * (1 << (_ORDER_BITS + _BUCKET_BITS)) + (1 << _ORDER_BITS) - early)


def _exact_frontier(labels: _Labels, unpacks: bool) -> Ints:
    """Labels that no other one dominates in time and in what it leaves out; at most `EXACT_LABELS`."""
    times = [labels.network_us, labels.delay_us]
    times += [labels.arrived_us, labels.extra_us] if unpacks else []
    order = np.lexsort((labels.key, *reversed(times)))
    values = [column[order] for column in (*times, labels.key)]
    alive, position = np.ones(order.size, dtype=bool), 0
    kept: list[int] = []
    while position < order.size and len(kept) < EXACT_LABELS:
        kept.append(position)
        worse = alive[position:]
        for column in values[1:]:
            worse = worse & (column[position:] >= column[position])
        alive[position:] &= ~worse
        following = np.flatnonzero(alive[position:])
        position = position + int(following[0]) if following.size else order.size
    return np.asarray(order[kept])


def _some_frontier(labels: _Labels, ends_us: Floats, unpacks: bool, width: int) -> Ints:
    """Some labels of the frontier: spread over it, both ends included, and as many that might end earliest."""
    if not unpacks:
        return _some(labels.network_us, labels.delay_us, ends_us, width)
    latest_us = np.maximum(labels.network_us, labels.arrived_us)
    halves = [
        _some(labels.network_us, labels.delay_us, ends_us, width), _some(latest_us, labels.extra_us, ends_us, width)
    ]  # fmt: skip
    return np.unique(np.concatenate(halves))


def _some(first: Floats, second: Floats, ends_us: Floats, width: int) -> Ints:
    order = np.lexsort((second, first))
    if order.size == 0:
        return np.asarray(order)
    lowest = np.minimum.accumulate(second[order])
    frontier = order[np.concatenate([[True], second[order][1:] < lowest[:-1]])]
    if frontier.size <= width:
        return np.asarray(frontier)
    evenly = frontier[np.linspace(0, frontier.size - 1, width // 2).astype(np.int64)]
    earliest = frontier[np.argsort(ends_us[frontier], kind="stable")[: width - width // 2]]
    return np.unique(np.concatenate([evenly, earliest]))


def _read(tables: JointTables, labels: _Labels, last: _Labels, exact: bool) -> JointSolution:
    """The best of the last labels, walked back."""
    ends_us = np.maximum(last.network_us, np.maximum(last.arrived_us, tables.compute_end_us + last.extra_us))
    equals = np.flatnonzero(ends_us <= ends_us.min() * (1.0 + TIE))
    best = int(equals[last.key[equals].argmin()])
    stops, forms = [], []
    label = len(labels.key) - len(last.key) + best
    while labels.origin[label] >= 0:
        stops.append(int(tables.places[labels.place[label]]))
        forms.append(int(labels.form[label]))
        label = int(labels.origin[label])
    return JointSolution(tuple(reversed(stops)), tuple(reversed(forms)), float(ends_us[best]), exact)


def grid(count: int, most: int, schedules: Sequence[Sequence[int]]) -> Ints:
    """Places where buckets may stop: evenly spaced where gradients are many, and those of known schedules."""
    stride = -(-count // most)
    even = np.arange(0, count + 1, stride, dtype=np.int64)
    known = [np.asarray(stops, dtype=np.int64) for stops in schedules if stride > 1]
    return np.unique(np.concatenate([even, np.array([0, count], dtype=np.int64), *known]))
