"""Which buckets, and in which form each, on two kinds of link: a program over prefixes, by labels.

After a prefix of buckets the step is in a state. Inside the nodes the gather of bucket b−1 comes between the scatters
of buckets b and b+1 (sorted by bucket + phase), so with bucket b it is known when links inside are free for the next
scatter; between nodes buckets go in order. What is left of bucket b is its gather, and what unpacking it takes.
With what selection has delayed backward by, and with what unpacking adds, that is all that later buckets depend on.
Less of each is never worse, so a prefix keeps the labels that none dominates: exact while it may keep all of them and
buckets may stop everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.ir import TIE
from planner.search.joint import JointSolution
from planner.search.link_tables import LinkTables

LABELS = 24
"""Labels that a prefix may keep."""
MANY_LABELS = 400
"""The same on up to `FEW_PLACES` places, where all of them can often be kept."""
FEW_PLACES = 17

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

INSIDE, BETWEEN, GATHER, PENDING, DELAY, EXTRA, ARRIVED, OWED = range(8)
"""Columns of a state: when the links inside are free, and those between; what the last bucket still has to gather, and
whether it is one that does; what selection has added to backward, and what selection and unpacking add to compute; by
when all that came before the last bucket could be unpacked, were compute free; what unpacking the last one takes.
"""
DENSE_COLUMNS, ALL_COLUMNS = 4, 8


@dataclass
class _Labels:
    """Labels of all prefixes, one prefix after the other."""

    states: Floats
    """Shape (labels, columns)."""
    place: Ints
    origin: Ints
    form: Ints
    buckets: Ints

    @classmethod
    def first(cls) -> _Labels:
        """Nothing is sent yet."""
        none = np.zeros(1, dtype=np.int64)
        return cls(np.zeros((1, ALL_COLUMNS)), none, none - 1, none, none)

    def take(self, indices: Ints) -> _Labels:
        return _Labels(*(column[indices] for column in vars(self).values()))

    def join(self, *others: _Labels) -> _Labels:
        parts = zip(*(vars(labels).values() for labels in (self, *others)), strict=True)
        return _Labels(*(np.concatenate(columns) for columns in parts))


def search(tables: LinkTables, forms: int, deadline_us: float, labels: int | None = None) -> JointSolution | None:
    """The choice among the first `forms` forms that ends earliest, of equal ones one of few buckets; None where none
    found ends by the deadline.

    Args:
        tables: the buckets.
        forms: that may be used.
        deadline_us: when a known choice ends.
        labels: to keep for each prefix; default: by the number of places.
    """
    most = labels or (MANY_LABELS if len(tables.places) <= FEW_PLACES else LABELS)
    rest_us, last_us = rest(tables, forms)
    latest_us, exact = deadline_us * (1.0 + TIE), True
    all_labels = ends = _Labels.first()
    for stop in range(1, len(tables.places)):
        ends = _send(tables, all_labels, stop, forms)
        ends_us = _ends_us(tables, ends.states)
        if stop < len(tables.places) - 1:
            ends_us = np.maximum(ends_us, ends.states[:, BETWEEN] + rest_us[stop])
            ends_us = np.maximum(ends_us, tables.ready_us[-1] + ends.states[:, DELAY] + last_us)
        hopeful = np.flatnonzero(ends_us <= latest_us)
        ends = ends.take(hopeful)
        kept, complete = _undominated(ends, ends_us[hopeful], most)
        exact &= complete
        ends = ends.take(kept)
        all_labels = all_labels.join(ends)
    if ends.place.size == 0:
        return None
    return _read(tables, all_labels, ends, exact)


def rest(tables: LinkTables, forms: int) -> tuple[Floats, float]:
    """The least that follows on the links after each place, and that the last bucket takes on them."""
    cost_us = tables.cost_us[:forms]
    last_us = cost_us[:, :-1, -1] + tables.gather_us[:forms, :-1, -1]
    best_us = cost_us.min(axis=0)
    best_us[:-1, -1] = last_us.min(axis=0)
    rest_us = np.zeros(len(tables.places))
    for start in range(len(tables.places) - 2, -1, -1):
        rest_us[start] = (best_us[start, start + 1 :] + rest_us[start + 1 :]).min()
    return rest_us, float((last_us + tables.scatter_us[:forms, :-1, -1]).min())


def least_ends_us(tables: LinkTables, forms: int) -> float:
    """No choice ends earlier: each bucket has the links inside nodes, and its selection, for itself."""
    count = len(tables.places) - 1
    finish_us = np.zeros(count + 1)
    before_us = tables.scatter_us[:forms] + tables.select_us[:forms]
    sent_us = np.zeros(1)
    for stop in range(1, count + 1):
        begun_us = np.maximum(finish_us[:stop], tables.ready_us[stop] + before_us[:, :stop, stop])
        sent_us = begun_us + tables.cost_us[:forms, :stop, stop]
        finish_us[stop] = sent_us.min()
    return max(float((sent_us + tables.gather_us[:forms, :count, count]).min()), tables.compute_end_us)


def _send(tables: LinkTables, labels: _Labels, stop: int, forms: int) -> _Labels:
    """Every label with every bucket from there to `stop`, in every form."""
    found = []
    for form in range(forms):
        possible = np.flatnonzero(np.isfinite(tables.cost_us[form, :stop, stop])[labels.place])
        if possible.size == 0:
            continue
        before, of = labels.states[possible], labels.place[possible]
        scatter_us, cost_us, gather_us, select_us, unpack_us = (
            table[form, :stop, stop][of]
            for table in (tables.scatter_us, tables.cost_us, tables.gather_us, tables.select_us, tables.unpack_us)
        )
        after = np.empty_like(before)
        after[:, DELAY] = before[:, DELAY] + select_us
        after[:, EXTRA] = before[:, EXTRA] + select_us + unpack_us
        begun_us = tables.ready_us[stop] + after[:, DELAY]
        pending = before[:, PENDING] > 0.0
        inside_us = before[:, INSIDE]
        if tables.phased[form]:
            begun_us = inside_us = np.maximum(begun_us, inside_us) + scatter_us
        after[:, BETWEEN] = np.maximum(begun_us, before[:, BETWEEN]) + cost_us
        gathered_us = np.maximum(inside_us, before[:, BETWEEN]) + before[:, GATHER]
        after[:, INSIDE] = np.where(pending, gathered_us, inside_us)
        after[:, GATHER], after[:, PENDING] = gather_us, float(tables.phased[form])
        owed_us = before[:, OWED]
        come_us = np.maximum(before[:, ARRIVED], after[:, INSIDE]) + owed_us
        arrived_us = np.where(owed_us > 0.0, come_us, before[:, ARRIVED])
        after[:, OWED] = unpack_us if tables.phased[form] else 0.0
        if not tables.phased[form]:
            arrived_us = np.where(unpack_us > 0.0, np.maximum(arrived_us, after[:, BETWEEN]) + unpack_us, arrived_us)
        after[:, ARRIVED] = arrived_us
        numbers = np.full(of.size, stop), possible, np.full(of.size, form), labels.buckets[possible] + 1
        found.append(_Labels(after, *numbers))
    return found[0].join(*found[1:])


def _ends_us(tables: LinkTables, states: Floats) -> Floats:
    """When everything has ended, were no bucket to follow."""
    sent_us = np.maximum(states[:, INSIDE], states[:, BETWEEN])
    sent_us = np.where(states[:, PENDING] > 0.0, sent_us + states[:, GATHER], sent_us)
    unpacked_us = np.where(states[:, OWED] > 0.0, np.maximum(states[:, ARRIVED], sent_us), states[:, ARRIVED])
    unpacked_us = unpacked_us + states[:, OWED]
    return np.asarray(np.maximum(np.maximum(sent_us, unpacked_us), tables.compute_end_us + states[:, EXTRA]))


def _undominated(labels: _Labels, ends_us: Floats, most: int) -> tuple[Ints, bool]:
    """Numbers of the labels that no other is at least as good as in every column; whether these are all of them."""
    columns = ALL_COLUMNS if labels.states[:, DELAY:].any() else DENSE_COLUMNS
    order = np.lexsort((labels.buckets, labels.states[:, :columns].sum(axis=1), ends_us))
    states = labels.states[order, :columns]
    alive, position = np.ones(order.size, dtype=bool), 0
    kept: list[int] = []
    while position < order.size and len(kept) < most:
        kept.append(position)
        alive[position:] &= ~(states[position:] >= states[position]).all(axis=1)
        following = np.flatnonzero(alive[position:])
        position = position + int(following[0]) if following.size else order.size
    return order[kept], position >= order.size


def _read(tables: LinkTables, labels: _Labels, last: _Labels, exact: bool) -> JointSolution:
    """The best of the last labels, walked back."""
    ends_us = _ends_us(tables, last.states)
    equals = np.flatnonzero(ends_us <= ends_us.min() * (1.0 + TIE))
    best = int(equals[last.buckets[equals].argmin()])
    stops, forms = [], []
    label = len(labels.place) - len(last.place) + best
    while labels.origin[label] >= 0:
        stops.append(int(tables.places[labels.place[label]]))
        forms.append(int(labels.form[label]))
        label = int(labels.origin[label])
    return JointSolution(tuple(reversed(stops)), tuple(reversed(forms)), float(ends_us[best]), exact)
