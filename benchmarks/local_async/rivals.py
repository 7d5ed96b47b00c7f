"""LPP-SGD against its rivals (minibatch, local and post-local SGD), over updaters, K, the switch point and workers.

After Tables 1, 3 and 4 of "Scaling the Wild: Decentralizing Hogwild!-style Shared-memory SGD", on digits: speed and
accuracy of the same run, by the paper's recipe of learning rates. All runs see the same number of samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.local_async.jobs import BATCH_SIZE, DEADLINE_S, RANKS, learner, spec
from benchmarks.resumable import kept
from examples.digits import test_accuracy
from planner.decide.strategies import make_schedule
from planner.documents.profile import Profile
from planner.emit.lower import lower
from planner.jobs.lr_schedule import LrSchedule
from planner.jobs.on_rank import profile_rank
from planner.jobs.rank_options import RankOptions
from planner.jobs.world import on_ranks
from planner.model.problem import make_problem
from runtime.comm.world import World
from runtime.local_async import run_local_async
from runtime.plan import Plan

LINK = "1gbit"
"""On it gradients of these models take less than their step: synchronous training is not hopeless."""
STEPS = 900
"""Minibatches of each of two ranks; of more ranks accordingly fewer."""
BASE_BATCH = 32
"""Batch that the job's learning rate is for."""
WARMUP_SHARE = 0.05


@dataclass(frozen=True)
class Way:
    """One way to train."""

    strategy: str
    then_every: int | None = None
    """K after the switch; None: the strategy's."""
    switch_fraction: float | None = None
    """Share of minibatches before the switch; None: the usual half."""

    def __str__(self) -> str:
        found = [self.strategy]
        found += [] if self.then_every is None else [f"K={self.then_every}"]
        found += [] if self.switch_fraction is None else [f"switch={self.switch_fraction:g}"]
        return " ".join(found)

    def plan(self, profile: Profile) -> Plan:
        """Return the plan, with blocks as planner cuts them."""
        problem = make_problem(profile)
        plan = lower(problem, make_schedule(problem, self.strategy))
        changes: dict[str, Any] = {"then_every": self.then_every, "switch_fraction": self.switch_fraction}
        changes = {name: value for name, value in changes.items() if value is not None}
        return replace(plan, local_async=replace(plan.local_async, **changes)) if plan.local_async else plan


WAYS = (
    *(Way(name) for name in ("mb_sgd", "l_sgd:16", "pl_sgd:16")),
    *(Way(f"{name}:{updaters}") for updaters in (2, 4, 6, 8) for name in ("lap", "lpp")),
    *(Way("lpp:2", then_every=every) for every in (4, 8, 32)),
    *(Way("lpp:2", switch_fraction=share) for share in (0.0, 0.25, 0.75, 1.0)),
)
"""Table 1, updaters (Table 2), K (Table 3) and the switch point (Table 4)."""
NUMBERS = (2, 4)
"""Of ranks."""


@dataclass(frozen=True)
class Rival:
    """One run, by its first rank; times by all."""

    accuracy: float
    """Share of the digits that were kept for testing."""
    samples_per_s: float
    """Samples of all ranks per second."""
    staleness: float
    """Updates of other updaters between an updater's snapshot and its update, on average."""
    outdated: float
    """Share of updates of gradients from weights before the last averaging."""
    lost: float
    """Share of additions that were lost by races, of a probe."""
    worst: float
    """Largest such share of one element."""


def train_rank(model: str, plan: Plan, seed: int, steps: int) -> Rival:
    """Train on every rank."""
    spec_ = plan.local_async
    blocks = spec_ is not None and spec_.blocks is not None
    rates = LrSchedule(BASE_BATCH, warmup_steps=round(WARMUP_SHARE * steps), cosine=True)
    rates = rates.scaled(BATCH_SIZE, plan.world.ranks, blocks=blocks)
    job = partial(learner, model, seed, steps, plan.world.ranks, rates)
    run = run_local_async(job, plan, steps, timeout_s=DEADLINE_S)
    report, world = run.report, World.join(None, DEADLINE_S)
    rates_of_all: list[float] = world.gather(report.samples_per_s, "comparing runs")
    world.leave()
    races = report.races
    return Rival(
        accuracy=test_accuracy(run.model),
        samples_per_s=sum(rates_of_all),
        staleness=report.mean_staleness,
        outdated=report.outdated / max(1, report.minibatches),
        lost=races.share if races else 0.0,
        worst=races.worst if races else 0.0,
    )


def measure(
    models: Sequence[str], link: str, seeds: Sequence[int], steps: int, path: Path | None, only: str = ""
) -> list[dict[str, Any]]:
    """Return a record for each model, number of ranks, way and seed; those that the file holds are not run again.

    Args:
        models: names.
        link: rate of the link between emulated hosts of one rank; empty: local ranks.
        seeds: of the runs.
        steps: of each of two ranks.
        path: JSON lines; None: nothing is kept.
        only: a part of the names of what is run now.
    """

    def options(ranks: int) -> RankOptions:
        return RankOptions(emulate=f"{ranks}x1@{link}") if link else RankOptions(ranks=ranks)

    @cache
    def profile(model: str, ranks: int) -> Profile:
        return on_ranks(options(ranks), profile_rank, spec(model), "cpu", False, None, 1)[0]

    def run(model: str, ranks: int, way: Way, seed: int) -> dict[str, Any]:
        plan = way.plan(profile(model, ranks))
        found: Rival = on_ranks(options(ranks), train_rank, model, plan, seed, steps * RANKS // ranks)[0]
        return {"model": model, "ranks": ranks, "way": str(way), "seed": seed, **asdict(found)}

    wanted: dict[str, Callable[[], dict[str, Any]]] = {
        f"{model} {link or 'local'} {ranks} ranks {way} seed {seed} of {steps}": partial(run, model, ranks, way, seed)
        for model in models
        for seed in seeds
        for ranks in NUMBERS
        for way in WAYS
    }
    return kept(path, wanted, only)


def lines(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield one row per model, number of ranks and way."""
    yield (
        "| model | ranks | way | accuracy, mean over seeds (range) | samples/s of all | MB-SGD = 1 | staleness "
        "| from before the last averaging | lost by races (worst element) |"
    )
    yield "| --- " * 9 + "|"
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["model"], record["ranks"], record["way"]), []).append(record)

    def median(found: Sequence[dict[str, Any]], name: str) -> float:
        return float(statistics.median(record[name] for record in found))

    for (model, ranks, way), found in groups.items():
        values, rate = [record["accuracy"] for record in found], median(found, "samples_per_s")
        first = groups.get((model, ranks, "mb_sgd"))
        against = f"{rate / median(first, 'samples_per_s'):.2f}" if first else ""
        yield (
            f"| {model} | {ranks} | `{way}` | {statistics.fmean(values):.4f} ({min(values):.4f} to {max(values):.4f}) "
            f"| {rate:,.0f} | {against} | {median(found, 'staleness'):.2f} | {median(found, 'outdated'):.1%} "
            f"| {median(found, 'lost'):.3%} ({max(record['worst'] for record in found):.2%}) |"
        )
