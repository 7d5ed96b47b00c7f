"""Search for buckets and their forms: a program over prefixes that keeps Pareto labels.

After a prefix of buckets the step is in a state, of which less is never worse in any column, so a prefix keeps the
labels that none dominates: exact while it may keep all of them and buckets may stop everywhere, else a heuristic.

On one network without contention a state is when the network is free, how far selection has delayed backward, by when
what has arrived could be unpacked, and what selection and unpacking add to compute. On two kinds of link the gather of
bucket b−1 comes between the scatters of buckets b and b+1 on the intra-node links (sorted by bucket + phase), so with
bucket b it is known when these are free for the next scatter; on the inter-node links buckets go in order. What is left
of bucket b is its gather, and what unpacking it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from planner.ir import TIE
from planner.model.codecs import Floats, Ints
from planner.search.tables import BucketTables, cheapest_to_end_us

EXACT_PLACES = 16
"""Up to so many gradients on one network labels also tell apart what they leave out: ties are broken exactly."""
EXACT_LABELS = 256
"""Labels that a prefix may keep there; more is beyond the exact search."""
LABELS = 40
"""Labels that a prefix may keep otherwise."""
LINK_LABELS, MANY_LABELS = 24, 400
"""The same on two kinds of link; the second on up to `FEW_PLACES` places, where all of them can often be kept."""
FEW_PLACES = 17

# One integer ranks labels of equal times: densities above numbers of buckets above boundaries.
_DENSITY_UNIT = 2.0**30
_ORDER_BITS, _BUCKET_BITS = EXACT_PLACES + 1, 5

INTRA, INTER, GATHER, PENDING, DELAY, EXTRA, ARRIVED, OWED = range(8)
"""Columns of a state: when the intra-node links are free, and the inter-node ones (or the one network); what the last
bucket still has to gather, and whether it is one that does; what selection has added to backward, and what selection
and unpacking add to compute; by when all that came before the last bucket could be unpacked, were compute free; what
unpacking the last one takes.
"""
DENSE_COLUMNS, ALL_COLUMNS = 4, 8


@dataclass(frozen=True)
class JointSolution:
    """Stops and forms of buckets; whether no other choice on the grid is better."""

    stops: tuple[int, ...]
    forms: tuple[int, ...]
    end_us: float
    exact: bool


class Columns:
    """Records as columns: a dataclass of arrays that have an entry, along their first axis, for each."""

    def take(self, indices: Ints) -> Self:
        return type(self)(*(column[indices] for column in vars(self).values()))

    def join(self, *others: Self) -> Self:
        parts = zip(*(vars(columns).values() for columns in (self, *others)), strict=True)
        return type(self)(*(np.concatenate(columns) for columns in parts))


@dataclass
class _Labels(Columns):
    """Labels of all prefixes, one prefix after the other."""

    states: Floats
    """Shape (labels, columns)."""
    key: Ints
    """Order among labels of equal times: the largest sum of densities, fewest buckets, earliest boundaries."""
    place: Ints
    origin: Ints
    form: Ints


def search(tables: BucketTables, forms: int, deadline_us: float, labels: int | None = None) -> JointSolution | None:
    """Return the choice among the first `forms` forms that ends earliest; None where none found ends
    by the deadline. A prefix keeps `labels` where not all are kept; default: by links and number of places.
    """
    places = len(tables.places)
    keeps_all = not tables.two_links and int(tables.places[-1]) == places - 1 <= EXACT_PLACES
    rest_us, last_us = _rest(tables, forms)
    latest_us, exact = deadline_us * (1.0 + TIE), True
    none = np.zeros(1, dtype=np.int64)
    every = last = _Labels(np.zeros((1, ALL_COLUMNS)), none, none, none - 1, none)
    for stop in range(1, places):
        last = _send(tables, every, stop, forms, keeps_all)
        ends_us = _ends_us(tables, last.states)
        if stop < places - 1:
            ends_us = np.maximum(ends_us, last.states[:, INTER] + rest_us[stop])
            ends_us = np.maximum(ends_us, tables.ready_us[-1] + last.states[:, DELAY] + last_us)
        # What cannot end by the deadline with the cheapest rest would only push better labels out.
        hopeful = np.flatnonzero(ends_us <= latest_us)
        last, ends_us = last.take(hopeful), ends_us[hopeful]
        if tables.two_links:
            most = labels or (MANY_LABELS if places <= FEW_PLACES else LINK_LABELS)
            kept, complete = _earliest(last, ends_us, most)
        elif keeps_all:
            kept, complete = _exact_frontier(last, tables.unpacks)
        else:
            kept, complete = _spread_frontier(last.states, ends_us, tables.unpacks, labels or LABELS), False
        exact &= complete
        last = last.take(kept)
        every = every.join(last)
    if last.key.size == 0:
        return None
    ends_us = _ends_us(tables, last.states)
    equals = np.flatnonzero(ends_us <= ends_us.min() * (1.0 + TIE))
    best = int(equals[last.key[equals].argmin()])
    chosen = []
    label = len(every.key) - len(last.key) + best
    while every.origin[label] >= 0:
        chosen.append((int(tables.places[every.place[label]]), int(every.form[label])))
        label = int(every.origin[label])
    stops, used = zip(*reversed(chosen), strict=True)
    return JointSolution(stops, used, float(ends_us[best]), exact)


def _rest(tables: BucketTables, forms: int) -> tuple[Floats, float]:
    """Return the least time that follows on the links after each place, and that of the last bucket."""
    cost_us = tables.cost_us[:forms]
    last_us = cost_us[:, :-1, -1] + tables.gather_us[:forms, :-1, -1]
    best_us = cost_us.min(axis=0)
    best_us[:-1, -1] = last_us.min(axis=0)
    return cheapest_to_end_us(best_us), float((last_us + tables.scatter_us[:forms, :-1, -1]).min())


def least_ends_us(tables: BucketTables, forms: int) -> float:
    """Return a lower bound of the end of compute and network, over the first `forms` forms.

    On one network selection and unpacking are taken to be free; on two kinds of link each bucket has its selection, and
    the intra-node links, for itself.
    """
    count = len(tables.places) - 1
    finish_us = np.zeros(count + 1)
    before_us = tables.scatter_us[:forms] + tables.select_us[:forms] if tables.two_links else 0.0 * tables.select_us[:1]
    sent_us = np.zeros(1)
    for stop in range(1, count + 1):
        begun_us = np.maximum(finish_us[:stop], tables.ready_us[stop] + before_us[:, :stop, stop])
        sent_us = begun_us + tables.cost_us[:forms, :stop, stop]
        finish_us[stop] = sent_us.min()
    return max(float((sent_us + tables.gather_us[:forms, :count, count]).min()), tables.compute_end_us)


def _send(tables: BucketTables, labels: _Labels, stop: int, forms: int, ordered: bool) -> _Labels:
    """Return every label with every bucket from there to `stop`, in every form; `ordered`: with exact keys."""
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
        intra_us = before[:, INTRA]
        if tables.phased[form]:
            begun_us = intra_us = np.maximum(begun_us, intra_us) + scatter_us
        after[:, INTER] = np.maximum(begun_us, before[:, INTER]) + cost_us
        gathered_us = np.maximum(intra_us, before[:, INTER]) + before[:, GATHER]
        after[:, INTRA] = np.where(before[:, PENDING] > 0.0, gathered_us, intra_us)
        after[:, GATHER], after[:, PENDING] = gather_us, float(tables.phased[form])
        owed_us = before[:, OWED]
        come_us = np.maximum(before[:, ARRIVED], after[:, INTRA]) + owed_us
        arrived_us = np.where(owed_us > 0.0, come_us, before[:, ARRIVED])
        after[:, OWED] = unpack_us if tables.phased[form] else 0.0
        if not tables.phased[form]:
            arrived_us = np.where(unpack_us > 0.0, np.maximum(arrived_us, after[:, INTER]) + unpack_us, arrived_us)
        after[:, ARRIVED] = arrived_us
        key = labels.key[possible]
        if tables.two_links:
            key = key + 1
        elif ordered:
            densities = np.rint(tables.densities[form, :stop, stop] * _DENSITY_UNIT).astype(np.int64)
            early = 1 << (EXACT_PLACES - int(tables.places[stop]))
            key = key + (-densities * (1 << (_ORDER_BITS + _BUCKET_BITS)) + (1 << _ORDER_BITS) - early)[of]
        found.append(_Labels(after, key, np.full(of.size, stop), possible, np.full(of.size, form)))
    return found[0].join(*found[1:])


def _ends_us(tables: BucketTables, states: Floats) -> Floats:
    """Return the ends if no bucket follows."""
    sent_us = np.maximum(states[:, INTRA], states[:, INTER])
    sent_us = np.where(states[:, PENDING] > 0.0, sent_us + states[:, GATHER], sent_us)
    unpacked_us = np.where(states[:, OWED] > 0.0, np.maximum(states[:, ARRIVED], sent_us), states[:, ARRIVED])
    unpacked_us = unpacked_us + states[:, OWED]
    return np.asarray(np.maximum(np.maximum(sent_us, unpacked_us), tables.compute_end_us + states[:, EXTRA]))


def pareto(columns: Sequence[NDArray[np.float64] | Ints], order: Ints, most: int) -> tuple[Ints, bool]:
    """Return the labels, looked at in this order, that none before them is at least as good as in every column.

    Less is better. At most so many indices are returned, and whether these are all of them.
    """
    values = [column[order] for column in columns]
    alive, position = np.ones(order.size, dtype=bool), 0
    kept: list[int] = []
    while position < order.size and len(kept) < most:
        kept.append(position)
        worse = alive[position:]
        for column in values:
            worse = worse & (column[position:] >= column[position])
        alive[position:] &= ~worse
        following = np.flatnonzero(alive[position:])
        position = position + int(following[0]) if following.size else order.size
    return np.asarray(order[kept]), position >= order.size


def _earliest(labels: _Labels, ends_us: Floats, most: int) -> tuple[Ints, bool]:
    """Labels that none dominates, those that might end earliest first."""
    states = labels.states[:, : ALL_COLUMNS if labels.states[:, DELAY:].any() else DENSE_COLUMNS]
    return pareto(list(states.T), np.lexsort((labels.key, states.sum(axis=1), ends_us)), most)


def _exact_frontier(labels: _Labels, unpacks: bool) -> tuple[Ints, bool]:
    """Labels that no other one dominates in time and in what it leaves out; at most `EXACT_LABELS`."""
    times = [labels.states[:, column] for column in ((INTER, DELAY, ARRIVED, EXTRA) if unpacks else (INTER, DELAY))]
    kept, _ = pareto([*times, labels.key], np.lexsort((labels.key, *reversed(times))), EXACT_LABELS)
    return kept, kept.size < EXACT_LABELS


def _spread_frontier(states: Floats, ends_us: Floats, unpacks: bool, width: int) -> Ints:
    """Return some labels of the frontier: spread over it with both ends, and as many that might end earliest."""
    pairs = [(states[:, INTER], states[:, DELAY])]
    if unpacks:
        pairs.append((np.maximum(states[:, INTER], states[:, ARRIVED]), states[:, EXTRA]))
    return np.unique(np.concatenate([_spread(first, second, ends_us, width) for first, second in pairs]))


def _spread(first: Floats, second: Floats, ends_us: Floats, width: int) -> Ints:
    if first.size == 0:
        return np.zeros(0, dtype=np.int64)
    # What one label dominates is most of all: only the rest is sorted.
    best = int((first + second).argmin())
    hopeful = (first < first[best]) | (second < second[best])
    hopeful[best] = True
    order = np.flatnonzero(hopeful)
    order = order[np.lexsort((second[order], first[order]))]
    lowest = np.minimum.accumulate(second[order])
    frontier = order[np.concatenate([[True], second[order][1:] < lowest[:-1]])]
    if frontier.size <= width:
        return np.asarray(frontier)
    evenly = frontier[np.linspace(0, frontier.size - 1, width // 2).astype(np.int64)]
    earliest = frontier[np.argsort(ends_us[frontier], kind="stable")[: width - width // 2]]
    return np.unique(np.concatenate([evenly, earliest]))
