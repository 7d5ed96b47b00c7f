"""How accurate models become by each way to train, after the same number of samples."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.local_async.jobs import BATCH_SIZE, DEADLINE_S, MODELS, learner, spec
from examples.digits import test_accuracy
from planner.decide.strategies import make_schedule
from planner.emit.lower import lower
from planner.jobs.on_rank import profile_rank
from planner.model.problem import make_problem
from runtime.local_async import run_local_async
from runtime.plan import Plan

WAYS = ("mb_sgd", "l_sgd:16", "pl_sgd:16", "lap:2", "lpp:2", "lap:4", "lpp:4")
STEPS = 900
"""Minibatches of each rank: twenty passes over the digits."""


@dataclass(frozen=True)
class Outcome:
    """One run."""

    model: str
    seed: int
    way: str
    steps: int
    accuracy: float
    """Of the digits that were kept for testing."""
    staleness: float
    """Updates of other updaters between an updater's snapshot and its update, on average."""
    seconds: float

    @classmethod
    def parse(cls, document: dict[str, Any]) -> Outcome:
        """From JSON."""
        return cls(**document)


def plans_rank(model: str) -> dict[str, Plan]:
    """On every rank: the plan of each way, with blocks as the planner cuts them."""
    problem = make_problem(profile_rank(spec(model), "cpu", show_progress=False, updaters=1))
    return {way: lower(problem, make_schedule(problem, way)) for way in WAYS}


def train_rank(model: str, plans: dict[str, Plan], seed: int, ways: Sequence[str], steps: int) -> list[Outcome]:
    """On every rank."""
    found = []
    for way in ways:
        job = partial(learner, model, seed, steps)
        run = run_local_async(job, plans[way], steps, timeout_s=DEADLINE_S)
        accuracy = test_accuracy(run.model)
        found.append(Outcome(model, seed, way, steps, accuracy, run.report.mean_staleness, run.report.seconds))
    return found


def lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One row per model and way."""
    yield "| model | way | accuracy, mean over seeds (range) | against MB-SGD | staleness |"
    yield "| --- " * 5 + "|"
    for model in MODELS:
        mine = [one for one in outcomes if one.model == model]
        first = [one.accuracy for one in mine if one.way == "mb_sgd"]
        for way in WAYS:
            found = [one for one in mine if one.way == way]
            if not found or not first:
                continue
            values = [one.accuracy for one in found]
            mean = statistics.fmean(values)
            yield (
                f"| {model} | `{way}` | {mean:.4f} ({min(values):.4f} to {max(values):.4f}) "
                f"| {mean / statistics.fmean(first) - 1.0:+.2%} | {statistics.fmean(o.staleness for o in found):.2f} |"
            )
    yield ""
    seeds, steps = sorted({one.seed for one in outcomes}), sorted({one.steps for one in outcomes})
    yield (
        f"{', '.join(map(str, steps))} minibatches of {BATCH_SIZE} on each of 2 ranks, seeds "
        f"{', '.join(map(str, seeds))}; 360 digits for testing, so 0.28 % are one of them."
    )
