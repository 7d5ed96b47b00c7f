"""Local updaters measured: speed against prediction and minibatch SGD, what blocks save, averaging, accuracy.

python -m benchmarks.local_async                                    # an hour on a quiet machine; needs root
python -m benchmarks.local_async --quick                            # some minutes; figures are rough
python -m benchmarks.local_async --parts speed --trace trace.json   # the timeline for ui.perfetto.dev
python -m benchmarks.local_async --parts rivals --rival-results rivals.jsonl   # hours; resumable
python -m benchmarks.local_async --output docs/results/local-async.md
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.learning import SEEDS
from benchmarks.local_async import accuracy, rivals, speed
from benchmarks.local_async.jobs import MODELS, RANKS
from benchmarks.marked import publish
from planner.jobs.launch import LocalWorld, run_ranks
from planner.jobs.rank_options import RankOptions
from planner.jobs.world import on_ranks

PARTS = ("speed", "accuracy", "rivals")


def _speed(options: argparse.Namespace) -> dict[str, str]:
    where = RankOptions(emulate=options.emulate)
    steps, rounds = (80, 2) if options.quick else (options.steps, options.rounds)
    results = [
        on_ranks(where, speed.measure_rank, model, options.emulate, steps, rounds)[0] for model in options.models
    ]
    if options.trace is not None:
        speed.write_trace(options.trace, results[0].spans)
    return {
        "speed": "\n".join(speed.speed_lines(results)),
        "blocks": "\n".join(speed.saving_lines(results)),
        "averaging": "\n".join(speed.beside_lines(results)),
    }


def _accuracy(options: argparse.Namespace) -> dict[str, str]:
    path: Path | None = options.results
    written = path.read_text("utf-8").splitlines() if path is not None and path.exists() else []
    found = [accuracy.Outcome.parse(json.loads(line)) for line in written]
    steps = 90 if options.quick else accuracy.STEPS
    seeds = options.seeds[:1] if options.quick else options.seeds
    for model in options.models:
        plans = None
        for seed in seeds:
            done = {one.way for one in found if (one.model, one.seed, one.steps) == (model, seed, steps)}
            ways = [way for way in accuracy.WAYS if way not in done]
            if not ways:
                continue
            plans = plans or run_ranks(LocalWorld(ranks=RANKS), accuracy.plans_rank, model)[0]
            new = run_ranks(LocalWorld(ranks=RANKS), accuracy.train_rank, model, plans, seed, ways, steps)[0]
            found += new
            if path is not None:
                with path.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(asdict(one)) + "\n" for one in new)
    return {"accuracy": "\n".join(accuracy.lines([one for one in found if one.steps == steps]))}


def _rivals(options: argparse.Namespace) -> dict[str, str]:
    steps, seeds = (24, options.seeds[:1]) if options.quick else (rivals.STEPS, options.seeds)
    records = rivals.measure(options.models, options.link, seeds, steps, options.rival_results, options.only)
    return {"rivals": "\n".join(rivals.lines(records))}


def main() -> int:
    """Prints, and writes where told to."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["speed", "accuracy"])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--emulate", default="2x1@100mbit", help="the cluster that speed is measured on")
    parser.add_argument("--steps", type=int, default=400, help="minibatches of each rank in a run")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each strategy, by turns")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--quick", action="store_true", help="few minibatches, one seed")
    parser.add_argument("--results", type=Path, default=None, help="JSON lines of runs that are not trained again")
    parser.add_argument("--link", default=rivals.LINK, help="of rivals: between hosts of a rank; empty: local ranks")
    parser.add_argument("--only", default="", help="of rivals: a part of the names of runs that are made now")
    parser.add_argument("--rival-results", type=Path, default=None, help="JSON lines of rivals, not trained again")
    parser.add_argument("--trace", type=Path, default=None, help="where to write what updaters did, as trace events")
    parser.add_argument("--output", type=Path, default=None, help="a document whose marked parts are replaced")
    options = parser.parse_args()
    texts = _speed(options) if "speed" in options.parts else {}
    texts |= _accuracy(options) if "accuracy" in options.parts else {}
    texts |= _rivals(options) if "rivals" in options.parts else {}
    publish(options.output, texts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
