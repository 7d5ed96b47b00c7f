"""How much backward and communication slow each other down, measured with both at once.

A step runs while back-to-back all-reduces are in flight from its first gradient on. From when each of the two ends,
and how long each takes alone, the factors follow: while both are busy, compute advances at 1/compute and the network at
1/network of its speed.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from planner.profile.compute import Step, StepRunner
from planner.profile.document import Contention
from planner.profile.links import make_bucket
from planner.progress import Progress
from runtime.buckets import BucketBuffer
from runtime.clock import Clock, make_clock
from runtime.collectives import COLLECTIVES
from runtime.communicator import Sent, make_communicator
from runtime.world import World

MIN_REPEATS, MAX_REPEATS = 5, 15
BUDGET_S = 15.0
"""What the repeats may take in all, once there are enough of them."""
SHARE = 0.7
"""Part of backward that the all-reduces are meant to fill."""
MIN_BACKWARD_US = 500.0
"""Shorter backwards are over before a collective has begun."""
PROBE_MESSAGES = 4
FEWEST_MESSAGES, SMALLEST_BYTES = 4, 16 * 1024
MAX_MESSAGES = 64
LEAST_SHARE = 0.1
"""Of either task that counts as done while both were busy: what remains is a difference of two measured times, and
when it comes near zero it says nothing."""


class _Flood:
    """A communicator that sends its own messages, back to back, from the first bucket of each step on."""

    def __init__(self, world: World, device: torch.device, size_bytes: int, messages: int) -> None:
        self._inner = make_communicator(world, [COLLECTIVES[("all_reduce", "library")]], device)
        self._buckets = [make_bucket(size_bytes, device) for _ in range(messages)]
        self.sent: list[Sent] = []

    def begin(self) -> None:
        self.sent = [Sent() for _ in self._buckets]
        for bucket, sent in zip(self._buckets, self.sent, strict=True):
            self._inner.launch(bucket, sent)

    def launch(self, bucket: BucketBuffer, sent: Sent) -> None:
        """The session's own buckets are not sent."""

    def wait(self) -> None:
        self._inner.wait()

    def close(self) -> None:
        self._inner.close()


def measure_contention(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, step: Step, world: World, device: torch.device,
    backward_us: float, size_bytes: int, progress: Progress,
) -> Contention | None:  # fmt: skip
    """The factors of this machine, the same on all ranks; None where backward is too short to tell.

    Args:
        backward_us: from the first gradient to the end of backward, alone.
        size_bytes: bytes of the messages to send meanwhile; fewer where the network is so slow that not even
            `FEWEST_MESSAGES` of them fit beside backward.
    """
    if world.group is None or backward_us < MIN_BACKWARD_US:
        return None
    size_bytes, each_us = _fitting(world, device, size_bytes, backward_us)
    if 2 * each_us > backward_us:
        return None  # most of the messages would travel after backward
    messages = max(2, round(SHARE * backward_us / each_us))
    flood = _Flood(world, device, size_bytes, min(messages, MAX_MESSAGES))
    runner = StepRunner(model, optimizer, step, world, communicator=flood)
    try:
        runner.run()
        started = time.perf_counter()
        rounds = [_round(runner, flood, world)]
        round_s = max(world.gather(time.perf_counter() - started, "timing a round"))
        repeats = int(min(MAX_REPEATS, max(MIN_REPEATS, BUDGET_S / max(round_s, 1e-9))))
        rounds += [_round(runner, flood, world) for _ in progress.track(range(repeats - 1), "contention")]
    finally:
        runner.close()
    everyone = world.gather([statistics.median(column) for column in zip(*rounds, strict=True)], "comparing contention")
    return solve(*(statistics.median(column) for column in zip(*everyone, strict=True)))


def _fitting(world: World, device: torch.device, size_bytes: int, backward_us: float) -> tuple[int, float]:
    """(bytes, microseconds alone) of messages of which several fit beside backward: smaller ones on a slow network."""
    while True:
        probe = _Flood(world, device, size_bytes, PROBE_MESSAGES)
        each_us = _alone(probe, world, make_clock(device)) / PROBE_MESSAGES
        probe.close()
        if FEWEST_MESSAGES * each_us <= backward_us or size_bytes <= SMALLEST_BYTES:
            return size_bytes, each_us
        size_bytes = max(SMALLEST_BYTES, size_bytes // 4)


def _round(runner: StepRunner, flood: _Flood, world: World) -> tuple[float, float, float, float]:
    """(backward alone, messages alone, backward and messages with both going), in turn so that drift hits all alike."""
    between = runner.clock.between_us
    alone = runner.run()
    world.gather(None, "timing messages alone")
    flood.begin()
    flood.wait()
    network_us = between(flood.sent[0].start, flood.sent[-1].end)
    runner.session.recorder.on_backward = flood.begin
    both = runner.run()
    runner.session.recorder.on_backward = None
    return (
        between(alone.backward, alone.backward_end),
        network_us,
        between(both.backward, both.backward_end),
        between(flood.sent[0].start, flood.sent[-1].end),
    )


def _alone(probe: _Flood, world: World, clock: Clock) -> float:
    """Microseconds of the probe's messages with nothing else going on."""
    times = []
    for _ in range(3):
        world.gather(None, "timing messages alone")
        probe.begin()
        probe.wait()
        times.append(clock.between_us(probe.sent[0].start, probe.sent[-1].end))
    everyone: list[list[float]] = world.gather(times, "timing messages alone")
    return min(max(times) for times in everyone)


def solve(backward_us: float, network_us: float, backward_both_us: float, network_both_us: float) -> Contention:
    """The factors that explain what was seen when both began together.

    Args:
        backward_us, network_us: each alone.
        backward_both_us, network_both_us: when each ended with both going.
    """
    if backward_both_us >= network_both_us:
        # The network was never alone; compute was, after it.
        shared_us = network_both_us
        network = shared_us / network_us
        done_us = backward_us - (backward_both_us - shared_us)
        compute = shared_us / max(done_us, LEAST_SHARE * backward_us)
    else:
        shared_us = backward_both_us
        compute = shared_us / backward_us
        done_us = network_us - (network_both_us - shared_us)
        network = shared_us / max(done_us, LEAST_SHARE * network_us)
    return Contention(compute=round(max(1.0, compute), 4), network=round(max(1.0, network), 4))
