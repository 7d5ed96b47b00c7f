"""What steps and links are like, seen from inside a run: from marks that are taken anyway, and a few messages.

A run cannot stop communicating to see how fast it computes. How much messages slow computation down follows from two
plans that overlap differently: where o is how long messages are on the link while backward computes, and b how long
backward takes, b = b₀ + (1 − 1/c)·o for both, which gives c. How much longer messages take beside computation is held
against the links' curve.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.documents.profile import Contention, Profile, Sample
from planner.jobs.replanning import profile_of_run, without_contention
from planner.profile.compute import RankTimes, rank_times
from planner.profile.links import measure_all_reduce
from planner.profile.progress import Progress
from runtime.monitor.drift import bucket_times, complete
from runtime.session.session import Session

LARGEST_BYTES = 16 * 1024 * 1024
"""Largest message that is sent to time it; those of steps are timed as they are."""
ALONE = 0.1
"""A message is one beside which nothing is computed where less of it lies in backward."""
MOST_SHARED, MOST_SLOWED = 0.7, 5.0
"""Bounds of what is believed: of 1 − 1/c, and of the network's factor."""

Curve = tuple[Sample, ...]


@dataclass(frozen=True)
class Overlap:
    """Means of some steps on one rank, with one plan."""

    backward_end_us: float
    """From the start of forward."""
    shared_us: float
    """How long messages were on the link before that."""
    sent_us: tuple[float, ...]
    """By bucket; empty where that is not known."""
    beside: tuple[float, ...]
    """By bucket, which part of it lay before the end of backward."""


@dataclass(frozen=True)
class RankSample:
    """What one rank saw of its last steps."""

    times: RankTimes
    busy_us: list[list[tuple[float, float]]]
    """By step, when messages were on the link."""
    overlap: Overlap


def observe(session: Session, most: int) -> RankSample | None:
    """Return what this rank saw of at most so many last steps; None where no step was seen whole."""
    clock = session.recorder.clock
    steps = complete(session.recorder.steps, clock)[-most:]
    if not steps:
        return None
    busy_us = [
        [
            (clock.between_us(step.forward, sent.start), clock.between_us(step.forward, sent.end))
            for sent in step.sent
            if sent.start is not None and sent.end is not None
        ]
        for step in steps
    ]
    ends_us = [clock.between_us(step.forward, step.backward_end) for step in steps]
    before_us = [
        [max(0.0, min(end, until) - start) for start, end in busy] for busy, until in zip(busy_us, ends_us, strict=True)
    ]
    durations = [bucket_times(step, clock) for step in steps]
    whole = all(durations) and len({len(one) for one in durations}) == 1
    sent_us = tuple(map(statistics.median, zip(*durations, strict=True))) if whole else ()
    parts = [
        [part / max(end - start, 1e-9) for part, (start, end) in zip(parts, busy, strict=True)]
        for parts, busy in zip(before_us, busy_us, strict=True)
    ]
    overlap = Overlap(
        backward_end_us=statistics.median(ends_us),
        shared_us=statistics.median(map(sum, before_us)),
        sent_us=sent_us,
        beside=tuple(map(statistics.fmean, zip(*parts, strict=True))) if whole else (),
    )
    return RankSample(rank_times(steps, session.plan.gradients, clock), busy_us, overlap)


def time_links(session: Session, longest_s: float) -> tuple[Curve, Curve]:
    """Send messages of several sizes for at most about twice this long; every rank calls it between two steps."""
    size_bytes = min(LARGEST_BYTES, sum(p.numel() * p.element_size() for p in session.parameters.values()))
    with session.world.error_context("timing the all-reduce"):
        return measure_all_reduce(session.world, session.device, size_bytes, Progress(), longest_s, longest_s)


def with_own_messages(curves: tuple[Curve, Curve], sizes_bytes: Sequence[int], ranks: Sequence[Overlap]) -> tuple[Curve, Curve]:
    """Add the steps' own messages that are larger than those that were timed, where nothing was computed beside them.

    The rank that comes last waits for nobody, so that the shortest of all ranks counts.
    """
    if not all(len(one.sent_us) == len(sizes_bytes) for one in ranks):
        return curves
    own = {
        float(size): min(one.sent_us[at] for one in ranks)
        for at, size in enumerate(sizes_bytes)
        if max(one.beside[at] for one in ranks) < ALONE
    }
    alone, queued = (
        (*curve, *sorted((size, round(t, 3)) for size, t in own.items() if size > curve[-1][0] and t >= curve[-1][1]))
        for curve in curves
    )
    return alone, queued


def find_contention(
    first: Sequence[Overlap], second: Sequence[Overlap], sizes_bytes: Sequence[int], curve: Curve
) -> Contention | None:
    """Return how two plans say that compute and network slow each other down, None where they overlap alike.

    `first` and `second` have one record for each rank; `sizes_bytes` are the second one's buckets.
    """
    backward_us, shared_us = (
        statistics.fmean(getattr(b, name) - getattr(a, name) for a, b in zip(first, second, strict=True))
        for name in ("backward_end_us", "shared_us")
    )
    if abs(shared_us) < 0.05 * statistics.fmean(one.backward_end_us for one in first):
        return None
    lost = min(max(backward_us / shared_us, 0.0), MOST_SHARED)
    sizes, times_us = zip(*curve, strict=True)
    taken_us = alone_us = 0.0
    for at, size in enumerate(sizes_bytes if all(len(one.sent_us) == len(sizes_bytes) for one in second) else ()):
        if min(one.beside[at] for one in second) > 0.5:
            taken_us += min(one.sent_us[at] for one in second)
            alone_us += float(np.interp(size, sizes, times_us)) * max(1.0, size / sizes[-1])
    network = min(max(taken_us / alone_us, 1.0), MOST_SLOWED) if alone_us > 0.0 else 1.0
    return Contention(compute=round(1.0 / (1.0 - lost), 4), network=round(network, 4))


def make_profile(
    session: Session, ranks: Sequence[RankSample], curves: tuple[Curve, Curve], contention: Contention | None
) -> Profile:
    """Return what `planner profile` would say; what messages cost computation is taken off again."""
    times = [one.times for one in ranks]
    if contention is not None:
        times = [without_contention(one.times, one.busy_us, contention) for one in ranks]
    found = profile_of_run(session, None, times, curves)
    assert found.cluster is not None
    return found if contention is None else replace(found, cluster=replace(found.cluster, contention=contention))
