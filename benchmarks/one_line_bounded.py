"""Cells of `benchmarks.one_line` with `planner.attach(model, optimizer, accuracy="bounded")` on four emulated hosts.

    python -m benchmarks.one_line --results cells.jsonl --only bounded

First steps are compared with those of DDP in two other processes, one before, one after. When planning is over, the
run's own plan alternates in blocks of steps with the bounded plan and the best exact one that were made offline from a
profile, and with a twin of the model that DDP's fp16 hook trains at DDP's best bucket size: all in the same processes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import planner
from benchmarks.one_line_jobs import SMALL, Rounds, Run, best_cap, ratio_of, with_ddp, world_of
from planner.jobs.launch import run_ranks
from planner.online.attach import PlannedSession
from runtime.plan import Plan

LINKS = ("4x1@200mbit", "4x1@1gbit")
CELLS = tuple(f"bounded {job}@{link}" for link in LINKS for job in SMALL)
FIRST_STEPS = 300
ROUNDS, BLOCK_STEPS = 24, 6
"""Blocks of each way; the first step of a block does not count."""
SWEPT_STEPS = 15
"""Steps with each bucket size of DDP, which on slow links are long."""
OWN = "own"
LIMITS = {"offline": (1.03, 1.02), "exact": (1.01, 0.90), "fp16": (1.01, 0.97)}
"""The run's own plan over each other way: what no interval may lie above, and what the mean of all cells may be."""
MOST_FIRST = 1.02
"""The same of the first steps over DDP's."""


@dataclass(frozen=True)
class Trained:
    """A run that planned, on one rank; times of steps in microseconds."""

    first_us: list[float]
    plan: str
    story: tuple[str, ...]
    blocks_us: dict[str, Rounds]


def offline_plan(job: str) -> Plan:
    """On one rank: what `planner profile --for bounded` and `planner optimize --accuracy bounded` decide."""
    run = Run(job)
    profile = planner.profile_step(
        run.model, lambda: run.loss(run.model, 0).backward(), run.optimizer, accuracy="bounded"
    )
    return planner.optimize(profile, accuracy="bounded")


def _alone(plan: Plan) -> Plan:
    """Return the plan without a fallback, against which the session would try it."""
    return replace(plan, fallback=None, alternatives=None)


def _described(plan: Plan) -> str:
    forms = [bucket.compressor.dtype or "dense" for bucket in plan.buckets]
    return ", ".join(f"{forms.count(form)} {form}" for form in dict.fromkeys(forms))


def with_planner(job: str, steps: int, first: int, cache: str, cap_mib: float | None, offline: Plan) -> Trained:
    """On one rank: the one line until planning is over, at most `steps`; then blocks of all ways."""
    os.environ["PLANNER_CACHE"] = cache
    run, twin = Run(job), Run(job)
    session: PlannedSession = planner.attach(run.model, run.optimizer, accuracy="bounded")
    times = run.times_us(run.model, first)
    assert session._pilot is not None
    while len(times) < steps and session._pilot.stage is not None:
        times += run.times_us(run.model, 1, len(times))
    ddp = DistributedDataParallel(twin.model, bucket_cap_mb=cap_mib)
    ddp.register_comm_hook(None, fp16_compress_hook)
    exact = offline.fallback or offline
    plans = {name: _alone(plan) for name, plan in ((OWN, session.plan), ("offline", offline), ("exact", exact))}
    blocks: dict[str, Rounds] = {name: [] for name in (*plans, "fp16")}
    story = tuple(session._pilot.story)
    for number in range(ROUNDS):
        order = [*blocks][number % len(blocks) :] + [*blocks][: number % len(blocks)]
        for name in order:
            if name in plans:
                session.switch(plans[name])
            trained, forward = (run, run.model) if name in plans else (twin, ddp)
            blocks[name].append(trained.times_us(forward, BLOCK_STEPS)[1:])
    session.detach()
    return Trained(times[:first], _described(plans[OWN]), story, blocks)


def measure(cell: str, steps: int) -> dict[str, Any]:
    """Train one cell every way; return its row."""
    job, _, link = cell.removeprefix("bounded ").partition("@")
    world, first = world_of(link), min(FIRST_STEPS, steps // 2)
    offline, cap_mib = run_ranks(world, offline_plan, job)[0], best_cap(world, job, SWEPT_STEPS)
    with tempfile.TemporaryDirectory() as cache:
        before = run_ranks(world, with_ddp, job, first, None)
        found = run_ranks(world, with_planner, job, steps, first, cache, cap_mib, offline)
        after = run_ranks(world, with_ddp, job, first, None)
    first_us = np.max([one.first_us for one in found], axis=0).sum()
    firsts = [float(first_us / np.max([times for times, _ in ddp], axis=0).sum()) for ddp in (before, after)]
    row: dict[str, Any] = {
        "steps": steps, "best_cap_mib": cap_mib, "plan": found[0].plan, "offline_plan": _described(offline),
        "first": statistics.harmonic_mean(firsts), "first_interval": sorted(firsts), "story": list(found[0].story),
    }  # fmt: skip
    for name in LIMITS:
        ratio, own_us, other_us = ratio_of([(one.blocks_us[OWN], one.blocks_us[name]) for one in found])
        row |= {"own_us": own_us, f"{name}_us": other_us, name: ratio.value}
        row[f"{name}_interval"] = [ratio.low, ratio.high]
    return row


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown."""
    lines = [
        "| cell | its plan | offline plan | step ms | offline ms | exact ms | fp16 hook ms | first steps / DDP | "
        "/ offline plan | / best exact | / fp16 hook |",
        "| --- " * 11 + "|",
    ]
    for row in rows:
        times = " | ".join(f"{row[name] / 1e3:.1f}" for name in ("own_us", "offline_us", "exact_us", "fp16_us"))
        figures = []
        for name in ("first", *LIMITS):
            low, high = row[f"{name}_interval"]
            over = low > LIMITS[name][0] if name in LIMITS else row[name] > MOST_FIRST
            figures.append(f"{row[name]:.3f} ({low:.3f} to {high:.3f}){' over' if over else ''}")
        lines.append(f"| {row['cell']} | {row['plan']} | {row['offline_plan']} | {times} | {' | '.join(figures)} |")
    lines.append("")
    for name, (interval_limit, mean_limit) in LIMITS.items():
        over = sum(row[f"{name}_interval"][0] > interval_limit for row in rows)
        mean = statistics.geometric_mean([row[name] for row in rows])
        lines.append(
            f"compared with {name}: the intervals of {over} of {len(rows)} cells lie above {interval_limit}; the mean "
            f"is {mean:.3f}, which was to be at most {mean_limit}."
        )
    first = sum(row["first"] <= MOST_FIRST for row in rows)
    lines.append(f"first steps: {first} of {len(rows)} cells within {MOST_FIRST} of DDP.")
    return lines
