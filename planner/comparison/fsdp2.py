"""`planner compare --parallel fsdp2`: a plan and what users have instead, by turns in one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.comparison.statistics import Interval, median_interval, ratio_interval, step_values, verdict
from planner.decide.fsdp2 import baselines_of, make_setting
from planner.documents.text import milliseconds
from planner.model.fsdp2_step import simulate
from runtime.errors import InputError
from runtime.plan import FullyShardPlan, Plan

if TYPE_CHECKING:
    from rich.table import Table

PLAN = "plan"
WARM_UP = 1
COLUMNS = ("", "step (ms)", "95 % interval (ms)", "predicted (ms)", "error", "groups", "weights")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A wrapping that is measured."""

    name: str
    spec: FullyShardPlan
    predicted_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one rank saw."""

    step_us: dict[str, list[list[float]]]
    """By variant: rounds of steps."""
    differences: dict[str, float]
    """By variant, the largest difference of a weight from the first variant's, relative to its largest weight."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant."""

    name: str
    median_us: float
    ci95_us: tuple[float, float]
    predicted_us: float | None
    error: float | None
    """predicted / measured − 1."""
    groups: int
    difference: float
    """Of weights; 0: bit for bit those of a group for each block."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All variants."""

    rows: tuple[Row, ...]
    verdicts: tuple[str, ...]
    steps: int
    rounds: int

    def to_document(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]


def make_variants(plan: Plan, where: str, profile: str | None) -> list[Variant]:
    """Return what is compared, the usual wrapping first. Raises InputError: no plan for FSDP2, or no profile."""
    if plan.fsdp2 is None:
        raise InputError(
            f"{where}: found a plan with buckets, expected one for FSDP2: leave --parallel out, or make one"
        )
    if profile is None:
        raise InputError(
            "--profile: missing; expected the profile that the plan was made from, whose modules the usual wrappings "
            "are made of: add it"
        )
    setting = make_setting(profile, ranks=plan.world.ranks)
    known = set(setting.shape.spans)
    unknown = [module for group in plan.fsdp2.groups for module in group if module not in known]
    if unknown:
        raise InputError(f"--profile: found no module {unknown[0]!r} of {where}, expected the profile it was made from")
    specs = {**baselines_of(setting), PLAN: plan.fsdp2}
    found = []
    for name, spec in specs.items():
        step = simulate(setting.shape, spec, setting.costs(spec.shard_ranks), setting.executor, bars=False)
        found.append(Variant(name=name, spec=spec, predicted_us=step.iteration_us))
    return found


def compare_rank_fsdp2(
    job: str, plan: Plan, variants: Sequence[Variant], rounds: int, steps: int, device: str, timeout_s: float
) -> Taken:
    """Measure all variants on this rank; every rank calls it."""
    import torch

    from planner.jobs.training import build
    from planner.profile.links import timed_us
    from runtime.comm.world import World
    from runtime.fully_sharded.hosts import overlap_on_hosts
    from runtime.fully_sharded.wrap import fully_shard

    world = World.join(None, timeout_s)
    runs: dict[str, Any] = {}
    for variant in variants:
        built = build(job, device)
        model = fully_shard(built.model, replace(plan, fsdp2=variant.spec), timeout_s=timeout_s)
        if built.device.type == "cpu" and variant.spec.shard_ranks is None:
            overlap_on_hosts(model, variant.spec, timeout_s)
        built.optimizer = built.job.optimizer(p for p in model.parameters() if p.requires_grad)
        runs[variant.name] = built
    done = dict.fromkeys(runs, 0)
    step_us: dict[str, list[list[float]]] = {name: [] for name in runs}

    def step(built: Any, batch: Any) -> None:
        built.optimizer.zero_grad()
        built.backward(built.loss(built.model, batch))
        built.optimizer.step()

    for turn in range(rounds):
        names = list(runs)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            built, taken = runs[name], []
            for number in range(WARM_UP + steps):
                batch = built.batch(done[name])
                done[name] += 1
                world.gather(None, f"beginning a step of {name}")
                taken.append(timed_us(lambda built=built, batch=batch: step(built, batch), built.device))  # type: ignore[misc]
                if number < WARM_UP:
                    taken.clear()
            step_us[name].append(taken)
    first = runs[variants[0].name].model
    differences = {}
    for name, built in runs.items():
        largest = 0.0
        for mine, theirs in zip(built.model.parameters(), first.parameters(), strict=True):
            one, other = mine.full_tensor().detach().double(), theirs.full_tensor().detach().double()
            if not torch.equal(one, other):
                largest = max(largest, float((one - other).abs().max() / other.abs().max().clamp_min(1e-30)))
        differences[name] = largest
    world.leave()
    return Taken(step_us=step_us, differences=differences)


def summarize(variants: Sequence[Variant], ranks: Sequence[Taken]) -> Comparison:
    """Return all ranks' measurements as one comparison."""
    values = {
        one.name: step_values(np.array([rank.step_us[one.name] for rank in ranks]), together=True) for one in variants
    }
    rows = []
    for variant in variants:
        found: Interval = median_interval(values[variant.name])
        error = None if variant.predicted_us is None else variant.predicted_us / found.value - 1.0
        rows.append(Row(
            name=variant.name, median_us=found.value, ci95_us=(found.low, found.high),
            predicted_us=variant.predicted_us, error=error, groups=len(variant.spec.groups) + 1,
            difference=max(rank.differences[variant.name] for rank in ranks),
        ))  # fmt: skip
    verdicts = tuple(
        verdict(ratio_interval(values[PLAN], values[one.name]), "the plan", one.name)
        for one in variants
        if one.name != PLAN
    )
    rounds, steps = values[PLAN].shape
    return Comparison(rows=tuple(rows), verdicts=verdicts, steps=rounds * steps, rounds=rounds)


def comparison_table(found: Comparison) -> Table:
    """For the terminal, fastest first."""
    from planner.report.tables import make_table

    title = f"FSDP2, {found.steps} steps each in {found.rounds} interleaved rounds"
    table = make_table(title, COLUMNS, left=("", "weights"))
    for row in sorted(found.rows, key=lambda row: row.median_us):
        low, high = map(milliseconds, row.ci95_us)
        error = "" if row.error is None else f"{row.error:+.1%}"
        same = "bit for bit" if row.difference == 0.0 else f"differ by {row.difference:.1g}"
        cells = (milliseconds(row.median_us), f"{low} – {high}", milliseconds(row.predicted_us), error)
        table.add_row(row.name, *cells, str(row.groups), same)
    return table
