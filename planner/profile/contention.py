"""Contention: the factors by which backward and communication slow each other down, by the size of messages.

A step runs while messages of one kind and size are in flight, back to back, from its first gradient on: all-reduces, or
gathers of selected elements. From how many of them have passed when backward ends, how long that takes, and how long
each takes alone, the factors follow: while both are busy, compute advances at 1/compute and the network at 1/network of
its speed.

The size matters: where every core computes, whatever a message needs a core for has to wait until the scheduler gives
it one, some milliseconds, and that is ten times what a small message takes alone and a tenth of a large one's time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from planner.documents.profile import ComputeProfile, Contention, SizeFactors
from planner.profile.bench import Bench
from planner.profile.compute import OwnMessages, StepRunner, Training
from planner.profile.links import make_bucket
from planner.profile.request import ALL_GATHER, ALL_REDUCE
from runtime.comm.collectives.direct import Packed
from runtime.comm.communicator import CommTiming, Payload
from runtime.monitor.clock import Clock
from runtime.plan.transports import FLAT, LIBRARY

MAX_ROUNDS = 15
LEAST_ROUNDS = (3, 2, 1)
"""Number of rounds that there has to be time for, with as many sizes as possible; the next one if there is no time for
a single size."""
PROBING = 0.25
"""Share of the budget for finding out how long messages take."""
STEPS_PER_SIZE = 3.5
"""Time of a size in a round, in steps: messages alone, then a step that they slow down, and its last messages."""
SHARE = 2.0
"""Time of the messages if nothing slows them, over backward's, so that they usually outlast it: of what is left of it
behind the last message, a short part would say how much was done before."""
MIN_BACKWARD_US = 500.0
"""Shorter backwards are over before a collective has begun."""
KINDS = {ALL_REDUCE: LIBRARY, ALL_GATHER: FLAT}
"""Names of samples with the transports that are timed."""
GROWTH = 8
SIZES = tuple(1024 * GROWTH**power for power in range(5))
"""Bytes of a message, of gathers those of all ranks. Sizes are left out that are larger than the model, or whose
messages take longer than half of backward."""
PROBES, PROBE_MESSAGES, MAX_MESSAGES = 3, 4, 64
LEAST_SHARE, LEAST_MESSAGES = 0.1, 0.5
"""Least share of backward, and number of messages, that count as done while both were busy."""


Sort = tuple[str, int, int]
"""(kind, bytes, number) of messages."""


class _Flood(OwnMessages):
    """Sends the chosen messages back to back."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench, KINDS.values())
        self._bench = bench
        self._buckets: list[Payload] = []
        self.sent: list[CommTiming] = []

    def choose(self, kind: str, size_bytes: int, messages: int) -> None:
        """Set kind, size and number of the messages that are sent from now on."""
        device, ranks = self._bench.device, self._bench.world.ranks
        if kind == ALL_REDUCE:
            self._buckets = [make_bucket(size_bytes, device).payload for _ in range(messages)]
            return
        name, place = f"a gather of {size_bytes} bytes", list(KINDS).index(kind)
        owns = [torch.zeros(max(1, size_bytes // 4 // ranks), device=device) for _ in range(messages)]
        self._buckets = [Payload(place, name, [Packed(own, own.repeat(ranks))]) for own in owns]

    def begin(self) -> None:
        """Launch the messages."""
        self.sent = [CommTiming() for _ in self._buckets]
        for bucket, sent in zip(self._buckets, self.sent, strict=True):
            self._inner.launch(bucket, sent)

    def send_alone(self) -> None:
        """Send the messages on all ranks together, with nothing else to do."""
        self._bench.world.gather(None, "timing messages alone")
        self.begin()
        self.wait()

    def alone_us(self, clock: Clock) -> float:
        """Return the microseconds of the messages with nothing else to do, the same on all ranks."""
        times = []
        for _ in range(PROBES):
            self.send_alone()
            times.append(clock.between_us(self.sent[0].start, self.sent[-1].end))
        everyone: list[list[float]] = self._bench.world.gather(times, "timing messages alone")
        return min(map(max, everyone))


@dataclass(frozen=True)
class Seen:
    """One size in one round, in microseconds."""

    backward_us: float
    """Time of backward alone."""
    each_us: float
    """Time of a message alone, in a queue."""
    both_us: float
    """Time of backward during messages."""
    shared_us: float
    """Time in which both were busy."""
    messages: float
    """Number of messages that passed in it; the one in flight counts in part."""


def measure_contention(
    training: Training, bench: Bench, compute: ComputeProfile, kinds: Sequence[str], budget_s: float
) -> dict[str, tuple[SizeFactors, ...]]:
    """Return the factors by kind of message (`all_reduce`, `all_gather`) and size, the same on all ranks.

    There are none if backward is too short to tell, or steps are too long for the budget.

    Args:
        training: the step.
        bench: the ranks.
        compute: the step alone, as it was measured.
        kinds: of messages.
        budget_s: seconds that it takes.
    """
    world = bench.world
    backward_us = sum(gradient.backward_us for gradient in compute.gradients[1:])
    if world.group is None or backward_us < MIN_BACKWARD_US:
        return {}
    sizes = affordable_sizes(compute.step_us / 1e6, budget_s)
    if not sizes:
        return {}
    flood = _Flood(bench)
    with closing(StepRunner(training, bench, flood)) as runner:
        fitting = _fitting(flood, runner.clock, backward_us, compute.size_bytes, kinds, budget_s * PROBING)
        chosen = spread_evenly(fitting, sizes)
        if not chosen:
            return {}
        if compute.step_us / 1e6 * MAX_ROUNDS < budget_s:
            runner.run()
        started = time.perf_counter()
        rounds = [_round(runner, flood, chosen)]
        round_s = max(world.gather(time.perf_counter() - started, "timing a round"))
        repeats = int(min(MAX_ROUNDS, max(1, budget_s / max(round_s, 1e-9))))
        rounds += [_round(runner, flood, chosen) for _ in bench.progress.track(range(repeats - 1), "contention")]
    everyone: list[list[list[Seen]]] = world.gather(rounds, "comparing contention")
    found: dict[str, tuple[SizeFactors, ...]] = {}
    for index, (kind, size_bytes, _) in enumerate(chosen):
        slowed, late = solve([_of_last([rank[index] for rank in ranks]) for ranks in zip(*everyone, strict=True)])
        found[kind] = (*found.get(kind, ()), (float(size_bytes), round(slowed, 4), round(late, 4)))
    return found


def contention_of(found: Mapping[str, tuple[SizeFactors, ...]], model_bytes: int) -> Contention | None:
    """Return what was measured as the document has it; None if nothing was measured of all-reduces."""
    if ALL_REDUCE not in found:
        return None
    # During the message of a usual bucket: a quarter of the model.
    _, compute, network = min(found[ALL_REDUCE], key=lambda factors: abs(factors[0] - model_bytes / 4))
    return Contention(
        compute=compute, network=network, by_size=found[ALL_REDUCE], gathers_by_size=found.get(ALL_GATHER)
    )


def affordable_sizes(each_s: float, budget_s: float) -> int:
    """Return the number of message sizes that there is time for, at a step of `each_s` seconds; 0: not even for one."""
    for rounds in LEAST_ROUNDS:
        sizes = int((budget_s / rounds / max(each_s, 1e-9) - 1.0) / STEPS_PER_SIZE)
        if sizes >= 1:
            return sizes
    return 0


def spread_evenly(fitting: Sequence[Sort], most: int) -> list[Sort]:
    """Return at most `most` of the messages, of each kind about as many, the largest of a kind first of all."""
    kinds = list(dict.fromkeys(kind for kind, *_ in fitting))[:most]
    chosen = []
    for place, kind in enumerate(kinds):
        of_kind = [one for one in fitting if one[0] == kind]
        count = min(len(of_kind), most // len(kinds) + (place < most % len(kinds)))
        chosen += [of_kind[-1 - (i * len(of_kind)) // count] for i in reversed(range(count))]
    return chosen


def _fitting(
    flood: _Flood, clock: Clock, backward_us: float, model_bytes: int, kinds: Sequence[str], probing_s: float
) -> list[Sort]:
    """Return messages that fill most of backward; none if not even the smallest of the first kind do."""
    chosen: list[Sort] = []
    longest_us = 1e6 * probing_s / (len(kinds) * PROBES * PROBE_MESSAGES)
    for kind in kinds:
        each_us = 0.0
        for size_bytes in SIZES:
            if (chosen and size_bytes > model_bytes) or GROWTH * each_us > longest_us:
                break
            flood.choose(kind, size_bytes, PROBE_MESSAGES)
            each_us = flood.alone_us(clock) / PROBE_MESSAGES
            if 2 * each_us > backward_us:
                break  # the larger ones neither
            chosen.append((kind, size_bytes, max(2, min(MAX_MESSAGES, round(SHARE * backward_us / each_us)))))
        if not chosen:
            break
    return chosen


def _round(runner: StepRunner, flood: _Flood, chosen: Sequence[Sort]) -> list[Seen]:
    """Measure every kind and size once, interleaved with backward alone so that drift hits all alike.

    Messages go before every step, so that caches are alike.
    """
    between = runner.clock.between_us
    flood.choose(*chosen[-1])
    flood.send_alone()
    alone = runner.run()
    backward_us = between(alone.backward, alone.backward_end)
    seen = []
    for kind, size_bytes, messages in chosen:
        flood.choose(kind, size_bytes, messages)
        flood.send_alone()
        network_us = between(flood.sent[0].start, flood.sent[-1].end)
        runner.session._recorder.on_backward = flood.begin
        both = runner.run()
        runner.session._recorder.on_backward = None
        both_us = between(both.backward, both.backward_end)
        ends_us = [between(flood.sent[0].start, sent.end) for sent in flood.sent]
        shared_us = min(both_us, ends_us[-1])
        seen.append(Seen(backward_us, network_us / messages, both_us, shared_us, passed(ends_us, shared_us)))
    return seen


def _of_last(ranks: Sequence[Seen]) -> Seen:
    """Return one round of the straggler, for which a step waits; messages alone are those of the fastest rank."""
    last = max(ranks, key=lambda seen: seen.both_us)
    return replace(
        last, backward_us=max(seen.backward_us for seen in ranks), each_us=min(seen.each_us for seen in ranks)
    )


def passed(ends_us: Sequence[float], until_us: float) -> float:
    """Return the number of messages, each beginning when the one before ends, that have passed by then."""
    done, before_us = 0.0, 0.0
    for end_us in ends_us:
        if end_us > until_us:
            return done + (until_us - before_us) / (end_us - before_us)
        done, before_us = done + 1.0, end_us
    return done


def solve(rounds: Sequence[Seen]) -> tuple[float, float]:
    """Return the factors (compute, network) that explain what was seen of one size; medians over rounds."""
    backward_us, each_us, both_us, shared_us = (
        statistics.median(getattr(one, field) for one in rounds)
        for field in ("backward_us", "each_us", "both_us", "shared_us")
    )
    per_message_us = statistics.median(one.shared_us / max(one.messages, LEAST_MESSAGES) for one in rounds)
    # The part of backward that was left when the last message had passed continued alone.
    done_us = max(backward_us - max(0.0, both_us - shared_us), LEAST_SHARE * backward_us)
    return max(1.0, shared_us / done_us), max(1.0, per_message_us / each_us)
