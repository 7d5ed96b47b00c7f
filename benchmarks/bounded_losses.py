"""What default bounded plans cost in accuracy: last losses against float32, over seeds, and time to the dense loss.

    python -m benchmarks.bounded_losses --write      # resumes where it was stopped

The plan of each task and optimizer is what `planner profile --for bounded` and `planner optimize --accuracy bounded`
make on three emulated hosts with a slow link, which needs root. Three ranks then train from the first step on: in
float32, in float32 with sums in another order, and by the plan, over the same batches.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import planner
from benchmarks.harm import OPTIMIZERS, RATES
from benchmarks.learning import Task, learn, tasks
from benchmarks.marked import parser_of, publish
from benchmarks.narrow_accuracy import RANKS, REHEARSED, WHOLE, Way, plan_of
from benchmarks.one_line_jobs import world_of
from benchmarks.resumable import kept
from planner.comparison.learned import judge, steps_to
from planner.jobs.launch import LocalWorld, run_ranks
from planner.jobs.training import weights_sha256
from runtime.plan import Plan, parse_plan

DOCUMENT, RESULTS = Path("docs/results/bounded-losses.md"), Path("benchmarks/results/bounded_losses.jsonl")
LINK = f"{RANKS}x1@200mbit"
SEEDS, MORE_SEEDS, SCALE, MARGIN = 5, 20, 0.5, 0.005
"""Seeds of each, and of those of which as many tell nothing; share of the tasks' steps; of the loss."""
MOST_SPREAD = 0.02
"""Of float32's own last losses: tasks with more are judged by their metric."""
WINDOWS, REACHED = 20, 0.9
"""Parts of the steps with a mean loss each; the share of the steps where float32's loss, mean over seeds, is what
others are timed to."""
MOST_TIME = 0.6
STEPS_OF = ("bert-base@8x1@10gbit bounded,wire", "gpt2@8x1@10gbit bounded,wire")
"""Rehearsed cells that say what a step with the plan takes of one with DDP at its best bucket size."""
REORDERED, BOUNDED = "reordered", "bounded"


def tasks_of(scale: float) -> dict[str, Task]:
    """Return each task with each optimizer, by name."""
    found = {}
    for task in tasks(scale):
        usual = type(task.optimizer([nn.Parameter(torch.zeros(1))])).__name__
        for name, optimizer in OPTIMIZERS.items():
            make = task.optimizer
            if name != usual:
                make = partial(optimizer, lr=RATES[task.name, name])
            found[f"{task.name}, {name}"] = replace(task, name=f"{task.name}, {name}", optimizer=make)
    return found


def decided(name: str, scale: float) -> Plan:
    """On one rank: the default bounded plan of a task."""
    task = tasks_of(scale)[name]
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    batch = task.batch(0, dist.get_rank())
    profile = planner.profile_step(model, lambda: task.loss(model, batch).backward(), optimizer, accuracy="bounded")
    return planner.optimize(profile, accuracy="bounded")


def trained(name: str, scale: float, seed: int, bounded: Plan) -> dict[str, Any]:
    """On one rank: all runs of one seed."""
    task = tasks_of(scale)[name]
    plans: dict[str, Plan | Way] = {WHOLE[0]: Way(), REORDERED: Way(buckets=7), BOUNDED: bounded}
    found: dict[str, Any] = {}
    for way, plan in plans.items():
        losses: list[float] = []

        def make(model: nn.Module, _: object, plan: Plan | Way = plan) -> Plan:
            return plan_of(model, plan) if isinstance(plan, Way) else plan

        model, session = learn(task, seed, make, None, losses)
        session.detach()
        every = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(every)
        metric = task.metric(model)
        found[way] = {"losses": (every / dist.get_world_size()).tolist(), "metric": metric, "at": weights_sha256(model)}
    return found


def decide(name: str, scale: float) -> dict[str, Any]:
    """Return the plan of a task, as JSON."""
    plan = run_ranks(world_of(LINK), decided, name, scale)[0]
    return {"plan": replace(plan, world=replace(plan.world, nodes=1), fallback=None, baselines=None).to_document()}


def train(name: str, scale: float, seed: int, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return mean losses of parts of the steps, last losses and metrics of each way."""
    found = run_ranks(LocalWorld(ranks=RANKS), trained, name, scale, seed, parse_plan(plan))[0]
    rows: dict[str, Any] = {}
    for way, run in found.items():
        losses = run["losses"]
        edges = [round(part * len(losses) / WINDOWS) for part in range(WINDOWS + 1)]
        means = [statistics.fmean(losses[a:b]) for a, b in pairwise(edges)]
        last = statistics.fmean(losses[-max(1, len(losses) // 10) :])
        rows[way] = {"last": last, "metric": run["metric"], "windows": means, "weights_sha256": run["at"]}
    return {"steps": len(found[BOUNDED]["losses"]), "ways": rows}


def _step_ratios() -> list[float]:
    rows = {cell["cell"]: cell["rows"] for cell in map(json.loads, REHEARSED.read_text(encoding="utf-8").splitlines())}
    times = [{row["name"]: row["median_us"] for row in rows[cell]} for cell in STEPS_OF]
    return [one["plan"] / one["ddp:best"] for one in times]


def _against(seeds: Sequence[Mapping[str, Any]], way: str, what: str) -> list[float]:
    """Return relative differences of a way from float32, by seed."""
    pairs = [(one["ways"][way][what], one["ways"][WHOLE[0]][what]) for one in seeds]
    return [here / there - 1.0 for here, there in pairs]


def _judged(seeds: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[float, float] | None, str]:
    """Return (what the plan is judged by, interval, verdict)."""
    by = "metric" if max(map(abs, _against(seeds, REORDERED, "last"))) > MOST_SPREAD else "last"
    return (by, *judge(_against(seeds, BOUNDED, by), MARGIN))


def _row(name: str, plan: Plan, seeds: Sequence[Mapping[str, Any]]) -> tuple[str, bool, float | None]:
    whole, own = ([one["ways"][way] for one in seeds] for way in (WHOLE[0], BOUNDED))
    spread = max(map(abs, _against(seeds, REORDERED, "last")))
    judged_by, interval, verdict = _judged(seeds)
    low, high = interval or (float("nan"),) * 2
    mine, dense = (np.mean([one["windows"] for one in ways], axis=0).tolist() for ways in (own, whole))
    target = dense[round(REACHED * WINDOWS) - 1]
    reached, needed = (steps_to(means, target, 1) for means in (mine, dense))
    share = reached / needed if reached and needed else None
    forms = [bucket.compressor.dtype or "dense" for bucket in plan.buckets]
    described = ", ".join(f"{forms.count(form)} {form}" for form in dict.fromkeys(forms))
    times = [f"{share * ratio:.2f}" if share else "not reached" for ratio in _step_ratios()]
    cells = (
        name, described, str(len(seeds)), f"{statistics.fmean(one['last'] for one in whole):.4f}",
        f"{statistics.fmean(_against(seeds, BOUNDED, 'last')):+.2%}", f"{spread:.2%}",
        judged_by.replace("last", "loss"),
        f"{verdict} ({low:+.2%} to {high:+.2%})", "not reached" if share is None else f"{share:.2f}", *times,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |", verdict == "as ddp", share


def lines(found: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> Iterator[str]:
    """Return a row for each task and optimizer whose seeds have all trained, and what they say together."""
    yield (
        "| task | plan | seeds | float32's last loss | plan against it | float32 reordered, most | judged by | verdict "
        "| steps to the dense loss / float32's | time, bert-base | time, gpt2 |"
    )
    yield "| --- " * 11 + "|"
    good, shares = [], []
    for name in names:
        seeds = [one for key, one in found.items() if key.startswith(f"{name}, seed ")]
        if len(seeds) >= SEEDS:
            row, as_dense, share = _row(name, parse_plan(found[name]["plan"]), seeds)
            good.append(as_dense)
            shares.append(share)
            yield row
    yield ""
    yield f"as DDP: {sum(good)} of {len(good)}"
    if shares and all(shares):
        most = max(share * ratio for share in shares if share for ratio in _step_ratios())
        yield f"time to the dense loss: at most {most:.2f} of DDP's (target {MOST_TIME:.2f})"


def main() -> int:
    """Train what is missing, print, and write where asked to."""
    parser = parser_of(__doc__, DOCUMENT, RESULTS)
    parser.add_argument("--scale", type=float, default=SCALE, help="of the steps that are trained")
    options = parser.parse_args()
    names = [*tasks_of(options.scale)]
    plans = kept(options.results, {name: partial(decide, name, options.scale) for name in names}, options.only)

    def seeds_of(plans: Sequence[Mapping[str, Any]], seeds: range) -> list[dict[str, Any]]:
        runs = {
            f"{one['cell']}, seed {seed}": partial(train, one["cell"], options.scale, seed, one["plan"])
            for seed in seeds
            for one in plans
        }
        return kept(options.results, runs, options.only)

    first = seeds_of(plans, range(SEEDS))
    unknown = [
        one
        for one in plans
        if len(seeds := [run for run in first if run["cell"].startswith(f"{one['cell']}, seed ")]) == SEEDS
        and _judged(seeds)[2] == "not known"
    ]
    found = {one["cell"]: one for one in [*plans, *first, *seeds_of(unknown, range(SEEDS, MORE_SEEDS))]}
    publish(DOCUMENT if options.write else None, {"losses": "\n".join(lines(found, names))})
    return 0


if __name__ == "__main__":
    sys.exit(main())
