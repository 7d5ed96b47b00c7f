"""Collectives on two kinds of link, on emulated hosts (as root): messages with the bytes between hosts, whole steps.

python -m benchmarks.hierarchy                                    # messages of 16 MB, on 2x2@200mbit
python -m benchmarks.hierarchy --part steps --jobs benchmarks.truth.jobs:vgg_job
python -m benchmarks.hierarchy --part accuracy --results runs.jsonl   # goes on where it was stopped
python -m benchmarks.hierarchy --part crossover --output docs/results/hierarchy.md  # predicted: seconds, not as root
python -m benchmarks.hierarchy --output docs/results/hierarchy.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.hierarchy import accuracy, crossover, messages, steps
from benchmarks.learning import SEEDS, Outcome, outcomes
from benchmarks.marked import publish
from planner.jobs.rank_options import RankOptions
from planner.jobs.world import on_ranks

PARTS = ("messages", "steps", "accuracy", "crossover")
JOBS = ("benchmarks.truth.jobs:resnet18_job", "benchmarks.truth.jobs:vgg_job")


def main() -> int:
    """Prints, and writes where told to; 0 even where a target is missed: the text says so."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--emulate", default="2x2@200mbit")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=["messages"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[16_000_000], help="of messages, in bytes")
    parser.add_argument("--densities", nargs="+", type=float, default=[0.01])
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=["digits, ResNet-20"], help="of benchmarks.lags.accuracy")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), help="of the runs for accuracy")
    parser.add_argument("--ways", nargs="+", default=list(accuracy.WAYS), help="to train for accuracy")
    parser.add_argument("--results", type=Path, default=None, help="JSON lines of runs that are not trained again")
    parser.add_argument("--scale", type=float, default=1.0, help="of the steps that are trained for accuracy")
    parser.add_argument("--output", type=Path, default=None, help="a document whose marked parts are replaced")
    options = parser.parse_args()
    for part in options.part:
        made = {"messages": _messages, "steps": _steps, "accuracy": _accuracy, "crossover": _crossover}
        publish(options.output, {part: "\n".join(made[part](options))})
    return 0


def _messages(options: argparse.Namespace) -> list[str]:
    ranks = RankOptions(None, emulate=options.emulate)
    found = on_ranks(ranks, messages.run_rank, options.sizes, options.densities, options.passes)[0]
    checked = messages.targets(found, options.sizes[-1], options.densities[-1])
    targets = [f"- {what}: {ratio:.2f} × as fast (target {least:g})" for what, ratio, least in checked]
    return [f"{options.emulate}:", "", *messages.lines(found), "", *targets]


def _accuracy(options: argparse.Namespace) -> list[str]:
    found = outcomes(
        accuracy.train, Outcome, options.tasks, options.ways, options.seeds, options.scale, options.results,
        accuracy.RANKS,
    )  # fmt: skip
    return list(accuracy.lines(found))


def _crossover(_: argparse.Namespace) -> list[str]:
    return list(crossover.lines())


def _steps(options: argparse.Namespace) -> list[str]:
    text = []
    for job in options.jobs:
        found = steps.on_hosts(options.emulate, job, options.rounds)
        text += [f"{options.emulate}:", "", *steps.lines(job.rpartition(":")[2], found), ""]
    return text


if __name__ == "__main__":
    sys.exit(main())
