"""How much backward and communication slow each other down, measured with both at once, by the size of messages.

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
from dataclasses import dataclass, replace

import torch
from torch import nn

from planner.documents.profile import ComputeProfile, Contention, SizeFactors
from planner.profile.compute import OwnMessages, Step, StepRunner
from planner.profile.links import make_bucket
from planner.profile.progress import Progress
from planner.profile.request import ALL_GATHER, ALL_REDUCE
from runtime.comm.collectives.direct import Packed
from runtime.comm.communicator import CommTiming, Payload
from runtime.comm.world import World
from runtime.monitor.clock import Clock
from runtime.plan.transports import FLAT, LIBRARY

MAX_ROUNDS = 15
LEAST_ROUNDS = (3, 2, 1)
"""For so many rounds there has to be time, of as many sizes as possible; where there is none for a single size, for
fewer rounds."""
PROBING = 0.25
"""Share of the budget that may be spent on finding out how long messages take."""
STEPS_PER_SIZE = 2.5
"""What a size takes in a round, in steps: messages alone, then a step that they slow down."""
SHARE = 0.8
"""Part of backward that the messages are meant to fill if nothing slows them."""
MIN_BACKWARD_US = 500.0
"""Shorter backwards are over before a collective has begun."""
KINDS = {ALL_REDUCE: LIBRARY, ALL_GATHER: FLAT}
"""Names of samples with the transports that are timed."""
GROWTH = 8
SIZES = tuple(1024 * GROWTH**power for power in range(5))
"""Message bytes, of gathers those of all ranks; left out are those that are larger than the model, or of which two do
not fit beside backward."""
PROBES, PROBE_MESSAGES, MAX_MESSAGES = 3, 4, 64
LEAST_SHARE, LEAST_MESSAGES = 0.1, 0.5
"""Of backward, and how many messages, that count as done while both were busy: near zero they would say nothing."""


Sort = tuple[str, int, int]
"""(kind, bytes, how many) of messages."""


class _Flood(OwnMessages):
    """Sends messages back to back when it is told to."""

    def __init__(self, world: World, device: torch.device) -> None:
        super().__init__(world, device, KINDS.values())
        self._device, self._ranks = device, world.ranks
        self._buckets: list[Payload] = []
        self.sent: list[CommTiming] = []

    def choose(self, kind: str, size_bytes: int, messages: int) -> None:
        """Send so many of this kind and size from now on."""
        if kind == ALL_REDUCE:
            self._buckets = [make_bucket(size_bytes, self._device).payload for _ in range(messages)]
            return
        name, place = f"a gather of {size_bytes} bytes", list(KINDS).index(kind)
        numel = max(1, size_bytes // 4 // self._ranks)
        sizes = [(torch.zeros(numel, device=self._device), self._ranks * numel) for _ in range(messages)]
        self._buckets = [Payload(place, name, [Packed(own, own.new_zeros(all_of))]) for own, all_of in sizes]

    def begin(self) -> None:
        self.sent = [CommTiming() for _ in self._buckets]
        for bucket, sent in zip(self._buckets, self.sent, strict=True):
            self._inner.launch(bucket, sent)


@dataclass(frozen=True)
class Seen:
    """One size in one round."""

    backward_us: float
    """Alone."""
    each_us: float
    """A message alone, in a queue."""
    both_us: float
    """Backward beside messages."""
    shared_us: float
    """How long both were busy."""
    messages: float
    """How many passed meanwhile; the one on its way counts in part."""


def measure_contention(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, step: Step, world: World, device: torch.device,
    compute: ComputeProfile, progress: Progress, kinds: Sequence[str], budget_s: float,
) -> dict[str, tuple[SizeFactors, ...]]:  # fmt: skip
    """Return the factors of this machine by kind (`all_reduce`, `all_gather`) and size of messages, the same on all
    ranks; nothing where backward is too short to tell, or steps too long for the budget. `compute` is the step alone.
    """
    backward_us = sum(gradient.backward_us for gradient in compute.gradients[1:])
    if world.group is None or backward_us < MIN_BACKWARD_US:
        return {}
    sizes = affordable_sizes(compute.step_us / 1e6, budget_s)
    if not sizes:
        return {}
    flood = _Flood(world, device)
    runner = StepRunner(model, optimizer, step, world, communicator=flood)
    try:
        fitting = _fitting(runner, flood, world, backward_us, compute.size_bytes, kinds, budget_s * PROBING)
        chosen = spread_evenly(fitting, sizes)
        if not chosen:
            return {}
        if compute.step_us / 1e6 * MAX_ROUNDS < budget_s:
            runner.run()
        started = time.perf_counter()
        rounds = [_round(runner, flood, world, chosen)]
        round_s = max(world.gather(time.perf_counter() - started, "timing a round"))
        repeats = int(min(MAX_ROUNDS, max(1, budget_s / max(round_s, 1e-9))))
        rounds += [_round(runner, flood, world, chosen) for _ in progress.track(range(repeats - 1), "contention")]
    finally:
        runner.close()
    everyone: list[list[list[Seen]]] = world.gather(rounds, "comparing contention")
    found: dict[str, tuple[SizeFactors, ...]] = {}
    for index, (kind, size_bytes, _) in enumerate(chosen):
        slowed, late = solve([_of_last([rank[index] for rank in ranks]) for ranks in zip(*everyone, strict=True)])
        found[kind] = (*found.get(kind, ()), (float(size_bytes), round(slowed, 4), round(late, 4)))
    return found


def contention_of(found: Mapping[str, tuple[SizeFactors, ...]], model_bytes: int) -> Contention | None:
    """Return what was measured as the document has it; None where nothing was measured of all-reduces."""
    if ALL_REDUCE not in found:
        return None
    # Beside a usual bucket: a quarter of the model.
    _, compute, network = min(found[ALL_REDUCE], key=lambda factors: abs(factors[0] - model_bytes / 4))
    return Contention(
        compute=compute, network=network, by_size=found[ALL_REDUCE], gathers_by_size=found.get(ALL_GATHER)
    )


def affordable_sizes(each_s: float, budget_s: float) -> int:
    """Return how many sizes of messages there is time for, at a step of so many seconds; 0: not even for one."""
    for rounds in LEAST_ROUNDS:
        sizes = int((budget_s / rounds / max(each_s, 1e-9) - 1.0) / STEPS_PER_SIZE)
        if sizes >= 1:
            return sizes
    return 0


def spread_evenly(fitting: Sequence[Sort], most: int) -> list[Sort]:
    """Return at most so many of the messages, of each kind about as many, the largest of a kind first of all."""
    kinds = list(dict.fromkeys(kind for kind, *_ in fitting))[:most]
    chosen = []
    for place, kind in enumerate(kinds):
        of_kind = [one for one in fitting if one[0] == kind]
        count = min(len(of_kind), most // len(kinds) + (place < most % len(kinds)))
        chosen += [of_kind[-1 - (i * len(of_kind)) // count] for i in reversed(range(count))]
    return chosen


def _fitting(
    runner: StepRunner, flood: _Flood, world: World, backward_us: float, model_bytes: int, kinds: Sequence[str],
    probing_s: float,
) -> list[Sort]:  # fmt: skip
    """Return messages that fill most of backward; none where not even the smallest of the first kind do."""
    chosen: list[Sort] = []
    longest_us = 1e6 * probing_s / (len(kinds) * PROBES * PROBE_MESSAGES)
    for kind in kinds:
        each_us = 0.0
        for size_bytes in SIZES:
            if (chosen and size_bytes > model_bytes) or GROWTH * each_us > longest_us:
                break
            flood.choose(kind, size_bytes, PROBE_MESSAGES)
            each_us = _alone(flood, world, runner.clock) / PROBE_MESSAGES
            if 2 * each_us > backward_us:
                break  # the larger ones neither
            chosen.append((kind, size_bytes, max(2, min(MAX_MESSAGES, round(SHARE * backward_us / each_us)))))
        if not chosen:
            break
    return chosen


def _round(runner: StepRunner, flood: _Flood, world: World, chosen: Sequence[Sort]) -> list[Seen]:
    """Measure every kind and size once, interleaved with backward alone so that drift hits all alike.

    Messages go before every step, so that caches are alike.
    """
    between = runner.clock.between_us
    flood.choose(*chosen[-1])
    _send_alone(flood, world)
    alone = runner.run()
    backward_us = between(alone.backward, alone.backward_end)
    seen = []
    for kind, size_bytes, messages in chosen:
        flood.choose(kind, size_bytes, messages)
        _send_alone(flood, world)
        network_us = between(flood.sent[0].start, flood.sent[-1].end)
        runner.session.recorder.on_backward = flood.begin
        both = runner.run()
        runner.session.recorder.on_backward = None
        both_us = between(both.backward, both.backward_end)
        ends_us = [between(flood.sent[0].start, sent.end) for sent in flood.sent]
        shared_us = min(both_us, ends_us[-1])
        seen.append(Seen(backward_us, network_us / messages, both_us, shared_us, passed(ends_us, shared_us)))
    return seen


def _of_last(ranks: Sequence[Seen]) -> Seen:
    """One round as a step feels it, which continues when the straggler is there; messages alone as the straggler sees
    them, which waits for nobody."""
    last = max(ranks, key=lambda seen: seen.both_us)
    return replace(
        last, backward_us=max(seen.backward_us for seen in ranks), each_us=min(seen.each_us for seen in ranks)
    )


def passed(ends_us: Sequence[float], until_us: float) -> float:
    """Return how many messages, of which each begins when the one before ends, have passed by then."""
    done, before_us = 0.0, 0.0
    for end_us in ends_us:
        if end_us > until_us:
            return done + (until_us - before_us) / (end_us - before_us)
        done, before_us = done + 1.0, end_us
    return done


def _send_alone(flood: _Flood, world: World) -> None:
    world.gather(None, "timing messages alone")
    flood.begin()
    flood.wait()


def _alone(probe: _Flood, world: World, clock: Clock) -> float:
    """Return microseconds of the probe's messages with nothing else going on."""
    times = []
    for _ in range(PROBES):
        _send_alone(probe, world)
        times.append(clock.between_us(probe.sent[0].start, probe.sent[-1].end))
    everyone: list[list[float]] = world.gather(times, "timing messages alone")
    return min(max(times) for times in everyone)


def solve(rounds: Sequence[Seen]) -> tuple[float, float]:
    """Return (compute, network), the factors that explain what was seen of one size; medians over rounds."""
    backward_us, each_us, both_us, shared_us = (
        statistics.median(getattr(one, field) for one in rounds)
        for field in ("backward_us", "each_us", "both_us", "shared_us")
    )
    per_message_us = statistics.median(one.shared_us / max(one.messages, LEAST_MESSAGES) for one in rounds)
    # What of backward was left when the last message had passed went on alone.
    done_us = max(backward_us - max(0.0, both_us - shared_us), LEAST_SHARE * backward_us)
    return max(1.0, shared_us / done_us), max(1.0, per_message_us / each_us)
