"""What every rank does for `planner compare --parallel fsdp2`: models wrapped each in its way train in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from planner.comparison.measure import Measured, Record, Runner
from planner.comparison.wrappings import Wrapping
from planner.jobs.training import KEPT_BATCHES, SEED, BuiltJob, build
from planner.profile.links import timed_us
from planner.profile.progress import Progress
from runtime.comm.world import World
from runtime.fully_sharded.hosts import HostCollectives, overlap_on_hosts
from runtime.fully_sharded.wrap import fully_shard
from runtime.plan import FullyShardPlan, Plan

WARM_UP_STEPS = 1
"""Steps at the begin of each block that are not measured."""


class WrappingRunner(Runner[Wrapping]):
    """Models that train on from block to block, each with weights of its own."""

    def __init__(
        self, world: World, models: Mapping[str, nn.Module], step: Callable[[str], Callable[[], None]]
    ) -> None:
        """Measure the models, by the names of their wrappings; `step` prepares the next step of one, untimed."""
        super().__init__(world)
        self._models, self._step = models, step
        self._device = next(next(iter(models.values())).parameters()).device

    def block(self, record: Record[Wrapping], steps: int) -> None:
        """See `Runner`."""
        taken = []
        for _ in range(WARM_UP_STEPS + steps):
            step = self._step(record.variant.name)
            self.world.gather(None, f"beginning a step of {record.variant.name}")
            taken.append(timed_us(step, self._device))
        record.step_us.append(taken[WARM_UP_STEPS:])

    def measure(
        self, wrappings: Sequence[Wrapping], rounds: int, steps: int, progress: Progress, end_s: float = math.inf
    ) -> Measured:
        """Interleave blocks of all wrappings, then compare their weights; arguments as of `interleave`."""
        records = [Record(wrapping) for wrapping in wrappings]
        self.interleave(records, rounds, steps, progress, "measuring", end_s)
        first = self._models[records[0].variant.name]
        for record in records:
            record.difference = weight_difference(self._models[record.variant.name], first)
        return Measured(records)


def wrap(model: nn.Module, plan: Plan, spec: FullyShardPlan, timeout_s: float) -> HostCollectives | None:
    """Wrap a model by FSDP2 as a wrapping says, in place of the plan's own.

    Returns what overlaps messages and computation on hosts, which stock FSDP2 does not; None on accelerators, and for
    HSDP, whose all-reduces block.
    """
    fully_shard(model, replace(plan, fsdp2=spec), timeout_s=timeout_s)
    on_host = next(model.parameters()).device.type == "cpu"
    return overlap_on_hosts(model, spec, timeout_s) if on_host and spec.shard_ranks is None else None


def compare_rank_wrapped(
    spec: str, plan: Plan, wrappings: Sequence[Wrapping], rounds: int, steps: int, device: str, show_progress: bool,
    timeout_s: float,
) -> Measured:  # fmt: skip
    """Measure a job on this rank; every rank calls it. Arguments as of `planner.comparison.measure.compare_rank`."""
    world = World.join(None, timeout_s)
    runs: dict[str, BuiltJob] = {}
    for wrapping in wrappings:
        built = build(spec, device)
        wrap(built.model, plan, wrapping.spec, timeout_s)
        built.optimizer = built.job.optimizer(p for p in built.model.parameters() if p.requires_grad)
        runs[wrapping.name] = built
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

    runner = WrappingRunner(world, {name: built.model for name, built in runs.items()}, prepare)
    measured = runner.measure(wrappings, rounds, steps, Progress(show_progress and world.rank == 0))
    world.leave()
    return measured


def weight_difference(model: nn.Module, first: nn.Module) -> float:
    """Return the largest difference of a weight between two models, relative to its parameter's largest weight."""
    largest = 0.0
    for mine, theirs in zip(model.parameters(), first.parameters(), strict=True):
        both: Any = (mine, theirs)
        one, other = (parameter.full_tensor().detach().double() for parameter in both)
        if not torch.equal(one, other):
            largest = max(largest, float((one - other).abs().max() / other.abs().max().clamp_min(1e-30)))
    return largest
