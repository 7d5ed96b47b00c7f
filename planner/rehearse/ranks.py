"""A rank of a rehearsal, from the machine as it is to the compared steps."""

from __future__ import annotations

import os
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch

from planner.comparison.measure import LEAST_ROUNDS, Measured, Sweep, V
from planner.comparison.variants import DDP, Rounds
from planner.profile.bench import EVERY_S, Bench, Progress, Run, median_of_slowest
from planner.profile.links import SMALLEST_BYTES, Curve, Limits, Messages
from planner.profile.step import decided_by_first, joined
from planner.rehearse.asked import Asked, Bounds, Figures
from planner.rehearse.scale import Links, Machine, Scale, choose_scale, links_of
from planner.testbed.hosts import emulation_here
from planner.testbed.pacing import pace_connections
from planner.testbed.wiring import INTERFACE, MTU_BYTES, shaping
from runtime.comm.world import World
from runtime.errors import EnvironmentFailure, InputError

A = TypeVar("A", bound=Asked)

TIMEOUT_S = 120.0
SETTINGS = Path("/proc/sys/net/ipv4")
"""Settings of the emulated host alone."""
WAITING_S = 1e-3
"""Seconds of what a connection sends that a host keeps in its own queue, on the cluster as it is: TCP's own bound
is not less than two large packets. On a link held to some Mbit/s those take tens of milliseconds, in which gloo's
messages that ask for the next piece wait behind them."""
PROBE_BYTES = 2**24
"""Size of a message whose time is the machine's, not its start-up."""
PIECES = 32
"""Number of the weights whose update is probed."""
PROBES = 7
LEAST_BYTES = 16
"""Least size of a message, however much is shrunk."""
LINK_SHARE = 0.15
"""Share of the time given that timing messages may take."""
WARM_UP_STEPS = 1
"""Number of steps at the start of each block that are not measured: DDP lays its buckets out again after the first."""
BLOCK_STEPS = 3
"""Measured steps of a block. Waits differ by little, so that a few steps say as much as many, and time is better spent
on a larger dilation."""
OWN_STEPS = 5
"""Number of steps without communication, before anything is predicted."""
MOST_ROUNDS = 40
SWEEP = Sweep(rounds=1, finalists=2, final_rounds=2, steps=2)
"""Measurements by which DDP's bucket size is chosen: few, since dilated steps differ by little."""
SHOWN_SHARE = 0.07
"""Share of the time given that passes between two lines of progress, if that is less than the usual."""
SWEEP_SHARE = 0.3
"""Share of the time left that looking for DDP's best bucket size may take."""
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Decided(Generic[V]):
    """The variants that are compared, and their predictions; times are of the cluster itself."""

    variants: Sequence[V]
    from_constants_us: dict[str, float]
    """Steps by variant, predicted by the cluster's constants alone."""
    bounds: Bounds
    caps: Sequence[tuple[float, V]] = ()
    """DDP's bucket sizes to try."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The time of measuring one variant."""

    name: str
    step_s: float
    steps: int
    """Steps of a block, those that do not count included."""
    before: int = 0
    """Steps before the first round."""
    after: int = 0
    """Most steps that timing its messages alone, after the last round, takes as long as."""
    brief: bool = False
    """Whether its steps are so slow that it takes part in the fewest rounds."""

    @property
    def least_s(self) -> float:
        """Seconds of the fewest rounds, with what is before and after them."""
        return self.step_s * (self.before + LEAST_ROUNDS * self.steps + self.after)

    @property
    def round_s(self) -> float:
        """Seconds of one more round."""
        return 0.0 if self.brief else self.step_s * self.steps


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """The measurements of one rank; undilated and unshrunk."""

    scale: Scale
    measured: Measured
    figures: Figures
    bounds: Bounds


class Rehearser(ABC, Generic[A, V]):
    """One kind of rehearsal, on this rank."""

    COPIES: ClassVar[float] = 1.0
    """Factor by which bytes are shrunk more than the machine's sockets need, as hosts copy them as well."""
    WHAT: ClassVar[str]
    """Text about the compared variants, with a place for their number."""

    def __init__(self, asked: A, bench: Bench, scale: Scale) -> None:
        """Rehearse what is asked at a scale."""
        self.asked, self.bench, self.world, self.scale = asked, bench, bench.world, scale

    @staticmethod
    @abstractmethod
    def most_dilate(asked: Any, left_s: float) -> float:
        """Return the dilation at which the fewest rounds take most of what is left, by the cluster's constants."""

    @abstractmethod
    def decide(self) -> Decided[V]:
        """Time messages alone, and decide by that; every rank calls it."""

    @abstractmethod
    def blocks(self, decided: Decided[V], steps: int) -> list[Blocks]:
        """Return each variant's blocks of `steps` measured steps."""

    @abstractmethod
    def measure(self, decided: Decided[V], rounds: Rounds) -> tuple[Measured, dict[str, Any]]:
        """Measure all variants; return that, dilated, and figures by name and variant, undilated."""

    def rounds(self, decided: Decided[V], started_s: float) -> tuple[Rounds, Decided[V]]:
        """Return the rounds that fit into the minutes that began at `started_s`, and what is measured in them.

        Raises:
            InputError: not even the fewest rounds fit.
        """
        asked = self.asked
        rounds, caps = choose_rounds(
            lambda steps: self.blocks(decided, steps), decided.caps, asked.left_s(started_s), asked.minutes
        )
        after_s = sum(each.after * each.step_s for each in self.blocks(decided, rounds.steps))
        rounds = replace(rounds, end_s=started_s + asked.minutes * 60.0 - after_s)
        return rounds, replace(decided, caps=[one for one in decided.caps if one[0] in caps])

    def limits(self, curves: int, ranks: int = 1) -> Limits:
        """Return the bounds of timing one of some curves, whose smallest messages are divided among `ranks`."""
        smallest_bytes = max(LEAST_BYTES * ranks, round(SMALLEST_BYTES / self.scale.shrink))
        return Limits(LINK_SHARE * self.asked.minutes * 60.0 / curves, smallest_bytes=smallest_bytes)

    def bare_steps_us(self, step: Run, warm_up: int, what: str) -> tuple[float, float]:
        """Return the time of a step on a usual rank and on the last one, for which others wait, dilated.

        Every rank calls it.
        """
        times_us = replace(self.bench, progress=Progress()).times_us([step], OWN_STEPS, what, warm_up)
        return float(np.median(times_us)), float(median_of_slowest(times_us)[0])

    def unscaled(self, curves: Mapping[str, Curve]) -> dict[str, Curve]:
        """Return curves as the cluster itself would have them."""
        dilate, shrink = self.scale.dilate, self.scale.shrink
        return {
            name: tuple((size * shrink, time_us / dilate) for size, time_us in curve) for name, curve in curves.items()
        }


def choose_rounds(
    blocks_of: Callable[[int], Sequence[Blocks]], caps: Sequence[tuple[float, Any]], left_s: float, minutes: float
) -> tuple[Rounds, Collection[float]]:
    """Return the rounds that there is time for, and the bucket sizes of DDP that are tried before.

    Args:
        blocks_of: returns each variant's blocks of a number of measured steps.
        caps: bucket sizes with their variants.
        left_s: seconds.
        minutes: that were asked for.

    Raises:
        InputError: not even the fewest rounds fit.
    """
    # Steps that are slow even undilated: fewer of each block.
    for steps in range(BLOCK_STEPS, 0, -1):
        blocks = blocks_of(steps)
        least_s = sum(each.least_s for each in blocks)
        if least_s <= left_s:
            break
    if least_s > left_s:
        slowest = max(blocks, key=lambda each: each.step_s)
        raise InputError(
            f"--minutes {minutes:g}: a step of {slowest.name} takes {slowest.step_s:.2g} s here, and the fewest rounds "
            f"of {len(blocks)} variants {least_s / 60:.1f} minutes of the {max(0.0, left_s) / 60:.1f} that are left; "
            f"expected --minutes {minutes + (least_s - left_s) / 60 + 0.5:.0f} or more, fewer strategies, or --dilate "
            f"less"
        )
    # The sizes that are predicted to be the fastest: what the sweep has no time for would have lost. The best one is
    # measured with the others.
    by_prediction = sorted(caps, key=lambda one: one[1].predicted_us or 0.0)
    ddp = next((each for each in blocks if each.name == DDP), blocks[0])

    def swept_s(count: int) -> float:
        tried_s = SWEEP.blocks(count) * (WARM_UP_STEPS + SWEEP.steps) * ddp.step_s
        return tried_s + (ddp.least_s if count else 0.0)

    most_s = 0.0 if ddp.brief else min(SWEEP_SHARE * left_s, left_s - least_s)
    most = max(count for count in range(len(caps) + 1) if swept_s(count) <= most_s)
    left_s -= least_s + swept_s(most)
    round_s = sum(each.round_s for each in blocks) + (ddp.round_s if most else 0.0)
    count = min(MOST_ROUNDS, LEAST_ROUNDS + int(left_s / round_s))
    brief = tuple(each.name for each in blocks if each.brief)
    return Rounds(count=count, steps=steps, brief=brief), {cap for cap, _ in by_prediction[:most]}


def rehearse_rank(kind: type[Rehearser[A, Any]], asked: A, started_s: float | None, show_progress: bool) -> Rehearsed:
    """Rehearse on this rank; every rank calls it.

    Args:
        kind: what is rehearsed.
        asked: its request.
        started_s: wall-clock seconds at which the minutes began; None: now, however long ranks took to start.
        show_progress: whether lines are written on standard error.
    """
    started_s = time.time() if started_s is None else started_s
    with joined(None, TIMEOUT_S) as world:
        every_s = min(EVERY_S, SHOWN_SHARE * asked.minutes * 60.0)
        bench = Bench(world, CPU, Progress(show_progress and world.rank == 0, every_s))
        scale = begin(bench, asked, lambda: kind.most_dilate(asked, asked.left_s(started_s)), kind.COPIES)
        rehearser = kind(asked, bench, scale)
        decided = rehearser.decide()
        rounds, decided = decided_by_first(world, lambda: rehearser.rounds(decided, started_s), "agreeing on rounds")
        what = kind.WHAT.format(variants=len(decided.variants))
        what += f" and {len(decided.caps)} bucket sizes of DDP" if decided.caps else ""
        slow = f", {LEAST_ROUNDS} of one step of {', '.join(rounds.brief)}" if rounds.brief else ""
        say(world, f"{what}: {rounds.count} rounds of {rounds.steps} steps each{slow}")
        measured, figures = rehearser.measure(decided, rounds)
        for record in measured.records:
            record.step_us = [[step_us / scale.dilate for step_us in block] for block in record.step_us]
            record.alone_us = None if record.alone_us is None else record.alone_us / scale.dilate
            record.figures = [time_us / scale.dilate for time_us in record.figures]
        return Rehearsed(
            scale=scale, measured=replace(measured, backward_us=measured.backward_us / scale.dilate),
            figures={"from_constants_us": decided.from_constants_us, **figures}, bounds=decided.bounds,
        )  # fmt: skip


def begin(bench: Bench, asked: Asked, most_dilate: Callable[[], float], copies: float) -> Scale:
    """Agree on the scale, and hold links to it; every rank calls it.

    Args:
        bench: all ranks.
        asked: what is rehearsed.
        most_dilate: returns the dilation that there is time for; the first rank calls it if none is asked for.
        copies: factor by which bytes are shrunk more than the machine's sockets need.
    """
    # A thread that wakes must not take the core from one that holds a lock of gloo's, or it spins there until the other
    # is on again: with eight ranks on two cores an all-reduce starts up three times more slowly then.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    links, world = links_of(asked.cluster), bench.world
    machine = probe(replace(bench, progress=Progress()))

    def chosen() -> Scale:
        most = asked.dilate or most_dilate()
        return choose_scale(links, machine, asked.profile, most_dilate=most, dilate=asked.dilate, shrink=asked.shrink)

    scale = decided_by_first(world, chosen, "agreeing on the scale")
    if asked.shrink is None:
        scale = replace(scale, shrink=round(copies * scale.shrink, 1))
    say(
        world,
        f"dilated {scale.dilate:g} times, shrunk {scale.shrink:g} times: an all-reduce starts up in "
        f"{machine.start_up_us / scale.dilate:.0f} us (asked {links.start_up_us:.0f})",
    )
    if emulation_here() is not None:
        shape_links(world, links, scale)
    pace(links, scale)
    return scale


def say(world: World, text: str) -> None:
    """Write a line on standard error, on the first rank alone."""
    if world.rank == 0:
        os.write(2, f"rehearse: {text}\n".encode())


def probe(bench: Bench) -> Machine:
    """Return the performance of these ranks while no link limits them."""
    small, large = 1024, PROBE_BYTES
    with closing(Messages("all_reduce", bench, large)) as messages:
        times_us = bench.times_us([messages.run(small), messages.run(large)], PROBES, "the machine", warm_up=1)
    small_us, large_us = np.median(np.min(times_us, axis=0), axis=0).tolist()
    weights = [torch.zeros(PROBE_BYTES // 4 // PIECES, requires_grad=True) for _ in range(PIECES)]
    optimizer = torch.optim.SGD(weights, lr=1e-2)

    def reset() -> None:
        for one in weights:  # in new memory, as after each `zero_grad`
            one.grad = torch.ones_like(one)

    update_us = np.median(bench.times_us([reset, optimizer.step], PROBES, "updates")[:, :, 1], axis=1).max()
    return Machine(
        ranks=bench.world.ranks, start_up_us=small_us, us_per_byte=max(0.0, large_us - small_us) / (large - small),
        update_us_per_byte=float(update_us) / PROBE_BYTES,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )  # fmt: skip


def pace(links: Links, scale: Scale) -> None:
    """Hold this rank's connections to the scaled rate of the link between hosts, unless an emulated host does."""
    if emulation_here() is None:
        pace_connections(scale.rate(links.inter_bits_per_s))


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
        with suppress(OSError):  # if a container does not let it be set, it stays
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
