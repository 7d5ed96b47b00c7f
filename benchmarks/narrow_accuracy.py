"""What narrow buckets cost in accuracy, used from the first step on: the last loss, beside float32's own spread.

    python -m benchmarks.narrow_accuracy --results runs.jsonl      # goes on where it was stopped
    python -m benchmarks.narrow_accuracy --scale 0.1 --tasks "digits, ViT"

Runs in float32 differ in how gradients are divided into buckets, and with that in the order in which three ranks' sums
are made: what is within their spread cannot be told from summing in another order. The loss is the mean over all ranks
and the last 5 % of the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.learning import SEEDS, Outcome, Task, learn, outcomes, tasks
from benchmarks.marked import publish
from runtime.checks.plan import trainable_parameters
from runtime.plan import NO_COMPRESSION, CompressorSpec, ModelReference, Plan, PlanBucket, PlanWorld

DOCUMENT = Path("docs/results/narrow-accuracy.md")
RANKS = 3
WINDOWS = 20
"""Equal parts of the steps, of which each has a mean loss; the last one's counts."""
REHEARSED, CELL = Path("benchmarks/results/rehearsal.jsonl"), "gpt2@8x1@10gbit bounded,wire"
"""Whose steps say how long a step takes."""
REACHED = 0.9
"""Of float32's steps: the loss there is what others are timed to."""


@dataclass(frozen=True)
class Way:
    """How gradients travel, in so many buckets."""

    compressor: CompressorSpec = NO_COMPRESSION
    buckets: int = 4
    after: float = 0.0
    """Share of the steps that are exact before."""


WHOLE = tuple("float32" if order == 0 else f"float32, order {order + 1}" for order in range(5))
"""The same sums in other orders."""


def _wire(dtype: str, *, error_feedback: bool = True) -> Way:
    return Way(CompressorSpec(name="wire", dtype=dtype, error_feedback=None if error_feedback else False))


WAYS = {
    **{name: Way(buckets=count) for name, count in zip(WHOLE, (4, 1, 2, 3, 7), strict=True)},
    "bfloat16": _wire("bfloat16"),
    "int8": _wire("int8"),
    "float8_e4m3fn": _wire("float8_e4m3fn"),
    "int8, no feedback": _wire("int8", error_feedback=False),
    "float8_e4m3fn, no feedback": _wire("float8_e4m3fn", error_feedback=False),
    "rank 4": Way(CompressorSpec(name="powersgd", rank=4)),
    "rank 1": Way(CompressorSpec(name="powersgd", rank=1)),
    "rank 4 after a third": Way(CompressorSpec(name="powersgd", rank=4), after=1 / 3),
}
LIMITS = {"bfloat16": 0.001, "int8": 0.005, "float8_e4m3fn": 0.005}
"""By how much of float32's loss these may be off where they are outside its spread."""


@dataclass(frozen=True)
class Run(Outcome):
    """One run."""

    losses: list[float]
    """Of each window, mean over ranks."""

    @property
    def last_loss(self) -> float:
        return self.losses[-1]

    def reaches(self, loss: float) -> float | None:
        """Return after which share of the steps a window is as low, between two of them by a line; None: never."""
        for index, here in enumerate(self.losses):
            if here <= loss:
                before = self.losses[index - 1] if index else here
                part = (before - loss) / (before - here) if before > here else 0.0
                return (index + (part if index else 1.0)) / WINDOWS
        return None


def plan_of(model: nn.Module, way: Way) -> Plan:
    """Equal numbers of gradients in each bucket, all sent the same way."""
    names = list(reversed(trainable_parameters(model)))
    edges = [round(part * len(names) / way.buckets) for part in range(way.buckets + 1)]
    exact, narrow = way.compressor is NO_COMPRESSION, way.compressor.name == "wire"
    return Plan(
        model=ModelReference(name=type(model).__name__), world=PlanWorld(ranks=dist.get_world_size()),
        accuracy="exact" if exact else "bounded",
        buckets=tuple(
            PlanBucket(
                gradients=tuple(names[start:stop]), algorithm="two_shot" if narrow else "library",
                compressor=way.compressor,
            )
            for start, stop in pairwise(edges)
        ),
    )  # fmt: skip


def train(task: Task, seed: int, way: str) -> Run:
    """One run on this rank; the loss is that of all ranks."""
    losses: list[float] = []
    asked = WAYS[way]
    first = Way() if asked.after else asked
    then = (asked.after, lambda model: plan_of(model, asked)) if asked.after else None
    model, session = learn(task, seed, lambda model, _: plan_of(model, first), then, losses)
    session.detach()
    edges = [round(part * len(losses) / WINDOWS) for part in range(WINDOWS + 1)]
    means = torch.tensor([statistics.fmean(losses[slice(*edge)]) for edge in pairwise(edges)], dtype=torch.float64)
    dist.all_reduce(means)
    return Run(task.name, seed, way, task.metric(model), (means / dist.get_world_size()).tolist())


def step_ratios() -> dict[str, float]:
    """Return by way what a rehearsed step takes of the best DDP's."""
    cells = (json.loads(line) for line in REHEARSED.read_text(encoding="utf-8").splitlines())
    rows = next(cell["rows"] for cell in cells if cell["cell"] == CELL)
    times_us = {row["name"]: row["median_us"] for row in rows}
    best_us = min(time_us for name, time_us in times_us.items() if name.startswith("ddp:best"))
    narrow = {
        name.partition(":")[2]: time_us / best_us for name, time_us in times_us.items() if name.startswith("wire:")
    }
    return {WHOLE[0]: 1.0} | narrow


def lines(found: Sequence[Run]) -> Iterator[str]:
    """One row per task and way: means over seeds, and over float32's runs what they are apart."""
    ratios = step_ratios()
    yield (
        "| task | way | last loss | against float32 | largest of a seed | float32 apart | metric | within | "
        "steps to the loss | time to it |"
    )
    yield "| --- " * 10 + "|"
    for name in dict.fromkeys(one.task for one in found):
        runs = {(one.seed, one.way): one for one in found if one.task == name}
        seeds = sorted({seed for seed, _ in runs})
        means = {seed: statistics.fmean(runs[seed, way].last_loss for way in WHOLE) for seed in seeds}
        targets = {
            seed: statistics.fmean(runs[seed, way].losses[round(REACHED * WINDOWS) - 1] for way in WHOLE)
            for seed in seeds
        }
        whole = [reached for seed in seeds if (reached := runs[seed, WHOLE[0]].reaches(targets[seed])) is not None]
        apart = max(abs(runs[seed, way].last_loss / means[seed] - 1.0) for seed in seeds for way in WHOLE)
        for way in dict.fromkeys(one.way for one in found):
            each = [runs[seed, way] for seed in seeds]
            off = [one.last_loss / means[one.seed] - 1.0 for one in each]
            mean, loss = statistics.fmean(off), statistics.fmean(one.last_loss for one in each)
            metric = statistics.fmean(one.metric for one in each)
            shares = [one.reaches(targets[one.seed]) for one in each]
            share = None if None in shares else statistics.fmean(share for share in shares if share is not None)
            ratio = ratios.get(way)
            steps = "not reached" if share is None else f"{share:.0%}"
            taken = f"{share * ratio / statistics.fmean(whole):.2f}" if share and ratio and whole else ""
            limit = LIMITS.get(way)
            within = "" if limit is None else "yes" if mean <= max(limit, apart) else "**no**"
            yield (
                f"| {name} | {way} | {loss:.4f} | {mean:+.2%} | {max(off, key=abs):+.2%} | {apart:.2%} | "
                f"{metric:.4f} | {within} | {steps} | {taken} |"
            )


def main() -> int:
    """Trains what is missing, prints, and writes where told to."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    names = [task.name for task in tasks()]
    parser.add_argument("--tasks", nargs="+", choices=names, default=names)
    parser.add_argument("--scale", type=float, default=1.0, help="of the steps that are trained")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--results", type=Path, default=None, help="JSON lines: not trained again")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT}")
    options = parser.parse_args()
    found = outcomes(train, Run, options.tasks, list(WAYS), options.seeds, options.scale, options.results, RANKS)
    publish(DOCUMENT if options.write else None, {"losses": "\n".join(lines(found))})
    return 0


if __name__ == "__main__":
    sys.exit(main())
