"""`planner.attach(model, optimizer)` beside DDP over a matrix of jobs and links, and writes docs/results/one-line.md.

    python -m benchmarks.one_line --results cells.jsonl            # resumes where an earlier run was stopped
    python -m benchmarks.one_line --results cells.jsonl --only encoder --steps 400
    python -m benchmarks.one_line --results cells.jsonl --write    # puts what is known into the document

From step 300 on a twin of the model takes steps with DDP at its best bucket size between those of the run that plans;
after its last step that run goes on by turns with its own plan and with the one that was made offline: ratios are of
steps of the same processes. First steps are compared with two other processes', one before, one after. Jobs that
are rehearsed, `googlenet/5`, wait as long as an accelerator would compute that is five times as fast as the model's
profile says, and have a quarter of its bytes; others compute on the cores that also send. Emulated links need root. The
machine has to do nothing else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import planner
from benchmarks.marked import write_part
from benchmarks.overhead import convolutions, encoder
from benchmarks.resumable import kept
from examples.digits import ResNet20
from planner.comparison.statistics import Interval, ratio_interval
from planner.comparison.variants import distinct_caps
from planner.documents.catalog import find_profile
from planner.jobs.job import TrainingJob
from planner.jobs.launch import LocalWorld, run_ranks
from planner.jobs.training import make_optimizer, weights_sha256
from planner.online.attach import PlannedSession
from planner.rehearse.accelerator import make_job
from planner.rehearse.scale import Scale
from planner.strategies.baselines import CAPS_MIB
from planner.testbed.hosts import parse_emulation
from runtime.optimizers.kinds import each_of
from runtime.plan import Plan

DOCUMENT = Path("docs/results/one-line.md")
RANKS, STEPS, FIRST_STEPS = 2, 1000, 300
SMALLER = 4.0
"""By how much rehearsed jobs are smaller than their models: what is sent costs the cores time as well."""
SPIN_LESS = 4.0
"""By how much the ends of waits that are not slept are shorter: deep models have a gradient every 100 us."""
SWEPT_STEPS, AGAIN_STEPS = 40, 60
PLANNED_STEPS, BESIDE_STEPS = 20, 10
"""Of a block of the run that plans, and of one of what stands beside it; the first one of each does not count."""
OFFLINE_ROUNDS = 20
LIMITS = {"first": 1.02, "steady": 1.01, "offline": 1.02}


class Recurrent(nn.Module):
    """Two LSTM layers between an embedding and a classifier; 9.3 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(4000, 256), nn.LSTM(256, 640, 2, batch_first=True)
        self.out = nn.Linear(640, 4000)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, length) → scores of the next one (batch, classes)."""
        found: Tensor = self.out(self.lstm(self.embedding(tokens))[0][:, -1])
        return found


class Language(nn.Module):
    """A transformer whose output shares the weights of its embedding; 5.2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, length) → scores of the next one (batch, classes)."""
        return functional.linear(self.layers(self.embedding(tokens))[:, -1], self.embedding.weight)


def perceptron() -> nn.Module:
    """12.6 million parameters in twelve equal layers."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(12)), nn.Linear(1024, 10))


Batch = Callable[[torch.Generator], tuple[Tensor, Tensor]]


def _random(classes: int, *shape: int, words: int = 0) -> Batch:
    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randint(words, shape, generator=generator) if words else torch.randn(*shape, generator=generator)
        return x, torch.randint(classes, shape[:1], generator=generator)

    return batch


COMPUTED: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "resnet20": (ResNet20, _random(10, 64, 1, 16, 16)),
    "convolutions": (convolutions, _random(10, 16, 1, 16, 16)),
    "encoder": (encoder, _random(10, 6, 1, 16, 16)),
    "perceptron": (perceptron, _random(10, 32, 1024)),
    "lstm": (Recurrent, _random(4000, 8, 16, words=4000)),
    "language": (Language, _random(8000, 8, 32, words=8000)),
}
LOOPBACK = "loopback"
CELLS = (
    *(f"{job}@2x1@5gbit" for job in COMPUTED if job != "lstm"),
    *(f"{job}@{LOOPBACK}" for job in ("perceptron", "language", "lstm")),
    *("googlenet/5@2x1@2gbit", "googlenet/5@2x1@1gbit", "densenet201/3@2x1@3gbit", "resnet50-k80-b32/6@2x1@3gbit"),
)


Rounds = list[list[float]]


@dataclass(frozen=True)
class Trained:
    """A run that planned, on one rank; times in microseconds, from the end of one step to that of the next."""

    step_us: list[float]
    weights_sha256: str
    buckets: int
    story: tuple[str, ...]
    beside_ddp_us: tuple[Rounds, Rounds]
    """Blocks of its steps, and those of DDP that followed each."""
    beside_offline_us: tuple[Rounds, Rounds]


def _world(link: str) -> LocalWorld:
    return LocalWorld(ranks=RANKS, emulation=None if link == LOOPBACK else parse_emulation(link))


def accelerated(job: str, rank: int) -> TrainingJob:
    """Return a rehearsed job."""
    model, _, faster = job.partition("/")
    scale = Scale(dilate=1.0 / float(faster), shrink=SMALLER)
    return make_job(scale.profile(find_profile(model)).compute, rank, SPIN_LESS)


def parameters_of(job: str) -> list[nn.Parameter]:
    """Return the parameters of a job's model, the last ones first, as they become ready."""
    model = COMPUTED[job][0]() if job in COMPUTED else accelerated(job, 0).model
    return [*model.parameters()][::-1]


class Run:
    """A model and its batches, the same in every process but for the rank."""

    def __init__(self, job: str) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self._batch: Batch | None = None
        if job in COMPUTED:
            make, self._batch = COMPUTED[job]
            self.model = make()
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        else:
            rehearsed = accelerated(job, dist.get_rank())
            self.model, (self.optimizer,) = rehearsed.model, each_of(make_optimizer(rehearsed, "rehearsal"))

    def loss(self, forward: nn.Module, number: int) -> Tensor:
        if self._batch is None:
            alone: Tensor = forward(torch.zeros((), dtype=torch.float64))
            return alone
        x, labels = self._batch(torch.Generator().manual_seed(RANKS * number + dist.get_rank()))
        return functional.cross_entropy(forward(x), labels)

    def step(self, forward: nn.Module, number: int) -> None:
        self.optimizer.zero_grad()
        self.loss(forward, number).backward()
        self.optimizer.step()

    def times_us(self, forward: nn.Module, steps: int, begin: int = 0) -> list[float]:
        times = []
        for number in range(begin, begin + steps):
            begun = time.perf_counter()
            self.step(forward, number)
            times.append((time.perf_counter() - begun) * 1e6)
        return times


def with_ddp(job: str, steps: int, cap_mib: float | None) -> tuple[list[float], str]:
    """On one rank: DDP, with its default buckets or of one size; times of steps, and the weights' digest."""
    run = Run(job)
    times = run.times_us(DistributedDataParallel(run.model, bucket_cap_mb=cap_mib), steps)
    return times, weights_sha256(run.model)


def swept(job: str, caps_mib: Sequence[float | None]) -> list[list[float]]:
    """On one rank: some steps of DDP with buckets of each size."""
    return [with_ddp(job, SWEPT_STEPS, cap_mib)[0] for cap_mib in caps_mib]


def with_planner(job: str, steps: int, first: int, cache: str, cap_mib: float | None, offline: Plan | None) -> Trained:
    """On one rank: the one line, with a cache; against DDP from step `first` on, and an offline plan at last."""
    os.environ["PLANNER_CACHE"] = cache
    run = Run(job)
    session: PlannedSession = planner.attach(run.model, run.optimizer)
    times = run.times_us(run.model, first)
    beside_ddp: tuple[Rounds, Rounds] = ([], [])
    if len(times) < steps:
        twin = Run(job)
        ddp = DistributedDataParallel(twin.model, bucket_cap_mb=cap_mib)
        twin.times_us(ddp, BESIDE_STEPS)
    while len(times) < steps:
        block = run.times_us(run.model, PLANNED_STEPS, len(times))
        times += block
        beside_ddp[0].append(block[1:])
        beside_ddp[1].append(twin.times_us(ddp, BESIDE_STEPS)[1:])
    story = tuple(session._pilot.story) if session._pilot else ()
    found, weights = session.plan, weights_sha256(run.model)
    beside_offline: tuple[Rounds, Rounds] = ([], [])
    for _ in range(0 if offline is None else OFFLINE_ROUNDS):
        for blocks, plan in zip(beside_offline, (found, offline), strict=True):
            assert plan is not None
            session.switch(plan)
            blocks.append(run.times_us(run.model, BESIDE_STEPS)[1:])
    session.detach()
    return Trained(times, weights, len(found.buckets), story, beside_ddp, beside_offline)


def offline_plan(job: str) -> Plan:
    """On one rank: what `planner profile` and `planner optimize` decide."""
    run = Run(job)
    return planner.optimize(planner.profile_step(run.model, lambda: run.loss(run.model, 0).backward(), run.optimizer))


def _ratio(ranks: Sequence[tuple[Rounds, Rounds]]) -> tuple[Interval, float, float]:
    """Return the ratio of the medians of two ways' steps on the slowest rank, and both medians in microseconds."""
    ours, other = (np.max([one[way] for one in ranks], axis=0) for way in range(2))
    ours = ours[:, : other.shape[1]]
    return ratio_interval(ours, other), float(np.median(ours)), float(np.median(other))


def measure(cell: str, steps: int) -> dict[str, Any]:
    """Train one cell every way; return its row."""
    job, _, link = cell.partition("@")
    world, first = _world(link), min(FIRST_STEPS, steps // 2)
    plan = run_ranks(world, offline_plan, job)[0]
    sizes = [p.numel() * p.element_size() for p in parameters_of(job)]
    caps: list[float | None] = [None, *distinct_caps(sizes, [0] * len(sizes), CAPS_MIB)]
    sweep_us = np.max(run_ranks(world, swept, job, caps), axis=0)
    best = caps[int(np.argmin(np.median(sweep_us[:, 5:], axis=1)))]
    with tempfile.TemporaryDirectory() as cache:
        before = run_ranks(world, with_ddp, job, steps, None)
        found = run_ranks(world, with_planner, job, steps, first, cache, best, plan)
        after = run_ranks(world, with_ddp, job, first, None)
        again = run_ranks(world, with_planner, job, AGAIN_STEPS, AGAIN_STEPS, cache, None, None)
    found_us = np.max([one.step_us for one in found], axis=0)
    before_us, after_us = (np.max([times for times, _ in ddp], axis=0) for ddp in (before, after))
    firsts = [float(found_us[:first].sum() / ddp_us[:first].sum()) for ddp_us in (before_us, after_us)]
    steady, steady_us, best_us = _ratio([one.beside_ddp_us for one in found])
    offline, _, offline_us = _ratio([one.beside_offline_us for one in found])
    return {
        "cell": cell, "steps": steps, "best_cap_mib": best, "steady_us": steady_us, "best_ddp_us": best_us,
        "ddp_us": float(np.median(before_us[first:])), "offline_us": offline_us,
        "first": statistics.harmonic_mean(firsts), "first_interval": sorted(firsts),
        "steady": steady.value, "steady_interval": [steady.low, steady.high],
        "offline": offline.value, "offline_interval": [offline.low, offline.high],
        "buckets": found[0].buckets, "offline_buckets": len(plan.buckets), "story": list(found[0].story),
        "same_weights": found[0].weights_sha256 == before[0][1],
        "second_run_planned": any("step 0: planned from the first step" in line for line in again[0].story),
    }  # fmt: skip


def _figure(row: dict[str, Any], name: str) -> str:
    low, high = row[f"{name}_interval"]
    return f"{row[name]:.3f} ({low:.3f} to {high:.3f}){'' if row[name] <= LIMITS[name] else ' over'}"


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown."""
    lines = [
        "| cell | DDP ms | best DDP ms | planned ms | first 300 / DDP | steady / best DDP | steady / offline plan | "
        "second run planned | DDP's weights |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        figures = " | ".join(_figure(row, name) for name in LIMITS)
        times = " | ".join(f"{row[name] / 1e3:.1f}" for name in ("ddp_us", "best_ddp_us", "steady_us"))
        signs = " | ".join("yes" if row[name] else "no" for name in ("second_run_planned", "same_weights"))
        lines.append(f"| {row['cell']} | {times} | {figures} | {signs} |")
    met = {name: sum(row[name] <= limit for row in rows) for name, limit in LIMITS.items()}
    words = {
        "first": "first 300 steps",
        "steady": "later steps compared with the best DDP",
        "offline": "compared with an offline plan",
    }
    lines += [
        "",
        *(f"{words[name]}: {met[name]} of {len(rows)} cells within {limit}." for name, limit in LIMITS.items()),
    ]
    return lines


def main() -> int:
    """Measure what is missing, print, write; 0 even where a limit is passed: the document says so."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--results", type=Path, required=True, help="JSON lines: not measured again")
    parser.add_argument("--only", help="cells with this in their names")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the runs that are compared")
    parser.add_argument("--write", action="store_true", help=f"put what is known into {DOCUMENT}")
    options = parser.parse_args()
    wanted = {cell: partial(measure, cell, options.steps) for cell in CELLS}
    rows = kept(options.results, wanted, options.only or "")
    if not rows:
        return 3
    text = "\n".join(table(rows))
    print(text)
    if options.write:
        write_part(DOCUMENT, "cells", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
