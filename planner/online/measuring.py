"""Measuring steps and links inside a run: from marks that are taken anyway, and a few messages.

A run cannot stop communicating to see how fast it computes. How much messages slow computation down follows from two
plans that overlap differently: where o is how long messages are on the link while backward computes, and b how long
backward takes, b = b₀ + (1 − 1/c)·o for both, which gives c. How much longer messages take during computation is
compared with the links' curve.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.documents.profile import Contention, Profile, Sample
from planner.jobs.replanning import profile_of_run, without_contention
from planner.online.planned_run import DECIDING_S, TRIAL_STEPS, WARM_UP_STEPS, PlannedRun, Steps
from planner.profile.compute import RankTimes, busy_times_us, rank_times
from planner.profile.links import make_bucket, undisturbed
from planner.profile.operator_times import operators_of_run
from runtime.comm.by_device import make_communicator
from runtime.comm.collectives import COLLECTIVES
from runtime.comm.communicator import CommTiming
from runtime.monitor.drift import bucket_times, complete
from runtime.plan import Plan
from runtime.plan.transports import LIBRARY
from runtime.session.session import Session

SMALLEST_BYTES, LARGEST_BYTES = 1024, 4 * 1024 * 1024
"""Sizes of messages that are sent to time them; larger ones are timed as steps send them."""
ALONE, WITHIN = 0.1, 0.5
"""Share of a message within backward below which nothing is computed meanwhile, and above which something is."""
FEWEST_SHARED = 0.05
"""Plans overlap alike where the time that messages share with backward differs by less than this part of backward."""
US_PER_BYTE = 2e-3
"""Expected time of a byte of a message before one has been seen."""
MOST_SHARED, MOST_SLOWED = 0.7, 5.0
"""Bounds of what is believed: of 1 − 1/c, and of the network's factor."""

MEASURED_STEPS = 20
LINKS_SHARE, PASSES = 0.018, 3
"""Share of the steps before them that timed messages may take, and the number of times that each size is sent."""
START_UP_US = 500.0
"""Expected start-up time of a message before one has been seen."""

Curve = tuple[Sample, ...]


@dataclass(frozen=True)
class Overlap:
    """Means of some steps on one rank, with one plan."""

    backward_end_us: float
    """End of backward, from the start of forward."""
    shared_us: float
    """Time that messages were on the link before that."""
    sent_us: tuple[float, ...]
    """Time of each bucket's message; empty where that is not known."""
    within: tuple[float, ...]
    """Share of each bucket's message before the end of backward."""


@dataclass(frozen=True)
class RankSample:
    """Measurements of one rank's last steps."""

    times: RankTimes
    busy_us: list[list[tuple[float, float]]]
    """Times at which messages were on the link, by step."""
    overlap: Overlap


def observe(session: Session, most: int) -> RankSample | None:
    """Return this rank's measurements of at most `most` last steps; None where no step was seen whole."""
    clock = session._recorder.clock
    steps = complete(session._recorder.steps, clock)[-most:]
    if not steps:
        return None
    busy_us = busy_times_us(steps, clock)
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
        within=tuple(map(statistics.fmean, zip(*parts, strict=True))) if whole else (),
    )
    return RankSample(rank_times(steps, session.plan.gradients, clock), busy_us, overlap)


def probe_sizes(model_bytes: int) -> list[int]:
    """Return the sizes of messages that are sent to time them."""
    largest = max(SMALLEST_BYTES, min(LARGEST_BYTES, model_bytes))
    sizes = [SMALLEST_BYTES * 4**power for power in range(20)]
    return [*(size for size in sizes if size < largest), largest]


class LinkProbe:
    """Sends messages of some sizes right behind a step, when all ranks have just met: as in a queue of buckets."""

    def __init__(self, session: Session, sizes_bytes: Sequence[int]) -> None:
        self._clock = session._recorder.clock
        self._communicator = make_communicator(session._world, [COLLECTIVES[LIBRARY]], session._device)
        self._buckets = {size: make_bucket(size, session._device, "a message to time the link") for size in sizes_bytes}
        self._timings: list[tuple[CommTiming, CommTiming]] = []
        self.close = self._communicator.close

    @staticmethod
    def calls(size_bytes: int) -> int:
        """Return how many messages follow one another, so that short ones are no matter of a single wake-up."""
        return 4 if size_bytes <= 64 * 1024 else 2 if size_bytes <= 1024 * 1024 else 1

    def send(self, size_bytes: int) -> None:
        """Send messages of this size and wait for them; on a device, the host does not wait for it."""
        timings = [CommTiming() for _ in range(self.calls(size_bytes))]
        for timing in timings:
            self._communicator.launch(self._buckets[size_bytes].payload, timing)
        self._communicator.wait()
        self._timings.append((timings[0], timings[-1]))

    def times_us(self) -> list[float]:
        """Return how long the messages of each `send` took together, on this rank."""
        return [self._clock.between_us(first.start, last.end) for first, last in self._timings]


def curve_of(sizes_bytes: Sequence[int], ranks: Sequence[Sequence[float]]) -> Curve:
    """Return the time of one message by size, from all ranks' `times_us` of whole passes over the sizes.

    The straggler waits for no other rank, so of each `send` the shortest counts.
    """
    sent_us = np.min(np.array(ranks), axis=0).reshape(-1, len(sizes_bytes))
    calls = [LinkProbe.calls(size) for size in sizes_bytes]
    return undisturbed(list(zip(map(float, sizes_bytes), np.median(sent_us, axis=0) / calls, strict=True)))


def own_messages(sizes_bytes: Sequence[int], ranks: Sequence[Overlap]) -> dict[float, float]:
    """Return time by size of the steps' own messages during which nothing was computed, on the straggler."""
    if not all(len(one.sent_us) == len(sizes_bytes) for one in ranks):
        return {}
    return {
        float(size): min(one.sent_us[at] for one in ranks)
        for at, size in enumerate(sizes_bytes)
        if max(one.within[at] for one in ranks) < ALONE
    }


def us_per_byte(ranks: Sequence[Overlap], model_bytes: int) -> float:
    """Return what a byte of the steps' own messages took, on the rank that waited least for others.

    Of all messages together: two at a time share the link, and what waits for the end of backward may be a few bytes.
    """
    known_us = [sum(one.sent_us) for one in ranks if one.sent_us]
    return min(known_us) / model_bytes if known_us and model_bytes else US_PER_BYTE


def with_own_messages(curve: Curve, own: Mapping[float, float]) -> Curve:
    """Add messages of the steps that are larger than those that were sent to time them."""
    last_bytes, last_us = curve[-1]
    return (*curve, *sorted((size, round(t, 3)) for size, t in own.items() if size > last_bytes and t >= last_us))


@dataclass(frozen=True)
class Seen:
    """One plan's steps: the bytes of its buckets, and what each rank saw."""

    sizes_bytes: tuple[int, ...]
    ranks: tuple[Overlap, ...]

    @property
    def backward_end_us(self) -> float:
        return statistics.fmean(one.backward_end_us for one in self.ranks)

    @property
    def shared_us(self) -> float:
        return statistics.fmean(one.shared_us for one in self.ranks)


def find_contention(plans: Sequence[Seen], curve: Curve) -> Contention | None:
    """Return how much compute and network slow each other down, None where all plans overlap alike."""
    shared_us, ends_us = [plan.shared_us for plan in plans], [plan.backward_end_us for plan in plans]
    if len(plans) < 2 or max(shared_us) - min(shared_us) < FEWEST_SHARED * min(ends_us):
        return None
    lost = min(max(statistics.linear_regression(shared_us, ends_us).slope, 0.0), MOST_SHARED)
    sizes, times_us = zip(*curve, strict=True)
    factors = []
    for plan in plans:
        if all(len(one.sent_us) == len(plan.sizes_bytes) for one in plan.ranks):
            for at, size in enumerate(plan.sizes_bytes):
                if min(one.within[at] for one in plan.ranks) > WITHIN:
                    alone_us = float(np.interp(size, sizes, times_us)) * max(1.0, size / sizes[-1])
                    factors.append(min(one.sent_us[at] for one in plan.ranks) / max(alone_us, 1e-9))
    network = min(max(statistics.median(factors), 1.0), MOST_SLOWED) if factors else 1.0
    return Contention(compute=round(1.0 / (1.0 - lost), 4), network=round(network, 4))


def median_overlap(ones: Sequence[Overlap]) -> Overlap:
    """Return medians over blocks."""
    whole = [one for one in ones if one.sent_us]
    return Overlap(
        statistics.median(one.backward_end_us for one in ones),
        statistics.median(one.shared_us for one in ones),
        tuple(map(statistics.median, zip(*(one.sent_us for one in whole), strict=True))),
        tuple(map(statistics.median, zip(*(one.within for one in whole), strict=True))),
    )


def sizes_of(plan: Plan) -> list[int]:
    """Return the bytes of each bucket."""
    return [bucket.size_bytes or 0 for bucket in plan.buckets]


def measure_run(run: PlannedRun) -> Steps[tuple[list[RankSample], Curve]]:
    """Send messages behind the next steps, as the budget allows, then look at the last steps of all ranks."""
    session = run.session
    mine = (observe(session, WARM_UP_STEPS // 2), run.step_us)
    first: list[tuple[RankSample | None, float]] = run.gather(mine, "comparing the first steps")
    if not all(sample for sample, _ in first):
        return [], ()
    step_us = max(step for _, step in first)
    model_bytes = sum(sizes_of(run.present))
    byte_us = us_per_byte([sample.overlap for sample, _ in first if sample], model_bytes)
    sizes = probe_sizes(model_bytes)
    expected_us = [LinkProbe.calls(size) * (START_UP_US + size * byte_us) for size in sizes]
    waits = [max(1, math.ceil(time_us / (LINKS_SHARE * step_us))) for time_us in expected_us]
    doing = "steps and messages are measured; then rank 0 decides, and what it found is tried"
    run.begin_stage(doing, PASSES * sum(waits), TRIAL_STEPS, DECIDING_S)
    begun, spent_us, probe = session.step, 0.0, LinkProbe(session, sizes)
    try:
        for number in range(PASSES):
            for size, time_us in zip(sizes, expected_us, strict=True):
                yield from run.wait(max(1, math.ceil(time_us / (LINKS_SHARE * step_us))))
                probe.send(size)
            ranks: list[list[float]] = run.gather(probe.times_us(), "comparing times of messages")
            spent_us = max(map(sum, ranks))
            expected_us = [*map(min, expected_us, *(one[-len(sizes) :] for one in ranks))]
            if number + 1 < PASSES:  # what was not expected is made up for
                yield from run.wait(max(0, math.ceil(spent_us / (LINKS_SHARE * step_us)) - session.step + begun))
    finally:
        probe.close()
        run.cost_us += spent_us
    samples: list[RankSample] = run.gather(observe(session, MEASURED_STEPS), "comparing the last steps")
    own = own_messages(sizes_of(run.present), [sample.overlap for sample in samples])
    curve = with_own_messages(curve_of(sizes, ranks), own)
    share = spent_us / max((session.step - begun) * step_us, 1.0)
    run.tell(
        f"measured {MEASURED_STEPS} steps, and messages of {len(sizes)} sizes behind {PASSES * len(sizes)} others: "
        f"{spent_us / 1e3:.0f} ms, {share:.1%} of their time"
    )
    return samples, curve


def make_profile(session: Session, ranks: Sequence[RankSample], curve: Curve, contention: Contention | None) -> Profile:
    """Return what `planner profile` would say; what messages cost computation is taken off again."""
    times = [one.times for one in ranks]
    if contention is not None:
        times = [without_contention(one.times, one.busy_us, contention) for one in ranks]
    found = profile_of_run(session, None, times, (curve, curve))
    found = replace(found, compute=replace(found.compute, operator=operators_of_run(session)))
    assert found.cluster is not None
    return found if contention is None else replace(found, cluster=replace(found.cluster, contention=contention))
