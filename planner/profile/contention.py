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
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from planner.profile.compute import Step, StepRunner
from planner.profile.document import Contention, SizeFactors
from planner.profile.links import make_bucket
from planner.progress import Progress
from runtime.buckets import BucketBuffer, Parcel
from runtime.clock import Clock
from runtime.collectives import COLLECTIVES
from runtime.communicator import Sent, make_communicator, nothing
from runtime.selected import Packed
from runtime.world import World

MIN_REPEATS, MAX_REPEATS = 5, 15
BUDGET_S = 20.0
"""What the repeats may take in all, once there are enough of them."""
SHARE = 0.8
"""Part of backward that the messages are meant to fill if nothing slows them."""
MIN_BACKWARD_US = 500.0
"""Shorter backwards are over before a collective has begun."""
KINDS = (("all_reduce", "library"), ("sparse", "flat"))
"""What is sent."""
SIZES = (1024, 8 * 1024, 64 * 1024, 512 * 1024, 4 * 1024 * 1024)
"""Message bytes, of gathers those of all ranks; left out are those that are larger than the model, or of which two do
not fit beside backward."""
PROBE_MESSAGES, MAX_MESSAGES = 4, 64
LEAST_SHARE, LEAST_MESSAGES = 0.1, 0.5
"""Of backward, and how many messages, that count as done while both were busy: near zero they would say nothing."""


Sort = tuple[int, int, int]
"""(kind, bytes, how many) of messages: the kind is a place in KINDS."""


class _Flood:
    """A communicator that sends messages of its own, back to back, when it is told to."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._inner = make_communicator(world, [COLLECTIVES[kind] for kind in KINDS], device)
        self._device, self._ranks = device, world.ranks
        self._buckets: list[BucketBuffer | Parcel] = []
        self.sent: list[Sent] = []

    def choose(self, kind: int, size_bytes: int, messages: int) -> None:
        """From now on so many of this kind (its place in KINDS) and size."""
        self._buckets = [self._bucket(kind, size_bytes) for _ in range(messages)]

    def _bucket(self, kind: int, size_bytes: int) -> BucketBuffer | Parcel:
        if not kind:
            return make_bucket(size_bytes, self._device)
        own = torch.zeros(max(1, size_bytes // 4 // self._ranks), device=self._device)
        return Parcel(kind, f"a gather of {size_bytes} bytes", [Packed(own, own.new_zeros(self._ranks * own.numel()))])

    def begin(self) -> None:
        self.sent = [Sent() for _ in self._buckets]
        for bucket, sent in zip(self._buckets, self.sent, strict=True):
            self._inner.launch(bucket, sent)

    def launch(self, bucket: BucketBuffer | Parcel, sent: Sent, prepare: Callable[[], None] = nothing) -> None:
        """The session's own buckets are filled, and not sent."""
        prepare()

    def wait(self, until: Sent | None = None) -> None:
        self._inner.wait()

    def close(self) -> None:
        self._inner.close()


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
    backward_us: float, model_bytes: int, progress: Progress,
) -> Contention | None:  # fmt: skip
    """The factors of this machine, the same on all ranks; None where backward is too short to tell.

    Args:
        backward_us: from the first gradient to the end of backward, alone.
        model_bytes: of all gradients; no larger message is tried.
    """
    if world.group is None or backward_us < MIN_BACKWARD_US:
        return None
    flood = _Flood(world, device)
    runner = StepRunner(model, optimizer, step, world, communicator=flood)
    try:
        chosen = _fitting(runner, flood, world, backward_us, model_bytes)
        if not chosen:
            return None
        runner.run()
        started = time.perf_counter()
        rounds = [_round(runner, flood, world, chosen)]
        round_s = max(world.gather(time.perf_counter() - started, "timing a round"))
        repeats = int(min(MAX_REPEATS, max(MIN_REPEATS, BUDGET_S / max(round_s, 1e-9))))
        rounds += [_round(runner, flood, world, chosen) for _ in progress.track(range(repeats - 1), "contention")]
    finally:
        runner.close()
    everyone: list[list[list[Seen]]] = world.gather(rounds, "comparing contention")
    found: defaultdict[int, list[SizeFactors]] = defaultdict(list)
    for index, (kind, size_bytes, _) in enumerate(chosen):
        compute, network = solve([of_last([rank[index] for rank in ranks]) for ranks in zip(*everyone, strict=True)])
        found[kind].append((float(size_bytes), round(compute, 4), round(network, 4)))
    # Beside a usual bucket: a quarter of the model.
    _, compute, network = min(found[0], key=lambda factors: abs(factors[0] - model_bytes / 4))
    return Contention(
        compute=compute, network=network, by_size=tuple(found[0]), gathers_by_size=tuple(found[1]) or None
    )


def _fitting(runner: StepRunner, flood: _Flood, world: World, backward_us: float, model_bytes: int) -> list[Sort]:
    """Messages that fill most of backward; none where not even the smallest all-reduces do."""
    chosen: list[Sort] = []
    for kind in range(len(KINDS)):
        for size_bytes in SIZES:
            if chosen and size_bytes > model_bytes:
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
    """Every kind and size once, and backward alone, in turn so that drift hits all alike; messages go before every
    step, so that caches are alike."""
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


def of_last(ranks: Sequence[Seen]) -> Seen:
    """One round as a step feels it, which goes on when its last rank is there; messages alone as the rank sees them
    that came last, and waits for nobody."""
    last = max(ranks, key=lambda seen: seen.both_us)
    return replace(
        last, backward_us=max(seen.backward_us for seen in ranks), each_us=min(seen.each_us for seen in ranks)
    )


def passed(ends_us: Sequence[float], until_us: float) -> float:
    """How many messages, of which each begins when the one before ends, have passed by then."""
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
    """Microseconds of the probe's messages with nothing else going on."""
    times = []
    for _ in range(3):
        _send_alone(probe, world)
        times.append(clock.between_us(probe.sent[0].start, probe.sent[-1].end))
    everyone: list[list[float]] = world.gather(times, "timing messages alone")
    return min(max(times) for times in everyone)


def solve(rounds: Sequence[Seen]) -> tuple[float, float]:
    """(compute, network): the factors that explain what was seen of one size; medians over rounds."""
    backward_us, each_us, both_us, shared_us = (
        statistics.median(getattr(one, field) for one in rounds)
        for field in ("backward_us", "each_us", "both_us", "shared_us")
    )
    per_message_us = statistics.median(one.shared_us / max(one.messages, LEAST_MESSAGES) for one in rounds)
    # What of backward was left when the last message had passed went on alone.
    done_us = max(backward_us - max(0.0, both_us - shared_us), LEAST_SHARE * backward_us)
    return max(1.0, shared_us / done_us), max(1.0, per_message_us / each_us)
