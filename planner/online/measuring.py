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

from planner.documents.profile import Cluster, Contention, Profile
from planner.documents.text import pluralize
from planner.jobs.replanning import profile_of_run, without_contention
from planner.online.planned_run import DECIDING_S, TRIAL_STEPS, WARM_UP_STEPS, PlannedRun, Steps
from planner.online.probes import PASSES, Costs, Curve, Probes, Times, costs_of, pieces_of
from planner.profile.bench import fit
from planner.profile.compute import RankTimes, busy_times_us, rank_times
from planner.profile.operator_times import operators_of_run
from planner.profile.request import ALL_REDUCE
from runtime.monitor.drift import bucket_times, complete
from runtime.plan import Plan
from runtime.session.session import Session

ALONE, WITHIN = 0.1, 0.5
"""Share of a message within backward below which nothing is computed meanwhile, and above which something is."""
FEWEST_SHARED = 0.05
"""Plans overlap alike where the time that messages share with backward differs by less than this part of backward."""
US_PER_BYTE = 2e-3
"""Expected time of a byte of a message before one has been seen."""
MOST_SHARED, MOST_SLOWED = 0.7, 5.0
"""Bounds of what is believed: of 1 − 1/c, and of the network's factor."""

MEASURED_STEPS = 20
LINKS_SHARE, SAVED_SHARE = 0.015, 0.1
"""Shares that timing may take of the steps before it, and of what a bounded plan has saved in them."""


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


def first_steps(run: PlannedRun) -> list[Overlap]:
    """Return what all ranks saw of the last steps; nothing where one saw no whole step."""
    first: list[RankSample | None] = run.gather(observe(run.session, WARM_UP_STEPS // 2), "comparing the first steps")
    seen = [sample.overlap for sample in first if sample]
    return seen if len(seen) == len(first) else []


def exposed_us(ranks: Sequence[Overlap]) -> float:
    """Return the time of a step's messages after backward, on the rank that waited least for others; 0: not known."""
    each = [sum(t * (1.0 - part) for t, part in zip(one.sent_us, one.within, strict=True)) for one in ranks]
    return min(each, default=0.0)


def measure_run(run: PlannedRun, first: Sequence[Overlap], *, narrow: bool) -> Steps[tuple[list[RankSample], Costs]]:
    """Time messages behind the next steps, as the budget allows, then look at the last steps of all ranks, by an exact
    plan.

    Args:
        run: its present plan may be bounded.
        first: what ranks saw of steps by an exact plan.
        narrow: also time messages and encoding of plans in narrow dtypes.
    """
    session = run.session
    step_us = max(run.gather(run.step_us, "comparing times of steps"))
    share = LINKS_SHARE + SAVED_SHARE * run.saved
    model_bytes = sum(sizes_of(run.present))
    byte_us = us_per_byte(first, model_bytes)
    pieces = pieces_of(model_bytes, narrow=narrow)
    expected_us = [piece.expected_us(byte_us) for piece in pieces]
    waits = [max(1, math.ceil(time_us / (share * step_us))) for time_us in expected_us]
    doing = "steps and messages are measured; then rank 0 decides, and what it found is tried"
    run.begin_stage(doing, PASSES * sum(waits), TRIAL_STEPS, DECIDING_S)
    begun, spent_us, probes = session.step, 0.0, Probes(session, pieces)
    try:
        for number in range(PASSES):
            for piece, time_us in zip(pieces, expected_us, strict=True):
                yield from run.wait(max(1, math.ceil(time_us / (share * step_us))))
                probes.time(piece)
            ranks: list[list[Times]] = run.gather(probes.times_us(), "comparing times of messages")
            spent_us = max(sum(map(sum, times)) for times in ranks)
            last = [[sum(parts) for parts in times[-len(pieces) :]] for times in ranks]
            expected_us = [*map(min, expected_us, *last)]
            if number + 1 < PASSES:  # what was not expected is made up for
                yield from run.wait(max(0, math.ceil(spent_us / (share * step_us)) - session.step + begun))
    finally:
        probes.close()
        run.cost_us += spent_us
    took = spent_us / max((session.step - begun) * step_us, 1.0)
    if run.present.accuracy != "exact":  # whose steps time no whole gradients
        run.make_exact()
        yield from run.wait(MEASURED_STEPS + 1)
    samples: list[RankSample] = run.gather(observe(session, MEASURED_STEPS), "comparing the last steps")
    costs = costs_of(pieces, ranks)
    own = own_messages(sizes_of(run.present), [sample.overlap for sample in samples])
    costs = replace(costs, messages={**costs.messages, ALL_REDUCE: with_own_messages(costs.all_reduce, own)})
    messages = sum(not piece.encodes for piece in pieces)
    encoded = f" and encoding in {pluralize(len(costs.encode), 'dtype')}" if narrow else ""
    run.tell(
        f"measured {MEASURED_STEPS} steps, and messages of {messages} sizes{encoded} behind {PASSES * len(pieces)} "
        f"others: {spent_us / 1e3:.0f} ms, {took:.1%} of their time"
    )
    return samples, costs


def make_profile(
    session: Session, before: Profile | None, ranks: Sequence[RankSample], costs: Costs, contention: Contention | None
) -> Profile:
    """Return what `planner profile` would say; what messages cost computation is taken off again.

    `before`: the run's last profile, for operators that owners have computed from the first step on.
    """
    times = [one.times for one in ranks]
    if contention is not None:
        times = [without_contention(one.times, one.busy_us, contention) for one in ranks]
    operator = operators_of_run(session) or (before.compute.operator if before is not None else None)
    found = profile_of_run(session, None, times, (costs.all_reduce, costs.all_reduce), operator)
    assert found.cluster is not None
    return replace(found, cluster=replace(with_costs(found.cluster, costs), contention=contention))


def with_costs(cluster: Cluster, costs: Costs) -> Cluster:
    """Return the cluster with what was timed; messages behind steps are as those in a queue of buckets."""
    curves = dict(costs.messages)
    lines = [{name: fit(curve) for name, curve in of.items()} or None for of in (costs.encode, costs.decode)]
    return replace(cluster, samples=curves, back_to_back=curves, encode=lines[0], decode=lines[1])
