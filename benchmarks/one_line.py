"""`planner.attach(model, optimizer)` beside DDP over a matrix of jobs and links, and writes docs/results/one-line.md.

    python -m benchmarks.one_line --results cells.jsonl            # resumes where an earlier run was stopped
    python -m benchmarks.one_line --results cells.jsonl --only encoder --steps 400
    python -m benchmarks.one_line --results cells.jsonl --only bounded
    python -m benchmarks.one_line --results cells.jsonl --write    # puts what is known into the document

From step 300 on a twin of the model takes steps with DDP at its best bucket size between those of the run that plans;
after its last step that run goes on by turns with its own plan and with the one that was made offline: ratios are of
steps of the same processes. First steps are compared with two other processes', one before, one after. Cells
of `bounded` are those of `benchmarks.one_line_bounded`. Emulated links need root. The machine has to do nothing else.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.nn.parallel import DistributedDataParallel

import planner
from benchmarks import one_line_bounded
from benchmarks.marked import parser_of, tabulate
from benchmarks.one_line_jobs import COMPUTED, LOOPBACK, Rounds, Run, best_cap, ratio_of, with_ddp, world_of
from planner.jobs.launch import run_ranks
from planner.jobs.training import weights_sha256
from planner.online.attach import PlannedSession
from runtime.plan import Plan

DOCUMENT = Path("docs/results/one-line.md")
STEPS, FIRST_STEPS = 1000, 300
AGAIN_STEPS = 60
PLANNED_STEPS, BESIDE_STEPS = 20, 10
"""Of a block of the run that plans, and of one of what stands beside it; the first one of each does not count."""
OFFLINE_ROUNDS = 20
LIMITS = {"first": 1.02, "steady": 1.01, "offline": 1.02}

CELLS = (
    *(f"{job}@2x1@5gbit" for job in COMPUTED if job != "lstm"),
    *(f"{job}@{LOOPBACK}" for job in ("perceptron", "language", "lstm")),
    *("googlenet/5@2x1@2gbit", "googlenet/5@2x1@1gbit", "densenet201/3@2x1@3gbit", "resnet50-k80-b32/6@2x1@3gbit"),
)


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


def measure(cell: str, steps: int) -> dict[str, Any]:
    """Train one cell every way; return its row."""
    job, _, link = cell.partition("@")
    world, first = world_of(link), min(FIRST_STEPS, steps // 2)
    plan = run_ranks(world, offline_plan, job)[0]
    best = best_cap(world, job)
    with tempfile.TemporaryDirectory() as cache:
        before = run_ranks(world, with_ddp, job, steps, None)
        found = run_ranks(world, with_planner, job, steps, first, cache, best, plan)
        after = run_ranks(world, with_ddp, job, first, None)
        again = run_ranks(world, with_planner, job, AGAIN_STEPS, AGAIN_STEPS, cache, None, None)
    found_us = np.max([one.step_us for one in found], axis=0)
    before_us, after_us = (np.max([times for times, _ in ddp], axis=0) for ddp in (before, after))
    firsts = [float(found_us[:first].sum() / ddp_us[:first].sum()) for ddp_us in (before_us, after_us)]
    steady, steady_us, best_us = ratio_of([one.beside_ddp_us for one in found])
    offline, _, offline_us = ratio_of([one.beside_offline_us for one in found])
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
    """Measure what is missing, print, write."""
    parser = parser_of(__doc__, DOCUMENT)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the runs that are compared")
    options = parser.parse_args()
    kinds = {"cells": (CELLS, measure, table)} | {
        "bounded": (one_line_bounded.CELLS, one_line_bounded.measure, one_line_bounded.table)
    }
    parts = {
        part: ({cell: partial(measured, cell, options.steps) for cell in cells}, tabulated)
        for part, (cells, measured, tabulated) in kinds.items()
    }
    return tabulate(DOCUMENT, parts, options)


if __name__ == "__main__":
    sys.exit(main())
