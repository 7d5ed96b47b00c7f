"""Where compression pays: models of the catalogue × links × ranks, decided on one set of costs and judged on others.

python -m benchmarks.when_to_compress --results rows.jsonl              # all settings; goes on where it was stopped
python -m benchmarks.when_to_compress --models vgg16 --ranks 16
python -m benchmarks.when_to_compress --output docs/results/when-to-compress.md

In each setting the lossy plan is taken where it is predicted 2 % faster than the best exact one, as `planner optimize
--accuracy bounded` does. Then every cost is changed at random by up to 10 %, by itself, and the plan that was taken is
held against the best exact one, and against the best lossy one, that could have been decided knowing those costs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.marked import publish
from benchmarks.resumable import kept
from planner.decide.lossy import sent_share
from planner.decide.strategies import best_baseline
from planner.documents.catalog import find_profile
from planner.documents.profile import Cluster, ComputeProfile, Contention, Link, Profile, SelectionLine
from planner.ir import GAIN, Schedule
from planner.model.modes import step_us
from planner.model.problem import Problem, make_problem
from planner.passes.joint import Joint
from planner.passes.merge import Merge

MODELS = (
    "alexnet", "bert-base", "bert-large", "densenet161", "googlenet", "gpt2", "inception-v4", "resnet50", "resnet101",
    "resnet152", "transformer", "vgg16",
)  # fmt: skip
LINKS = {
    "1": (50.0, 1.0), "10": (30.0, 10.0), "25": (20.0, 25.0), "50": (15.0, 50.0), "100": (10.0, 100.0),
    "400": (5.0, 400.0),
}  # fmt: skip
"""Gbit/s → (α in µs, Gbit/s)."""
RANKS = (4, 16, 64)
SELECTORS = {
    "one pass": SelectionLine(alpha_us=20.0, beta_us_per_byte=6.7e-6),
    "torch.topk": SelectionLine(alpha_us=200.0, beta_us_per_byte=2.3e-3),
}
"""What selecting costs over dense bytes: error feedback and selection in about one pass over memory at 0.9 TB/s, twice
the time that three times the bytes take; or as CommLib (MLSys 2021) measured for torch's top-k of ResNet-50's gradients
on a V100: 0.239 s for 102 MB."""
CONTENTION = Contention(compute=1.1, network=1.2)
DRAWS, SPREAD = 3, 0.1
HARM, TAKEN = 0.02, 0.95
"""A plan that was taken does harm where it is this much slower than the best exact one; and takes this share of what
the best lossy one would gain."""

PART = "measured"


@dataclass(frozen=True)
class Setting:
    """One row."""

    model: str
    gbit: str
    ranks: int
    selector: str


@dataclass(frozen=True)
class Judged:
    """What came out; times in microseconds, of the draws the worst or the median as named."""

    setting: Setting
    exact_us: float
    lossy_us: float
    taken: bool
    """Whether the lossy plan was."""
    sent: float
    """Share of the elements that travel in a step."""
    worst_against_exact: float
    """The plan that was taken over the best exact one for the changed costs, largest of the draws."""
    gain: float
    """Share of the step that the best lossy plan for the changed costs saves, median of the draws."""
    gain_taken: float | None
    """Of that gain, what the plan that was taken saves, median of the draws in which it is worth 2 %; None where it
    never is."""


def settings(models: Sequence[str], ranks: Sequence[int], selectors: Sequence[str]) -> Iterator[Setting]:
    """All of them."""
    for model in models:
        for gbit in LINKS:
            for count in ranks:
                for selector in selectors:
                    yield Setting(model, gbit, count, selector)


def cluster_of(setting: Setting) -> Cluster:
    """So many machines with one rank each."""
    alpha_us, gbit = LINKS[setting.gbit]
    line = SELECTORS[setting.selector]
    return Cluster(
        nodes=setting.ranks,
        inter=Link(alpha_us=alpha_us, beta_us_per_byte=8e-3 / gbit),
        contention=CONTENTION,
        sparsify=line,
        unpack=SelectionLine(alpha_us=10.0, beta_us_per_byte=2.2e-6),
    )


def judge(setting: Setting, profile: Profile) -> Judged:
    """Decides, changes the costs, and compares."""
    problem = make_problem(profile, cluster_of(setting))
    exact, lossy = decide(problem)
    exact_us, lossy_us = step_us(problem, exact), step_us(problem, lossy)
    taken = lossy_us <= exact_us * (1.0 - GAIN)
    plan = lossy if taken else exact
    rng = np.random.default_rng(zlib.crc32(str(setting).encode()))
    against, gains, shares = [], [], []
    for _ in range(DRAWS):
        changed = perturbed(problem, rng)
        best_exact, best_lossy = decide(changed)
        dense_us, sparse_us, plan_us = (step_us(changed, one) for one in (best_exact, best_lossy, plan))
        against.append(plan_us / dense_us)
        gains.append(1.0 - sparse_us / dense_us)
        if sparse_us <= dense_us * (1.0 - GAIN):
            shares.append((dense_us - plan_us) / (dense_us - sparse_us))
    return Judged(
        setting=setting,
        exact_us=exact_us,
        lossy_us=lossy_us,
        taken=taken,
        sent=sent_share(problem, lossy),
        worst_against_exact=max(against),
        gain=statistics.median(gains),
        gain_taken=statistics.median(shares) if shares else None,
    )


def decide(problem: Problem) -> tuple[Schedule, Schedule]:
    """(best exact, best bounded)."""
    exact = Merge().apply(best_baseline(problem), problem).schedule
    return exact, Joint(compress="sparse").apply(exact, problem).schedule


def perturbed(problem: Problem, rng: np.random.Generator) -> Problem:
    """Every cost times a factor of its own."""

    def by() -> float:
        return float(rng.uniform(1.0 - SPREAD, 1.0 + SPREAD))

    def line(given: SelectionLine) -> SelectionLine:
        return SelectionLine(alpha_us=given.alpha_us * by(), beta_us_per_byte=given.beta_us_per_byte * by())

    compute, cluster = problem.profile.compute, problem.cost.cluster
    assert cluster.inter is not None
    assert isinstance(cluster.sparsify, SelectionLine)
    assert isinstance(cluster.unpack, SelectionLine)
    changed: ComputeProfile = replace(
        compute,
        forward_us=compute.forward_us * by(),
        update_us=compute.update_us * by(),
        gradients=tuple(replace(gradient, backward_us=gradient.backward_us * by()) for gradient in compute.gradients),
    )
    machines = replace(
        cluster,
        inter=Link(alpha_us=cluster.inter.alpha_us * by(), beta_us_per_byte=cluster.inter.beta_us_per_byte * by()),
        contention=Contention(compute=max(1.0, CONTENTION.compute * by()), network=max(1.0, CONTENTION.network * by())),
        sparsify=line(cluster.sparsify),
        unpack=line(cluster.unpack),
    )
    return make_problem(replace(problem.profile, compute=changed), machines)


def harmed(rows: Sequence[Judged]) -> list[Judged]:
    """Lossy plans that were taken and are too much slower than the best exact one."""
    return [row for row in rows if row.taken and row.worst_against_exact > 1.0 + HARM]


def summary(rows: Sequence[Judged]) -> Iterator[str]:
    """The figures, each with what is aimed at."""
    taken = [row for row in rows if row.taken]
    stale = sum(not row.taken and row.worst_against_exact > 1.0 + HARM for row in rows)
    shares = [row.gain_taken for row in taken if row.gain_taken is not None]
    missed = [row.gain for row in rows if not row.taken and row.gain_taken is not None]
    yield f"- {len(rows)} settings; compression is taken in {len(taken)} of them."
    yield f"- Taken and more than {HARM:.0%} slower than the best exact plan: {len(harmed(rows))} (aim: 0)."
    if shares:
        short = sum(share < TAKEN for share in shares)
        yield (
            f"- Where it is taken, the plan has {statistics.fmean(shares):.1%} of the gain of the best lossy one on "
            f"average, at the least {min(shares):.1%}; less than {TAKEN:.0%} in {short} of {len(shares)} settings."
        )
    yield (
        f"- Not taken, though with some of the changed costs it would have won {GAIN:.0%}: {len(missed)} settings"
        + (f", in which the best lossy plan saves at most {max(missed):.1%} of the step (median)." if missed else ".")
    )
    yield (
        f"- Not taken, and with some of the changed costs another exact plan would have been more than {HARM:.0%} "
        f"faster than the exact plan that was: {stale} settings. That is the price of costs that are off, not of "
        f"compression."
    )


def table(rows: Sequence[Judged]) -> Iterator[str]:
    """Per model and number of ranks: the gain by link, in bold where compression is taken."""
    links = list(LINKS)
    yield "| model | ranks | selection | " + " | ".join(f"{gbit} Gbit/s" for gbit in links) + " |"
    yield "| --- " * (3 + len(links)) + "|"
    keys = dict.fromkeys((row.setting.model, row.setting.ranks, row.setting.selector) for row in rows)
    for model, ranks, selector in keys:
        cells = []
        for gbit in links:
            row = next(r for r in rows if r.setting == Setting(model, gbit, ranks, selector))
            ratio = row.exact_us / row.lossy_us
            cells.append(f"**{ratio:.2f} ×** ({row.sent:.1%})" if row.taken else "–")
        yield f"| {model} | {ranks} | {selector} | " + " | ".join(cells) + " |"


def _record(setting: Setting) -> dict[str, Any]:
    return {"row": asdict(judge(setting, find_profile(setting.model)))}


def main() -> int:
    """Prints; writes where told to; 1 where a plan that was taken does harm."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--selectors", nargs="+", choices=list(SELECTORS), default=["one pass"])
    parser.add_argument("--results", type=Path, default=None, help="JSON lines: not judged again")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    wanted = settings(options.models, options.ranks, options.selectors)
    records = kept(options.results, {str(setting): partial(_record, setting) for setting in wanted})
    rows = [Judged(**one["row"] | {"setting": Setting(**one["row"]["setting"])}) for one in records]
    publish(options.output, {PART: "\n".join([*summary(rows), "", *table(rows)])})
    return 1 if harmed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
