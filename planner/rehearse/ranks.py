"""What every rank of a rehearsal does, from the machine as it is to the compared steps."""

from __future__ import annotations

import os
import statistics
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist

from planner.comparison.measure import Measured, V
from planner.profile.links import Curve, make_bucket, timed_us
from planner.profile.progress import Progress
from planner.profile.step import joined
from planner.rehearse.asked import Asked, Bounds, Figures
from planner.rehearse.scale import Links, Machine, Scale, choose_scale, links_of
from planner.testbed.wiring import INTERFACE, MTU_BYTES, shaping
from runtime.comm.by_device import make_communicator
from runtime.comm.collectives import COLLECTIVES
from runtime.comm.communicator import CommTiming
from runtime.comm.world import World
from runtime.errors import EnvironmentFailure, InputError
from runtime.plan import Plan
from runtime.plan.transports import LIBRARY

A = TypeVar("A", bound=Asked)
T = TypeVar("T")

TIMEOUT_S = 120.0
SETTINGS = Path("/proc/sys/net/ipv4")
"""Of the emulated host alone."""
WAITING_S = 1e-3
"""How much of what a connection sends a host holds back in its own queue, on the cluster as it is: TCP's own bound,
which knows no less than two large packets. On a link held to some Mbit/s those take tens of milliseconds, in which
gloo's messages that ask for the next piece wait behind them."""
PROBE_BYTES = 2**24
"""A message whose time is the machine's, not its start-up."""
PIECES = 32
"""Of the weights whose update is probed."""
PROBES = 7
LEAST_BYTES = 16
"""Of a message, however much is shrunk."""
LINK_SHARE = 0.15
"""Of the time given, what timing messages may take."""
BLOCK_STEPS = 3
"""Measured steps of a block. Waits differ by little, so that a few steps say as much as many, and time is better spent
on a larger dilation."""
OWN_STEPS = 5
"""Steps without communication, before anything is predicted."""
LEAST_ROUNDS, MOST_ROUNDS = 2, 40
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Decided(Generic[V]):
    """What is compared, and what was predicted before; times are of the cluster itself."""

    variants: list[V]
    from_constants_us: dict[str, float]
    """By variant, its step as the cluster's constants alone predict it."""
    bounds: Bounds
    plan: Plan
    caps: list[tuple[float, V]] = field(default_factory=list)
    """DDP's bucket sizes."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The rounds that there is time for."""

    count: int
    steps: int
    """Measured steps of a block."""
    brief: tuple[str, ...] = ()
    """Variants whose steps are slow."""
    caps: frozenset[float] = frozenset()
    """DDP's bucket sizes."""


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """What one rank measured; undilated and unshrunk."""

    scale: Scale
    measured: Measured
    figures: Figures
    bounds: Bounds


class Rehearser(ABC, Generic[A, V]):
    """One kind of rehearsal, on this rank."""

    COPIES: ClassVar[float] = 1.0
    """How many times more bytes are shrunk than the machine's sockets ask for, as hosts copy them as well."""

    def __init__(self, asked: A, world: World, scale: Scale, progress: Progress, say: Teller) -> None:
        """Rehearse what is asked at a scale; `say` writes lines of the first rank."""
        self.asked, self.world, self.scale, self.progress, self.say = asked, world, scale, progress, say

    @staticmethod
    @abstractmethod
    def most_dilate(asked: Any, left_s: float) -> float:
        """Return the dilation at which the fewest rounds take most of what is left, by the cluster's constants."""

    @abstractmethod
    def decide(self) -> Decided[V]:
        """Time messages alone, and decide by that; every rank calls it."""

    @abstractmethod
    def rounds(self, decided: Decided[V], left_s: float) -> Rounds:
        """Return the rounds that fit; the first rank calls it. Raises InputError where not even the fewest do."""

    @abstractmethod
    def measure(self, decided: Decided[V], rounds: Rounds, started_s: float) -> tuple[Measured, dict[str, Any]]:
        """Measure all variants; return that, dilated, and figures by name and variant, undilated."""

    def first_decides(self, decide: Callable[[], T], what: str) -> T:
        """Return what the first rank decides, so that ranks whose libraries round otherwise cannot come to different
        plans; every rank calls it. Raises InputError on all ranks where the first does.
        """
        mine: T | InputError | None = None
        if self.world.rank == 0:
            try:
                mine = decide()
            except InputError as error:
                mine = error
        found: T | InputError = self.world.gather(mine, what)[0]
        if isinstance(found, InputError):
            raise found
        return found

    def bare_steps_us(self, step: Callable[[], object], warm_up: int, what: str) -> tuple[float, float]:
        """Return how long a step takes, dilated: on a usual rank, and on the last one, for whom those wait that
        communicate; every rank calls it.
        """
        mine = []
        for _ in range(warm_up + OWN_STEPS):
            dist.barrier(group=self.world.group)
            mine.append(timed_us(step, CPU))
        everyone: list[list[float]] = self.world.gather(mine[warm_up:], what)
        last_us = statistics.median(max(of_ranks) for of_ranks in zip(*everyone, strict=True))
        return statistics.median(chain(*everyone)), last_us

    def unscaled(self, curves: Mapping[str, Curve]) -> dict[str, Curve]:
        """Return curves as the cluster itself would have them."""
        dilate, shrink = self.scale.dilate, self.scale.shrink
        return {
            name: tuple((size * shrink, time_us / dilate) for size, time_us in curve) for name, curve in curves.items()
        }


def rehearse_rank(kind: type[Rehearser[A, Any]], asked: A, started_s: float, show_progress: bool) -> Rehearsed:
    """Rehearse on this rank; every rank calls it. `started_s`: wall-clock seconds when the command began."""
    with joined(None, TIMEOUT_S) as world:
        say = Teller(world.rank == 0)
        scale = begin(world, asked, say, lambda: kind.most_dilate(asked, asked.left_s(started_s)), kind.COPIES)
        rehearser = kind(asked, world, scale, Progress(show_progress and world.rank == 0), say)
        decided = rehearser.decide()
        rounds = rehearser.first_decides(
            lambda: rehearser.rounds(decided, asked.left_s(started_s)), "agreeing on rounds"
        )
        measured, figures = rehearser.measure(decided, rounds, started_s)
        for record in measured.records:
            record.step_us = [[step_us / scale.dilate for step_us in block] for block in record.step_us]
            record.alone_us = None if record.alone_us is None else record.alone_us / scale.dilate
        return Rehearsed(
            scale=scale, measured=replace(measured, backward_us=measured.backward_us / scale.dilate),
            figures={"from_constants_us": decided.from_constants_us, **figures}, bounds=decided.bounds,
        )  # fmt: skip


def begin(world: World, asked: Asked, say: Teller, most_dilate: Callable[[], float], copies: float) -> Scale:
    """Agree on the scale, and hold this host's links to it; every rank calls it.

    `most_dilate` returns the most that there is time for; the first rank calls it, where none is asked for. `copies`:
    how many times more bytes are to be shrunk than the machine's sockets ask for, as hosts copy them as well.
    """
    # A thread that wakes must not take the core from one that holds a lock of gloo's, or it spins there until the other
    # is on again: with eight ranks on two cores an all-reduce starts up three times more slowly then.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    links = links_of(asked.cluster)
    machine = probe(world)
    # Of the first rank alone, where ranks share cores.
    most = asked.dilate or (most_dilate() if world.rank == 0 else 1.0)
    mine = choose_scale(
        links, machine, asked.profile, world.ranks, most_dilate=most, dilate=asked.dilate, shrink=asked.shrink
    )
    scale: Scale = world.gather(mine, "agreeing on the scale")[0]
    if asked.shrink is None:
        scale = replace(scale, shrink=round(copies * scale.shrink, 1))
    say(
        f"dilated {scale.dilate:g} times, shrunk {scale.shrink:g} times: an all-reduce starts up in "
        f"{machine.start_up_us / scale.dilate:.0f} us (asked {links.start_up_us:.0f})"
    )
    shape_links(world, links, scale)
    return scale


class Teller:
    """Lines on standard error, of the first rank alone."""

    def __init__(self, first: bool) -> None:
        self._first = first

    def __call__(self, text: str) -> None:
        if self._first:
            os.write(2, f"rehearse: {text}\n".encode())


def probe(world: World) -> Machine:
    """Return what an all-reduce costs these ranks where no link holds it."""
    communicator = make_communicator(world, [COLLECTIVES[LIBRARY]], CPU)
    try:
        times = {}
        for numel in (256, PROBE_BYTES // 4):
            bucket = make_bucket(numel * 4, CPU)

            def run(bucket: object = bucket) -> None:
                communicator.launch(bucket.payload, CommTiming())  # type: ignore[attr-defined]
                communicator.wait()

            run()
            mine = []
            for _ in range(PROBES):
                dist.barrier(group=world.group)
                mine.append(timed_us(run, CPU))
            everyone = world.gather(mine, "probing the machine")
            passes = [min(of_pass) for of_pass in zip(*everyone, strict=True)]
            times[numel * 4] = sorted(passes)[len(passes) // 2]
    finally:
        communicator.close()
    update_us_per_byte = _probe_update(world)
    (small, small_us), (large, large_us) = times.items()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        start_up_us=small_us, us_per_byte=max(0.0, large_us - small_us) / (large - small),
        update_us_per_byte=update_us_per_byte, memory_bytes=memory,
    )  # fmt: skip


def _probe_update(world: World) -> float:
    """Return microseconds per byte of weights of an update that all ranks make at once, on the slowest of them."""
    weights = [torch.zeros(PROBE_BYTES // 4 // PIECES, requires_grad=True) for _ in range(PIECES)]
    optimizer = torch.optim.SGD(weights, lr=1e-2)
    mine = []
    for _ in range(PROBES):
        for one in weights:  # in new memory, as after each `zero_grad`
            one.grad = torch.ones_like(one)
        dist.barrier(group=world.group)
        mine.append(timed_us(optimizer.step, weights[0].device))
        optimizer.zero_grad()
    everyone = world.gather(statistics.median(mine), "probing the machine")
    return float(max(everyone)) / PROBE_BYTES


def shape_links(world: World, links: Links, scale: Scale) -> None:
    """Hold this host's links to the scaled rates; the first rank of each host does."""
    problem = None
    rate = scale.rate(links.inter_bits_per_s)
    settings = {
        # Connections idle during a computation, which is dilated: they would begin slowly again as on no cluster.
        "tcp_slow_start_after_idle": 0,
        "tcp_min_tso_segs": 1,
        "tcp_limit_output_bytes": max(MTU_BYTES, round(WAITING_S * scale.dilate * rate / 8)),
    }
    for name, value in settings.items():
        with suppress(OSError):  # where a container does not let it be set, it stays
            (SETTINGS / name).write_text(str(value), encoding="ascii")
    if os.environ.get("LOCAL_RANK") == "0":
        commands = [["tc", *shaping(rate).replace("add", "replace", 1).split()]]
        if links.intra_bits_per_s is not None:
            inside = shaping(scale.rate(links.intra_bits_per_s)).replace(INTERFACE, "lo").replace("add", "replace", 1)
            # Packets that are larger than what is shaped at once would be dropped, again and again.
            commands += [["ip", "link", "set", "lo", "mtu", str(MTU_BYTES)], ["tc", *inside.split()]]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, timeout=15.0, check=False)
            problem = problem or (done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else None)
    problems = [one for one in world.gather(problem, "shaping links") if one]
    if problems:
        raise EnvironmentFailure(f"the links of the emulated hosts cannot be held to their rates: {problems[0]}")
