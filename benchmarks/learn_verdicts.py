"""Whether verdicts of `planner compare --learn` are right: 20 trials of 3 seeds each, against the truth of 20 seeds.

    python -m benchmarks.learn_verdicts --write        # the truth first, then trials; resumes

A character LSTM on two ranks. DDP in another order, int8, rank 1 and top-k 1 % train in one run, from the first step
on; each trial has weights and batches of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import Figures
from benchmarks.learning import CharLstm
from benchmarks.marked import parser_of, tabulate
from examples import charlm
from planner import TrainingJob
from planner.comparison.contestants import Learn, make_contestants
from planner.comparison.learned import summarize_learned
from planner.comparison.learning import learn_rank
from planner.comparison.variants import DDP, DDP_AGAIN
from planner.jobs.launch import LocalWorld, run_ranks
from runtime.checks.plan import trainable_parameters
from runtime.plan import CompressorSpec, ModelReference, Plan, PlanBucket, PlanWorld

DOCUMENT, RESULTS = Path("docs/results/learn-verdicts.md"), Path("benchmarks/results/learn_verdicts.jsonl")
RANKS, STEPS, SEEDS, TRIALS, TRUE_SEEDS, WIDTH = 2, 120, 3, 20, 20, 48
TRIAL = "LEARN_VERDICTS_TRIAL"
"""Environment variable with the number of the trial, which `job` starts from; 0 is the truth."""
TRUTH = "truth"
TRIAL_STEPS = 100_000
"""Batches between those of two trials."""
RIGHT, UNKNOWN = 0.95, 0.2

SENT = {
    "int8": ("all_reduce", "two_shot", CompressorSpec(name="wire", dtype="int8")),
    "rank 1": ("all_reduce", "library", CompressorSpec(name="powersgd", rank=1)),
    "top-k 1 %": ("sparse", "flat", CompressorSpec(name="topk", density=0.01)),
}
CASES = (DDP_AGAIN, *SENT)


def job() -> TrainingJob:
    """Return the LSTM with the weights and batches of the trial that the environment names."""
    trial = int(os.environ[TRIAL])
    torch.manual_seed(torch.initial_seed() + 1000 * trial)
    return TrainingJob(
        model=CharLstm(charlm.text()[1], WIDTH),
        loss=charlm.loss,
        batch=lambda step, rank: charlm.batch(step + TRIAL_STEPS * trial, rank),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9),
    )


def plans() -> dict[str, Plan]:
    """Return a plan of one bucket for each case, by name."""
    names = tuple(reversed(trainable_parameters(CharLstm(charlm.text()[1], WIDTH))))
    return {
        name: Plan(
            model=ModelReference(name="CharLstm"), world=PlanWorld(ranks=RANKS), accuracy="bounded",
            buckets=(PlanBucket(gradients=names, collective=collective, algorithm=algorithm, compressor=compressor),),
        )
        for name, (collective, algorithm, compressor) in SENT.items()
    }  # fmt: skip


def measure(trial: int, seeds: int) -> dict[str, Any]:
    """Train all cases of one trial; return their verdicts and intervals, and the estimated and the real time."""
    os.environ[TRIAL] = str(trial)
    learn = Learn(steps=STEPS, seeds=seeds)
    contestants = make_contestants(plans(), None, ())
    spec = "benchmarks.learn_verdicts:job"
    learned = summarize_learned(
        run_ranks(LocalWorld(ranks=RANKS), learn_rank, spec, contestants, learn, "cpu", False), learn
    )
    rows = {row.name: {"verdict": row.verdict, "against": row.against_ddp, "ci95": row.ci95} for row in learned.rows}
    rows.pop(DDP)
    return {"rows": rows, "estimated_s": round(learned.estimated_s, 1), "took_s": round(learned.took_s, 1)}


def lines(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Return a row for each case, and the figures."""
    cells = {cell["cell"]: cell for cell in found}
    truth, trials = cells.get(TRUTH), [cell for name, cell in cells.items() if name != TRUTH]
    if truth is None or not trials:
        yield "The truth, or trials, are not measured yet."
        return
    yield f"| case | truth of {TRUE_SEEDS} seeds | trials | right | wrong | not known |"
    yield "| --- " * 6 + "|"
    decided = right = 0
    for case in CASES:
        row, verdicts = truth["rows"][case], [trial["rows"][case]["verdict"] for trial in trials]
        known = [one for one in verdicts if one != "not known"]
        hits = known.count(row["verdict"])
        decided, right = decided + len(known), right + hits
        low, high = row["ci95"]
        found_to_be = f"{row['verdict']}: {row['against']:+.3%} ({low:+.3%} to {high:+.3%})"
        counts = (len(verdicts), hits, len(known) - hits, len(verdicts) - len(known))
        yield f"| {case} | {found_to_be} | {' | '.join(map(str, counts))} |"
    count = len(trials) * len(CASES)
    figures = Figures("")
    share, unknown = right / max(1, decided), 1.0 - decided / count
    figures.add("right among those decided", f"{share:.1%} of {decided}", f"≥ {RIGHT:.0%}", share >= RIGHT)
    figures.add("not known", f"{unknown:.1%} of {count}", f"≤ {UNKNOWN:.0%}", unknown <= UNKNOWN)
    yield from figures.lines
    off = sorted(abs(cell["took_s"] / cell["estimated_s"] - 1.0) for cell in found)
    yield ""
    yield f"Estimated time: off by {off[len(off) // 2]:.0%} (median) and {off[-1]:.0%} (most) in {len(off)} runs."


def main() -> int:
    """Measure what is missing, the truth first; print, and write where asked to."""
    parser = parser_of(__doc__, DOCUMENT, RESULTS)
    parser.add_argument("--trials", type=int, default=TRIALS)
    options = parser.parse_args()
    wanted = {TRUTH: partial(measure, 0, TRUE_SEEDS)}
    wanted |= {f"trial {trial}": partial(measure, trial, SEEDS) for trial in range(1, options.trials + 1)}
    return tabulate(DOCUMENT, {"verdicts": (wanted, lines)}, options)


if __name__ == "__main__":
    sys.exit(main())
