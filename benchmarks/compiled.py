"""Compiled models: planner's cuts against `torch.compile(DDP(model))` and one graph, into docs/results/compiled.md.

    sudo python -m benchmarks.compiled --results cells.jsonl            # resumes where an earlier run was stopped
    sudo python -m benchmarks.compiled --results cells.jsonl --only gpt
    sudo python -m benchmarks.compiled --results cells.jsonl --write    # puts what is known into the document

Two emulated hosts of one rank profile a model, plan with the cuts that the profile says and with one graph, and then
train in interleaved blocks: by both plans, and a twin of the model by `torch.compile(DDP(model))`. Rehearsed cells wait
in place of an accelerator (`planner.rehearse`), their cuts at blocks by an assumed cost. Emulated links need root. The
machine has to do nothing else.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import planner
from benchmarks.marked import parser_of, tabulate
from benchmarks.one_line_jobs import COMPILED, Rounds, Run, ratio_of, world_of
from benchmarks.rehearsal import Cell, rehearsed, target_on
from planner.comparison.variants import DDP, PLAN
from planner.documents.profile import Profile
from planner.jobs.launch import run_ranks
from planner.model.regions import ASSUMED_CUT_US, with_assumed_cuts
from planner.online.attach import PlannedSession
from runtime.plan import Plan

DOCUMENT = Path("docs/results/compiled.md")
BACKEND = "inductor"
LINKS = ("2x1@1gbit", "2x1@5gbit")
CELLS = tuple(f"{job}@{link}" for link in LINKS for job in COMPILED)
REHEARSED = {f"rehearsed {cell.key}": cell for cell in (Cell("gpt2", "2x1", 10.0), Cell("bert-base", "2x1", 10.0))}
MINUTES = 4.0
"""Of a rehearsed cell."""
ROUNDS, BLOCK_STEPS, WARM_UP_STEPS = 24, 5, 4
"""Blocks of each way; the first step of a block does not count. Steps before the first block, which compile."""
PROFILE_S = 30.0
OWN, WHOLE = "own", "whole"
MOST = 1.01
"""What no interval of the plan over DDP may lie above."""
MOST_OF_WHOLE, LEAST_EXPOSED = 0.85, 0.30
"""What the mean of the plan over one graph may be, where this share of the step with one graph is exposed."""
MOST_ERROR, WORST_ERROR = 0.05, 0.12
MOST_REHEARSED = 0.97


@dataclass(frozen=True)
class Trained:
    """What one rank planned and measured; times of steps in microseconds."""

    plans: dict[str, Plan]
    blocks_us: dict[str, Rounds]
    report: str


def one_graph(profile: Profile) -> Profile:
    """Return the profile of the compiled model without places for cuts."""
    compiled = profile.compute.compiled
    assert compiled is not None
    return replace(profile, compute=replace(profile.compute, compiled=compiled.chosen(())))


def train(job: str) -> Trained:
    """On one rank: profile, plan, and train in interleaved blocks."""
    run, twin = Run(job), Run(job)
    profile = planner.profile_step(
        run.model, lambda: run.loss(run.model, 0).backward(), run.optimizer, compile=BACKEND, budget_s=PROFILE_S
    )
    plans = {OWN: planner.optimize(profile), WHOLE: planner.optimize(one_graph(profile))}
    session: PlannedSession = planner.attach(run.model, run.optimizer, plans[OWN], compile=BACKEND, drift=False)
    ddp = cast(nn.Module, torch.compile(DistributedDataParallel(twin.model), backend=BACKEND))
    blocks: dict[str, Rounds] = {name: [] for name in (*plans, DDP)}
    reported = ""
    for number in range(-1, ROUNDS):
        for name in [*blocks][number % len(blocks) :] + [*blocks][: number % len(blocks)]:
            if name in plans:
                session.switch(plans[name])
            trained, forward = (twin, ddp) if name == DDP else (run, run.model)
            times_us = trained.times_us(forward, BLOCK_STEPS if number >= 0 else WARM_UP_STEPS)
            if number >= 0:
                blocks[name].append(times_us[1:])
            reported = str(session.report()) if name == OWN else reported
    session.detach()
    return Trained(plans, blocks, reported)


def measure(cell: str) -> dict[str, Any]:
    """Train one cell every way; return its row."""
    job, _, link = cell.partition("@")
    found = run_ranks(world_of(link), train, job)
    plans = found[0].plans
    row: dict[str, Any] = {"cuts": plans[OWN].cuts, "report": found[0].report.splitlines()}
    for name in (WHOLE, DDP):
        ratio, own_us, other_us = ratio_of([(one.blocks_us[OWN], one.blocks_us[name]) for one in found])
        row |= {"own_us": own_us, f"{name}_us": other_us, name: ratio.value}
        row[f"{name}_interval"] = [ratio.low, ratio.high]
    for name, plan in plans.items():
        assert plan.predicted is not None
        row[f"{name}_buckets"] = len(plan.buckets)
        row[f"{name}_predicted_us"] = plan.predicted.iteration_us
        row[f"{name}_exposed"] = (plan.predicted.exposed_us or 0.0) / plan.predicted.iteration_us
    ddp = (plans[OWN].baselines or {}).get(DDP)
    return row | {f"{DDP}_predicted_us": None if ddp is None else ddp.iteration_us}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown."""
    lines = [
        "| cell | cuts | buckets | step ms | predicted | compiled DDP ms | predicted | one graph ms | predicted | "
        "/ compiled DDP | / one graph |",
        "| --- " * 11 + "|",
    ]
    errors: list[float] = []
    for row in rows:
        cells = []
        for name in (OWN, DDP, WHOLE):
            error = row[f"{name}_predicted_us"] / row[f"{name}_us"] - 1.0
            cells.append(f"{row[f'{name}_us'] / 1e3:.1f} | {error:+.1%}")
            errors += [] if name == DDP else [abs(error)]
        for name in (DDP, WHOLE):
            low, high = row[f"{name}_interval"]
            over = " over" if name == DDP and low > MOST else ""
            cells.append(f"{row[name]:.3f} ({low:.3f} to {high:.3f}){over}")
        lines.append(f"| {row['cell']} | {len(row['cuts'])} | {row['own_buckets']} | {' | '.join(cells)} |")
    over = sum(row[f"{DDP}_interval"][0] > MOST for row in rows)
    mean = statistics.geometric_mean([row[DDP] for row in rows])
    lines += [
        "",
        f"compared with torch.compile(DDP): the intervals of {over} of {len(rows)} cells lie above {MOST}; the mean is "
        f"{mean:.3f}.",
    ]
    if exposed := [row[WHOLE] for row in rows if row[f"{WHOLE}_exposed"] >= LEAST_EXPOSED]:
        lines.append(
            f"compared with one graph, in the {len(exposed)} cells of which {LEAST_EXPOSED:.0%} of its step is "
            f"predicted to be exposed: the mean is {statistics.geometric_mean(exposed):.3f}, which was to be at most "
            f"{MOST_OF_WHOLE}."
        )
    lines.append(
        f"predicted steps of plans: {statistics.fmean(errors):.1%} off in the mean ({MOST_ERROR:.0%} at most was the "
        f"target), {max(errors):.1%} at worst ({WORST_ERROR:.0%})."
    )
    return lines


def rehearse_cell(cell: Cell) -> dict[str, Any]:
    """Rehearse one cell with DDP's cuts and with planner's; return what `planner rehearse --json` prints."""
    target = target_on(cell.cluster(), cell.model, minutes=MINUTES)
    profile = with_assumed_cuts(target.profile)
    assert profile is not None
    found = rehearsed(replace(target, profile=profile), strategies=())
    return found | {"forward_us": profile.compute.forward_us}


def rehearsed_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown."""
    lines = [
        "| cell | without messages ms | compiled DDP ms | predicted | plan ms | predicted | plan / DDP | at best |"
    ]
    lines, ratios = [*lines, "| --- " * 8 + "|"], []
    for row in rows:
        ways = {way["name"]: way for way in row["rows"]}
        ratios.append(ways[PLAN]["median_us"] / ways[DDP]["median_us"])
        cells = [f"{ways[name]['median_us'] / 1e3:.1f} | {ways[name]['error']:+.1%}" for name in (DDP, PLAN)]
        bare = f"{ways['none']['median_us'] / 1e3:.1f}"
        best = (row["forward_us"] + ways[PLAN]["alone_us"]) / ways[DDP]["median_us"]
        lines.append(f"| {row['cell']} | {bare} | {' | '.join(cells)} | {ratios[-1]:.3f} | {best:.3f} |")
    mean = statistics.geometric_mean(ratios)
    cost = f"{2 * ASSUMED_CUT_US / 1e3:g} ms"
    return [*lines, "", f"A cut is assumed to cost {cost}. The mean is {mean:.3f}, to be at most {MOST_REHEARSED}."]


def main() -> int:
    """Measure what is missing, print, write."""
    options = parser_of(__doc__, DOCUMENT).parse_args()
    parts = {
        "cells": ({cell: partial(measure, cell) for cell in CELLS}, table),
        "rehearsed": ({name: partial(rehearse_cell, cell) for name, cell in REHEARSED.items()}, rehearsed_table),
    }
    return tabulate(DOCUMENT, parts, options)


if __name__ == "__main__":
    sys.exit(main())
