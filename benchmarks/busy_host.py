"""Real training on two emulated hosts, one of whose cores is busy half of the time: equal against planned shares.

Each host has one core. On the second one another process computes for half of each `PERIOD_S`, before whatever else
runs there. Ranks profile the job as it then is, plan shares by that, compare both in interleaved blocks, and train the
job by each: losses of all samples have to be the same, for gradients are weighed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import planner
from planner import TrainingJob
from planner.comparison.measure import Measured, compare_rank
from planner.comparison.report import summarize, values_by_name
from planner.comparison.statistics import ratio_interval
from planner.comparison.variants import EQUAL_SHARES, PLAN, Rounds, make_lineup
from planner.jobs.launch import LocalWorld, run_ranks
from planner.jobs.lr_schedule import Course
from planner.jobs.on_rank import profile_rank, train_rank
from planner.profile.request import Request
from planner.testbed.hosts import parse_emulation
from runtime.errors import EnvironmentFailure
from runtime.plan import Plan

SPEC, EXACT, HOSTS = f"{__name__}:job", f"{__name__}:exact_job", "2x1@1gbit"
BATCH, BUSY_RANK, PERIOD_S = 32, 1, 0.01
MOST_ROUNDS, STEPS, LOSS_STEPS = 40, 4, 60
ROUNDS_SHARE = 0.5
"""Share of the minutes that rounds take."""
SPIN = """
import os, sys, time
core, half_s, parent = int(sys.argv[1]), float(sys.argv[2]) / 2, os.getppid()
os.sched_setaffinity(0, {core})
os.setpriority(os.PRIO_PROCESS, 0, -20)
while os.getppid() == parent:
    end_s = time.perf_counter() + half_s
    while time.perf_counter() < end_s:
        pass
    time.sleep(half_s)
"""


@dataclass(frozen=True)
class Seen:
    """What one rank saw."""

    plan: Plan
    measured: Measured
    losses: tuple[tuple[float, ...], ...]
    """Losses in float64 with the plan's shares, and with equal ones."""


def job() -> TrainingJob:
    """Return a job of convolutions without statistics of their batches, which shares would change."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    head = (nn.Flatten(), nn.Linear(32 * 4 * 4, 512), nn.ReLU(), nn.Linear(512, 3))

    def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
        return images, images.mean(dim=(2, 3)).argmax(dim=1)

    return TrainingJob(
        model=nn.Sequential(*layers, *head), loss=lambda model, pair: functional.cross_entropy(model(pair[0]), pair[1]),
        batch=batch, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    )  # fmt: skip


def exact_job() -> TrainingJob:
    """Return the job in float64: in float32 the order of sums moves losses by 1e-7, and training enlarges that."""
    usual = job()

    def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
        images, labels = usual.batch(step, rank)
        return images.double(), labels

    return replace(usual, model=usual.model.double(), batch=batch)


@contextmanager
def half_busy(core: int) -> Iterator[None]:
    """Keep a core busy for half of the time, as long as this process runs."""
    spinning = subprocess.Popen([sys.executable, "-c", SPIN, str(core), str(PERIOD_S)])
    try:
        yield
    finally:
        spinning.kill()
        spinning.wait()


def on_rank(cores: Sequence[int], rounds_s: float) -> Seen:
    """Profile, plan, compare for some seconds, and train on this rank."""
    core = cores[dist.get_rank()]
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})
    torch.set_num_threads(1)
    with half_busy(core) if dist.get_rank() == BUSY_RANK else nullcontext():
        profile = profile_rank(SPEC, "cpu", False, request=Request(budget_s=10.0))
        plan = planner.optimize(profile, global_batch=BATCH * len(cores))
        lineup = replace(make_lineup(plan, None, (), hooks=()), caps=())
        rounds = Rounds(count=MOST_ROUNDS, steps=STEPS, end_s=time.time() + rounds_s)
        measured = compare_rank(SPEC, lineup, rounds, "cpu", False)
        buckets = tuple(replace(bucket, size_bytes=None) for bucket in plan.buckets)
        doubled = replace(plan, model=replace(plan.model, fingerprint=None), buckets=buckets)
        equal = replace(doubled, shares=dict.fromkeys(plan.shares or {}, BATCH))
        losses = tuple(train_rank(EXACT, one, Course(LOSS_STEPS), "cpu", False).losses for one in (doubled, equal))
    return Seen(plan, measured, losses)


def measure(minutes: float) -> dict[str, Any]:
    """Return shares, steps and losses. Raises EnvironmentFailure: there is one core, or no emulated host."""
    emulation, cores = parse_emulation(HOSTS), sorted(os.sched_getaffinity(0))
    if len(cores) < emulation.ranks:
        raise EnvironmentFailure(f"found {len(cores)} core, expected one for each of {emulation.ranks} hosts")
    world, rounds_s = LocalWorld(ranks=emulation.ranks, emulation=emulation), ROUNDS_SHARE * 60.0 * minutes
    ranks = run_ranks(world, on_rank, cores[: emulation.ranks], rounds_s)
    values = values_by_name([rank.measured for rank in ranks])
    ratio = ratio_interval(values[PLAN], values[EQUAL_SHARES])
    rows = {row.name: row for row in summarize([rank.measured for rank in ranks]).rows}
    shared, equal = np.array([rank.losses for rank in ranks]).mean(axis=0)
    return {
        "shares": ranks[0].plan.shares, "ratio": ratio.value, "ci95": (ratio.low, ratio.high), "rounds": ratio.rounds,
        "steps_us": {name: row.median_us for name, row in rows.items()}, "predicted_us": rows[PLAN].predicted_us,
        "losses": (shared[0], shared[-1]), "apart": float(np.abs(shared / equal - 1.0).max()),
        "buckets": [one.gradients for one in ranks[0].plan.buckets],
    }  # fmt: skip
