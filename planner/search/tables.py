"""The forms that a bucket may have, and every bucket in every form as arrays of what it spends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.phases import measured_curve
from planner.model import codecs
from planner.model.codecs import Column, Floats, Form, Ints
from planner.model.compression import Limits
from planner.model.problem import Problem
from runtime.errors import InputError
from runtime.plan.transports import LIBRARY, TORUS_2D, TRANSPORTS, Transport

DENSE = (LIBRARY, TORUS_2D)
"""Transports of dense buckets that every search on two kinds of link looks at."""


def has_two_links(problem: Problem) -> bool:
    """Return whether there are several nodes of several ranks, and costs for both kinds of link."""
    cluster = problem.cost.cluster
    if cluster.nodes == 1 or cluster.ranks_per_node == 1:
        return False
    try:
        return bool(problem.phases(TORUS_2D))
    except InputError:
        return False


def dense_transports(problem: Problem) -> tuple[Transport, ...]:
    """Return transports that a dense bucket may have on two kinds of link: flat ones of the planner's own, such as
    trees, only where they and the library are known equally well.

    What a tree costs by formula says little compared with what the library was measured to take, which may use trees
    itself.
    """
    exact = [transport for transport in TRANSPORTS.values() if transport.exact]
    return tuple(each for each in exact if each in DENSE or _is_comparable(problem, each))


def _is_comparable(problem: Problem, transport: Transport) -> bool:
    cluster = problem.cost.cluster
    if measured_curve(cluster, LIBRARY.collective) is not None and measured_curve(cluster, transport.algorithm) is None:
        return False
    try:
        return bool(problem.phases(transport))
    except InputError:
        return False


def forms_on_links(forms: Sequence[Form], dense: Sequence[Transport] = DENSE) -> tuple[Form, ...]:
    """Return of forms on one network those on two kinds of link: dense (first), then the others, flat and by phases."""
    return (
        *(Form(transport, codecs.DENSE) for transport in dense),
        *(of for form in forms for of in form.codec.on_links(form)),
    )


def flat_forms(compressed: Sequence[Form]) -> tuple[Form, ...]:
    """Return the forms on one network, from the least to the most compression, dense first."""
    return (codecs.DENSE_FORM, *sorted(compressed, key=lambda form: form.ratio))


@dataclass(frozen=True, kw_only=True)
class BucketTables:
    """Every bucket between two places of a grid, in every form. Tables have shape (forms, places, places).

    Where a bucket cannot have a form, its cost is infinite.
    """

    places: Ints
    """Places, from 0 to the number of gradients."""
    ready_us: Floats
    """Ready time of all gradients before each place, without selection. Shape (places,)."""
    compute_end_us: float
    phased: tuple[bool, ...]
    """Flags of the forms that use the intra-node links before and after the inter-node ones."""
    scatter_us: Floats
    """Time on the intra-node links, before."""
    cost_us: Floats
    """Time on the network; of two kinds of link, on the inter-node one."""
    gather_us: Floats
    """Time on the intra-node links, after."""
    select_us: Floats
    """Compute time before the bucket is sent."""
    unpack_us: Floats
    """Compute time after backward and after it has arrived."""
    densities: Floats
    """Summed over the gradients of the bucket; 0 where each rank selects from a part of it."""

    @property
    def two_links(self) -> bool:
        """Return whether there are forms on intra-node links; else the network is one."""
        return any(self.phased)

    @property
    def unpacks(self) -> bool:
        return bool(self.unpack_us.any())

    def only(self, places: Ints) -> BucketTables:
        """Return the tables of some of the places, which are numbers of gradients here."""
        at = np.ix_(np.arange(len(self.phased)), places, places)
        tables = {name: getattr(self, name)[at] for name in Column._fields}
        return replace(self, places=places, ready_us=self.ready_us[places], **tables)


def bucket_tables(problem: Problem, forms: Sequence[Form], limits: Limits, places: Ints) -> BucketTables:
    """Return the tables of a problem, on more than one rank, whose buckets may stop at `places`, from 0 to the number
    of gradients.
    """
    shape = len(forms), len(places), len(places)
    tables = Column(np.zeros(shape), np.full(shape, np.inf), *np.zeros((4, *shape)))
    for number, form in enumerate(forms):
        column_of = form.codec.columns(problem, form, limits)
        for column, stop in enumerate(places[1:].tolist(), start=1):
            for table, values in zip(tables, column_of(places[:column], stop), strict=True):
                table[number, :column, column] = values
    return BucketTables(
        places=places,
        ready_us=np.concatenate([[0.0], problem.ready_us])[places],
        compute_end_us=problem.compute_end_us,
        phased=tuple(form.transport.hierarchical for form in forms),
        **tables._asdict(),
    )


def grid(count: int, most: int, schedules: Sequence[Sequence[int]]) -> Ints:
    """Return places where buckets may stop: evenly spaced where gradients are many, and those of known schedules."""
    stride = -(-count // most)
    even = np.arange(0, count + 1, stride, dtype=np.int64)
    known = [np.asarray(stops, dtype=np.int64) for stops in schedules if stride > 1]
    return np.unique(np.concatenate([even, np.array([0, count], dtype=np.int64), *known]))


def cheapest_to_end_us(best_us: Floats) -> Floats:
    """Return the least cost of buckets from each place on, given the least of each. Shape (places, places)."""
    rest_us = np.zeros(len(best_us))
    for start in range(len(best_us) - 2, -1, -1):
        rest_us[start] = (best_us[start, start + 1 :] + rest_us[start + 1 :]).min()
    return rest_us
