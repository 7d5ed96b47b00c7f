"""Outer steps (DiLoCo) against synchronous training at equal tokens, and the step over H.

python -m benchmarks.outer --results outer.jsonl                  # some hours; continues where it was stopped
python -m benchmarks.outer --results short.jsonl --scale 0.1      # shorter runs
python -m benchmarks.outer --results outer.jsonl --output docs/results/outer.md
python -m benchmarks.outer --frontier --output docs/results/outer.md      # the step over H alone: seconds

Times are predicted for eight hosts, for runs train on two ranks of one machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.lags.accuracy import plan_of
from benchmarks.learning import MUON_GPT, SEEDS, Outcome, Task, learn, outcomes
from benchmarks.marked import write_part
from planner.comparison.learned import LAST_SHARE, REACHED, WINDOWS, steps_to
from planner.decide.strategies import make_schedule
from planner.documents.catalog import find_profile
from planner.documents.profile import parse_cluster
from planner.ir import GAIN, Codec, Dense
from planner.model.codecs import Wire
from planner.model.modes import outer_steps, step_us
from planner.model.outer_load import RANK
from planner.model.problem import Problem, make_problem
from planner.passes.outer import smallest_period
from planner.strategies.diloco import best_cut, cut_evenly, schedule_of
from runtime.outer.local_steps import Outer
from runtime.plan import CompressorSpec, OuterOptimizer, OuterSpec, Plan

ACCURACY, FRONTIER = "accuracy", "frontier"
TASKS = ("characters, GPT", MUON_GPT, "digits, ViT", "characters, LSTM")
WARMUP_SHARE = 0.1
"""Share of the steps: synchronous first ones."""
MODELS, HOSTS, GIGABITS = ("gpt2", "bert-base"), 8, (1, 10)
PERIODS, MAX_PERIOD = (1, 2, 4, 8, 16, 30, 64), 64


@dataclass(frozen=True)
class Way:
    """Outer steps: one fragment at once, or several, mixed with local steps when they arrive."""

    every: int
    narrow: bool = False
    """Whether rounds are in 8 bits."""
    fragments: int = 1
    late: int = 0
    optimizer: OuterOptimizer = outer_steps.DILOCO

    @property
    def codec(self) -> Codec:
        """The codec of rounds, as planner models it."""
        return Wire("int8") if self.narrow else Dense()


SYNCHRONOUS = "synchronous"
WAYS: dict[str, Way | None] = {
    SYNCHRONOUS: None,
    "H = 8": Way(8),
    "H = 30": Way(30),
    "H = 30, int8": Way(30, narrow=True),
    "H = 30, int8, 4 fragments, 1 step late": Way(30, narrow=True, fragments=4, late=1),
    "H = 8, mean": Way(8, optimizer=outer_steps.MEAN),
    "H = 30, mean": Way(30, optimizer=outer_steps.MEAN),
    "H = 30, int8, 4 fragments, 1 step late, mean": Way(
        30, narrow=True, fragments=4, late=1, optimizer=outer_steps.MEAN
    ),
}


@dataclass(frozen=True)
class Learned(Outcome):
    """One run."""

    loss: float
    """Mean training loss of the last steps, over ranks."""
    windows: list[float]
    """Mean training loss of equal parts of the steps, over ranks."""
    distance: float | None
    """Largest distance of workers over what the warm-up moved them by; None: nothing was measured."""
    every: int
    """H at the end of the run, 0 where the guard has ended outer steps; 1 in synchronous runs."""


def plan_with(model: nn.Module, steps: int, way: Way | None) -> Plan:
    """Return the plan of a way."""
    plan = plan_of(model)
    if way is None:
        return plan
    numel = {name: parameter.numel() for name, parameter in model.named_parameters()}
    parts: dict[int, list[str]] = {}
    before, total = 0, sum(numel[name] for name in plan.gradients)
    for name in plan.gradients:  # of about equal elements
        parts.setdefault(way.fragments * before // total, []).append(name)
        before += numel[name]
    fragments = tuple(map(tuple, parts.values()))
    (bucket,) = plan.buckets
    compressor = CompressorSpec(name="wire", dtype="int8") if way.narrow else bucket.compressor
    buckets = tuple(replace(bucket, gradients=names, compressor=compressor) for names in fragments)
    outer = OuterSpec(
        every=way.every, fragments=fragments, delay_steps=way.late, mix=outer_steps.MIX if way.late else 0.0,
        warmup_steps=round(WARMUP_SHARE * steps), optimizer=way.optimizer,
    )  # fmt: skip
    return replace(plan, accuracy="relaxed", buckets=buckets, outer=outer)


def train(task: Task, seed: int, way: str) -> Learned:
    """Train once on this rank."""
    losses: list[float] = []
    model, session = learn(task, seed, lambda model, _: plan_with(model, task.steps, WAYS[way]), losses=losses)
    with session.global_weights():
        metric = task.metric(model)
    outer = session._mode if isinstance(session._mode, Outer) else None
    relative = [sample.relative for sample in outer.period.distances.samples] if outer else []
    session.detach()
    every = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(every)
    mean = (every / dist.get_world_size()).tolist()
    count = min(WINDOWS, len(mean))
    edges = [round(part * len(mean) / count) for part in range(count + 1)]
    return Learned(
        task.name, seed, way, metric, statistics.fmean(mean[-max(1, round(LAST_SHARE * len(mean))) :]),
        [statistics.fmean(mean[start:stop]) for start, stop in pairwise(edges)],
        max(relative, default=None), outer.period.every if outer else 1,
    )  # fmt: skip


@cache
def problem_of(model: str, gigabits: int) -> Problem:
    """Return a step of a published model on hosts of one rank each."""
    link = {"bandwidth": f"{gigabits}gbit", "latency": "20us"}
    cluster = parse_cluster({"schema": "planner.cluster/1", "nodes": HOSTS, "inter": link})
    return make_problem(find_profile(model), cluster)


def step_ratio(model: str, way: Way) -> float:
    """Return the step of a way over DDP's, predicted at the lowest rate."""
    problem = problem_of(model, GIGABITS[0])
    schedule = schedule_of(cut_evenly(problem, way.fragments), way.every, way.late, way.codec)
    return step_us(problem, schedule) / step_us(problem, make_schedule(problem, "ddp"))


def steps_share(runs: Sequence[Learned], dense: Sequence[Learned]) -> float | None:
    """Return steps to the loss that synchronous runs have near their end, as a share of all; None: not reached."""
    shares = [
        steps_to(one.windows, other.windows[round(REACHED * len(other.windows)) - 1], 1)
        for one, other in zip(runs, dense, strict=True)
    ]
    known = [share for share in shares if share is not None]
    return statistics.fmean(known) if len(known) == len(shares) else None


def time_share(share: float, ratio: float) -> float:
    """Return the time of a share of the steps, over that of all synchronous ones up to where they have the loss."""
    synchronous = min(share, WARMUP_SHARE)
    return (synchronous + (share - synchronous) * ratio) / REACHED


def lines(found: Sequence[Learned]) -> Iterator[str]:
    """Yield the table: one row for each task and way."""
    times = [f"time to it, {model} at {GIGABITS[0]} Gbit/s" for model in MODELS]
    columns = (
        "task", "way", "held-out metric, mean over seeds (range)", "against synchronous", "training loss, last steps",
        "against synchronous", "steps to the synchronous loss", *times, "distance, × warm-up", "H at the end",
    )  # fmt: skip
    yield f"| {' | '.join(columns)} |"
    yield "| --- " * len(columns) + "|"
    for name in dict.fromkeys(one.task for one in found):
        dense = [one for one in found if one.task == name and one.way == SYNCHRONOUS]
        first, loss = (
            statistics.fmean(values) for values in zip(*((one.metric, one.loss) for one in dense), strict=True)
        )
        for label, way in WAYS.items():
            runs = [one for one in found if one.task == name and one.way == label]
            metrics = [one.metric for one in runs]
            mean, last = statistics.fmean(metrics), statistics.fmean(one.loss for one in runs)
            far = max((one.distance for one in runs if one.distance is not None), default=None)
            share = steps_share(runs, dense)
            reached = ["not reached"] * (1 + len(MODELS))
            if share is not None:
                ratios = [1.0 if way is None else step_ratio(model, way) for model in MODELS]
                reached = [f"{one:.2f}" for one in (share, *(time_share(share, ratio) for ratio in ratios))]
            cells = (
                name, label, f"{mean:.4f} ({min(metrics):.4f} to {max(metrics):.4f})", f"{mean / first - 1.0:+.2%}",
                f"{last:.4f}", f"{last / loss - 1.0:+.2%}", *reached, "" if far is None else f"{far:.3g}",
                ", ".join(map(str, sorted({one.every for one in runs}))),
            )  # fmt: skip
            yield f"| {' | '.join(cells)} |"


def frontier() -> Iterator[str]:
    """Yield the table of the mean step by H, over a step without communication, with planner's fragments and delay."""
    columns = ("model", "Gbit/s", "sent", "DDP", *(f"H = {every}" for every in PERIODS), f"H within {GAIN:.0%}")
    yield f"| {' | '.join(columns)} |"
    yield "| --- " * 3 + "| --: " * (len(columns) - 3) + "|"
    for model in MODELS:
        for gigabits in GIGABITS:
            problem = problem_of(model, gigabits)
            alone_us = outer_steps.compute_us(problem)
            for codec in (Dense(), Wire("int8")):
                steps = [make_schedule(problem, "ddp"), *(best_cut(problem, every, codec, RANK) for every in PERIODS)]
                ratios = [f"{step_us(problem, schedule) / alone_us:.3f}" for schedule in steps]
                chosen = smallest_period(problem, codec, MAX_PERIOD)
                every = outer_steps.mode_of(chosen).every
                near = step_us(problem, chosen) <= alone_us * (1.0 + GAIN)
                cells = (model, str(gigabits), "int8" if codec != Dense() else "float32", *ratios)
                yield f"| {' | '.join((*cells, str(every) if near else f'above {MAX_PERIOD}'))} |"


def main() -> int:
    """Train what is missing, print the tables, and write them where that is asked for."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of the steps that are trained")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--frontier", action="store_true", help="train nothing: the step over H alone")
    parser.add_argument("--results", type=Path, default=None, help="JSON lines: not trained again")
    parser.add_argument("--output", type=Path, default=None, help="a document whose marked parts are replaced")
    options = parser.parse_args()
    parts = {FRONTIER: "\n".join(frontier())}
    if not options.frontier:
        found = outcomes(train, Learned, options.tasks, list(WAYS), options.seeds, options.scale, options.results)
        parts[ACCURACY] = "\n".join(lines(found))
    for part, text in parts.items():
        print(text, "\n")
        if options.output is not None:
            write_part(options.output, part, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
