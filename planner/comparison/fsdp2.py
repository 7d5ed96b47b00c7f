"""`planner compare --parallel fsdp2`: a plan and what users have instead, by turns in one run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.comparison.statistics import Interval, median_interval, ratio_interval, step_values, verdict
from planner.documents.text import milliseconds
from planner.fsdp2.decide import Setting, baselines_of, make_setting
from planner.fsdp2.simulator import simulate
from runtime.errors import InputError
from runtime.plan import FullyShardPlan, Plan

if TYPE_CHECKING:
    import torch
    from rich.table import Table
    from torch import nn

    from runtime.comm.world import World

PLAN = "plan"
WARM_UP = 1
COLUMNS = ("", "step (ms)", "95 % interval (ms)", "predicted (ms)", "error", "groups", "weights")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A wrapping that is measured."""

    name: str
    spec: FullyShardPlan
    predicted_us: float | None = None
    peak_bytes: int | None = None
    """Of one rank, predicted."""


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

    def cells(self) -> tuple[str, ...]:
        """Texts under `COLUMNS`."""
        low, high = map(milliseconds, self.ci95_us)
        error = "" if self.error is None else f"{self.error:+.1%}"
        same = "bit for bit" if self.difference == 0.0 else f"differ by {self.difference:.1g}"
        times = (milliseconds(self.median_us), f"{low} – {high}", milliseconds(self.predicted_us))
        return self.name, *times, error, str(self.groups), same


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
    return variants_of(setting, plan.fsdp2)


def variants_of(setting: Setting, chosen: FullyShardPlan) -> list[Variant]:
    """Return what users have instead, the usual wrapping first, and the chosen wrapping, each with its prediction."""
    found = []
    for name, spec in {**baselines_of(setting), PLAN: chosen}.items():
        step = simulate(setting.shape, spec, setting.costs(spec.shard_ranks), setting.executor, bars=False)
        found.append(Variant(name=name, spec=spec, predicted_us=step.iteration_us, peak_bytes=step.peak_bytes))
    return found


def compare_rank_fsdp2(
    job: str, plan: Plan, variants: Sequence[Variant], rounds: int, steps: int, device: str, timeout_s: float
) -> Taken:
    """Measure all variants on this rank; every rank calls it."""
    import torch

    from planner.jobs.training import KEPT_BATCHES, SEED, build
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
    # Made once, so that all variants train on the same ones, also where a job draws others at each call.
    batches = [built.batch(step) for step in range(KEPT_BATCHES)]
    done = dict.fromkeys(runs, 0)

    def prepare(name: str) -> Callable[[], None]:
        built = runs[name]
        batch = batches[done[name] % KEPT_BATCHES]
        torch.manual_seed(SEED + 1 + done[name] * world.ranks + world.rank)  # of dropout, say
        done[name] += 1

        def step() -> None:
            built.optimizer.zero_grad()
            built.backward(built.loss(built.model, batch))
            built.optimizer.step()

        return step

    step_us = take_turns(world, list(runs), prepare, next(iter(runs.values())).device, rounds, steps)
    differences = weight_differences({name: built.model for name, built in runs.items()})
    world.leave()
    return Taken(step_us=step_us, differences=differences)


def take_turns(
    world: World, names: Sequence[str], prepare: Callable[[str], Callable[[], None]], device: torch.device, rounds: int,
    steps: int, end_s: float = math.inf,
) -> dict[str, list[list[float]]]:  # fmt: skip
    """Measure blocks of steps, another variant first in each round; every rank calls it.

    Args:
        world: the ranks, which begin each step together.
        names: of variants.
        prepare: by name, gives a variant's next step.
        device: to wait for at the end of a step.
        rounds: of one block of each variant.
        steps: of a block, beside those that warm up.
        end_s: no round is begun after this time, by `time.time` on the first rank, but the first one.

    Returns microseconds by variant: rounds of steps.
    """
    from planner.profile.links import timed_us

    step_us: dict[str, list[list[float]]] = {name: [] for name in names}
    for turn in range(rounds):
        if turn and world.gather(time.time() > end_s, "beginning a round")[0]:
            break
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            taken = []
            for _ in range(WARM_UP + steps):
                step = prepare(name)
                world.gather(None, f"beginning a step of {name}")
                taken.append(timed_us(step, device))
            step_us[name].append(taken[WARM_UP:])
    return step_us


def weight_differences(models: Mapping[str, nn.Module]) -> dict[str, float]:
    """Return the largest difference of a weight from the first model's, relative to its parameter's largest weight."""
    import torch

    first, found = next(iter(models.values())), {}
    for name, model in models.items():
        largest = 0.0
        for mine, theirs in zip(model.parameters(), first.parameters(), strict=True):
            both: Any = (mine, theirs)
            one, other = (parameter.full_tensor().detach().double() for parameter in both)
            if not torch.equal(one, other):
                largest = max(largest, float((one - other).abs().max() / other.abs().max().clamp_min(1e-30)))
        found[name] = largest
    return found


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
    rounds, steps = values[PLAN].shape
    verdicts = tuple(
        verdict(ratio_interval(values[PLAN], values[one.name]), "the plan", one.name, steps)
        for one in variants
        if one.name != PLAN
    )
    return Comparison(rows=tuple(rows), verdicts=verdicts, steps=rounds * steps, rounds=rounds)


def comparison_table(found: Comparison) -> Table:
    """For the terminal, fastest first."""
    from planner.report.tables import make_table

    title = f"FSDP2, {found.steps} steps each in {found.rounds} interleaved rounds"
    table = make_table(title, COLUMNS, left=("", "weights"))
    for row in sorted(found.rows, key=lambda row: row.median_us):
        table.add_row(*row.cells())
    return table
