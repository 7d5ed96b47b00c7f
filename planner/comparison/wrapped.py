"""A rank of `planner compare --parallel fsdp2`: models with different wrappings train in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from planner.comparison.measure import Measured, Record, Runner
from planner.comparison.variants import Rounds
from planner.comparison.wrappings import Wrapping
from planner.jobs.training import KEPT_BATCHES, SEED, BuiltJob, build, make_optimizer
from planner.profile.bench import Bench, Progress, Run
from planner.profile.step import joined
from runtime.fully_sharded.hosts import HostCollectives, overlap_on_hosts
from runtime.fully_sharded.wrap import fully_shard

WARM_UP_STEPS = 1
"""Number of steps at the start of each block that are not measured."""


class WrappingRunner(Runner[Wrapping]):
    """Models that train on from block to block, each with weights of its own."""

    def __init__(self, bench: Bench, models: Mapping[str, nn.Module], step: Callable[[str], Run]) -> None:
        """Measure the models, by the names of their wrappings; `step` prepares the next step of one, untimed."""
        super().__init__(bench)
        self._models, self._step = models, step

    def block(self, record: Record[Wrapping], steps: int) -> None:
        """Make this number of measured steps of one model; every rank calls it."""
        taken = []
        for _ in range(WARM_UP_STEPS + steps):
            step = self._step(record.variant.name)
            self.world.gather(None, f"beginning a step of {record.variant.name}")
            taken.append(self.bench.timed_us(step))
        record.step_us.append(taken[WARM_UP_STEPS:])

    def measure(self, wrappings: Sequence[Wrapping], rounds: Rounds) -> Measured:
        """Interleave blocks of all wrappings, then compare their weights."""
        records = [Record(wrapping) for wrapping in wrappings]
        self.interleave(records, rounds)
        first = self._models[records[0].variant.name]
        for record in records:
            record.difference = weight_difference(self._models[record.variant.name], first)
        return Measured(records)


def wrap(model: nn.Module, wrapping: Wrapping, timeout_s: float) -> HostCollectives | None:
    """Wrap a model by FSDP2.

    Returns:
        What overlaps messages and computation on hosts, which stock FSDP2 does not; None on accelerators, and for HSDP,
        whose all-reduces block.
    """
    fully_shard(model, wrapping.plan, timeout_s=timeout_s)
    on_host = next(model.parameters()).device.type == "cpu"
    alone = wrapping.spec.shard_ranks is None
    return overlap_on_hosts(model, wrapping.spec, timeout_s) if on_host and alone else None


def compare_rank_wrapped(
    spec: str, wrappings: Sequence[Wrapping], rounds: Rounds, device: str, show_progress: bool, timeout_s: float
) -> Measured:
    """Measure a job on this rank; every rank calls it. Arguments as of `planner.comparison.measure.compare_rank`."""
    with joined(None, timeout_s) as world:
        runs: dict[str, BuiltJob] = {}
        for wrapping in wrappings:
            built = build(spec, device)
            wrap(built.model, wrapping, timeout_s)
            built.optimizer = make_optimizer(built.job, spec)
            runs[wrapping.name] = built
        # Made once, so that all variants train on the same ones, even if a job draws others at each call.
        batches = [built.batch(step) for step in range(KEPT_BATCHES)]
        done = dict.fromkeys(runs, 0)

        def prepare(name: str) -> Run:
            batch = batches[done[name] % KEPT_BATCHES]
            torch.manual_seed(SEED + 1 + done[name] * world.ranks + world.rank)  # of dropout, say
            done[name] += 1
            return lambda: runs[name].train(batch)

        bench = Bench(world, built.device, Progress(show_progress and world.rank == 0))
        runner = WrappingRunner(bench, {name: built.model for name, built in runs.items()}, prepare)
        return runner.measure(wrappings, rounds)


def weight_difference(model: nn.Module, first: nn.Module) -> float:
    """Return the largest difference of a weight between two models, relative to its parameter's largest weight."""
    largest = 0.0
    for mine, theirs in zip(model.parameters(), first.parameters(), strict=True):
        both: Any = (mine, theirs)
        one, other = (parameter.full_tensor().detach().double() for parameter in both)
        if not torch.equal(one, other):
            largest = max(largest, float((one - other).abs().max() / other.abs().max().clamp_min(1e-30)))
    return largest
