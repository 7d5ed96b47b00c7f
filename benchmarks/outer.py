"""Metrics of outer steps (DiLoCo) against synchronous training at equal tokens, after a warm-up of a tenth.

python -m benchmarks.outer --results outer.jsonl                  # some hours; continues where it was stopped
python -m benchmarks.outer --results short.jsonl --scale 0.1      # shorter runs
python -m benchmarks.outer --results outer.jsonl --output docs/results/outer.md
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from benchmarks.lags.accuracy import plan_of
from benchmarks.learning import SEEDS, Outcome, Task, learn, outcomes
from benchmarks.marked import write_part
from runtime.outer.local_steps import Outer
from runtime.plan import CompressorSpec, OuterSpec, Plan

PART = "accuracy"
TASKS = ("characters, GPT", "digits, ViT", "characters, LSTM")
WARMUP_SHARE, LAST_SHARE = 0.1, 0.05
"""Shares of the steps: synchronous first ones; last ones whose training loss counts."""


@dataclass(frozen=True)
class Way:
    """Outer steps by DiLoCo's optimizer, one fragment at once."""

    every: int
    compressor: CompressorSpec | None = None


SYNCHRONOUS = "synchronous"
WAYS: dict[str, Way | None] = {
    SYNCHRONOUS: None,
    "H = 8": Way(8),
    "H = 30": Way(30),
    "H = 30, int8": Way(30, CompressorSpec(name="wire", dtype="int8")),
}


@dataclass(frozen=True)
class Learned(Outcome):
    """One run."""

    loss: float
    """Mean training loss of the last steps, on one rank."""
    distance: float | None
    """Largest distance of workers over what the warm-up moved them by; None: nothing was measured."""
    every: int
    """H at the end of the run, 0 where the guard has ended outer steps; 1 in synchronous runs."""


def plan_with(model: nn.Module, steps: int, way: Way | None) -> Plan:
    """Return the plan of a way."""
    plan = plan_of(model)
    if way is None:
        return plan
    buckets = plan.buckets
    if way.compressor is not None:
        buckets = tuple(replace(bucket, compressor=way.compressor) for bucket in buckets)
    outer = OuterSpec(every=way.every, warmup_steps=round(WARMUP_SHARE * steps))
    return replace(plan, accuracy="relaxed", buckets=buckets, outer=outer)


def train(task: Task, seed: int, way: str) -> Learned:
    """Train once on this rank."""
    losses: list[float] = []
    model, session = learn(task, seed, lambda model, _: plan_with(model, task.steps, WAYS[way]), losses=losses)
    with session.global_weights():
        metric = task.metric(model)
    outer = session._mode if isinstance(session._mode, Outer) else None
    relative = [sample.relative for sample in outer.distances.samples] if outer else []
    session.detach()
    last = losses[-max(1, round(LAST_SHARE * task.steps)) :]
    return Learned(
        task.name, seed, way, metric, statistics.fmean(last), max(relative, default=None), outer.every if outer else 1
    )


def lines(found: Sequence[Learned]) -> Iterator[str]:
    """Yield the table: one row for each task and way."""
    yield (
        "| task | way | held-out metric, mean over seeds (range) | against synchronous | training loss, last steps "
        "| distance, × warm-up | H at the end |"
    )
    yield "| --- " * 7 + "|"
    for name in dict.fromkeys(one.task for one in found):
        first = statistics.fmean(one.metric for one in found if one.task == name and one.way == SYNCHRONOUS)
        for way in WAYS:
            runs = [one for one in found if one.task == name and one.way == way]
            metrics = [one.metric for one in runs]
            mean, loss = statistics.fmean(metrics), statistics.fmean(one.loss for one in runs)
            far = max((one.distance for one in runs if one.distance is not None), default=None)
            ends = ", ".join(map(str, sorted({one.every for one in runs})))
            yield (
                f"| {name} | {way} | {mean:.4f} ({min(metrics):.4f} to {max(metrics):.4f}) | {mean / first - 1.0:+.2%} "
                f"| {loss:.4f} | {'' if far is None else f'{far:.3g}'} | {ends} |"
            )


def main() -> int:
    """Train what is missing, print the table, and write it where that is asked for."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of the steps that are trained")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--results", type=Path, default=None, help="JSON lines: not trained again")
    parser.add_argument("--output", type=Path, default=None, help="a document whose marked part is replaced")
    options = parser.parse_args()
    found = outcomes(train, Learned, options.tasks, list(WAYS), options.seeds, options.scale, options.results)
    text = "\n".join(lines(found))
    print(text)
    if options.output is not None:
        write_part(options.output, PART, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
