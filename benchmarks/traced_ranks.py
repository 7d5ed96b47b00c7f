"""Compare profiles read from traces of torch.profiler with `planner profile` of the same jobs, on two gloo ranks.

    python -m benchmarks.traced_ranks                    # 5 models, six rounds of each
    python -m benchmarks.traced_ranks encoder --rounds 1

In each round the ranks measure a step as `planner.profile_step` does, trace steps in `no_sync`, and trace steps with
messages; every other round in the opposite order. As in a measured step, all ranks begin a step in `no_sync` together,
and one message of its own follows backward, because it changes what the caches hold. Its traces are imported with the
length of a step without the profiler (`--step-ms`). Ratios are medians over rounds of imported over measured, with
quartiles. *Plan* is the step of the plan made from the trace over that of the plan made from the profile, both as the
profile predicts them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import planner
from benchmarks.overhead import convolutions, encoder, resnet20, wide
from examples import digits
from planner.documents.profile import ComputeProfile, Profile
from planner.ir import Schedule
from planner.jobs.launch import LocalWorld, run_ranks
from planner.model.modes import simulate_schedule
from planner.model.problem import make_problem
from planner.profile.bench import Bench
from planner.profile.compute import MESSAGE_BYTES, Training, combine, measure_compute
from planner.profile.request import REPEATS, Phase, Phases
from planner.profile.step import joined
from planner.traces.of_ranks import read_run
from planner.traces.to_profile import profile_of
from runtime.errors import InputError
from runtime.plan import ModelReference, Plan

RANKS, WARM_UP_STEPS, STEPS = 2, 3, 8
QUIET, SENDING = "no_sync", "with messages"
AGAIN_S = 3.0
"""Seconds that a round may measure a step once more where its repeats differ."""


def perceptron() -> nn.Module:
    """7.4 million parameters in a few large layers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 1600), nn.ReLU(), nn.Linear(1600, 4000), nn.Linear(4000, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet20": (resnet20, 2), "convolutions": (convolutions, 2), "encoder": (encoder, 2), "wide": (wide, 1),
    "perceptron": (perceptron, 4),
}  # fmt: skip
"""Model → its maker, and how many of the demonstration's batches a step takes."""


Round = tuple[ComputeProfile, float]
"""What a round measured, and the milliseconds of a step in `no_sync` without the profiler."""


def measure(name: str, folder: str, rounds: int) -> tuple[Profile, list[Round]]:
    """On one rank: profile, then measure and trace in turn."""
    make, batches = MODELS[name]
    rank = dist.get_rank()
    images, labels = (torch.cat([part] * batches) for part in digits.batch(0, rank))
    torch.manual_seed(0)
    bare, wrapped = make(), DistributedDataParallel(make())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in (bare, wrapped)]
    behind = torch.zeros(min(MESSAGE_BYTES // 4, sum(parameter.numel() for parameter in bare.parameters())))

    def loss(model: nn.Module) -> None:
        functional.cross_entropy(model(images), labels).backward()

    def steps(quiet: bool, count: int) -> float:
        begun_s = time.perf_counter()
        with wrapped.no_sync() if quiet else contextlib.nullcontext():
            for _ in range(count):
                dist.barrier()
                optimizers[1].zero_grad()
                loss(wrapped)
                if quiet:
                    dist.all_reduce(behind)
                optimizers[1].step()
        return (time.perf_counter() - begun_s) / count * 1e3

    def measured() -> ComputeProfile:
        training = Training(bare, lambda _: loss(bare), optimizers[0])
        with joined(None, None) as world:
            phases = Phases([Phase(REPEATS, AGAIN_S)], AGAIN_S, first=False)
            return combine(measure_compute(training, Bench(world, torch.device("cpu")), phases), training.parameters)

    def traced(kind: str, turn: int) -> float:
        """Trace steps; return the milliseconds of the steps before, without the profiler."""
        steps(kind == QUIET, WARM_UP_STEPS)
        plain_ms = steps(kind == QUIET, STEPS)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
            steps(kind == QUIET, STEPS)
        target = Path(folder) / f"{turn} {kind}"
        target.mkdir(exist_ok=True)
        recorded.export_chrome_trace(str(target / f"rank{rank}.json.gz"))
        return plain_ms

    found: list[Round] = []
    whole = planner.profile_step(bare, lambda: loss(bare), optimizers[0])
    for turn in range(rounds):
        kinds = (QUIET, SENDING)[:: 1 if turn % 2 else -1]
        before = measured() if turn % 2 else None
        plain_ms = {kind: traced(kind, turn) for kind in kinds}
        found.append((before or measured(), plain_ms[QUIET]))
    return whole, found


def compare(name: str, rounds: int) -> list[str]:
    """Return the rows of a model."""
    with TemporaryDirectory() as folder:
        found = run_ranks(LocalWorld(ranks=RANKS), measure, name, folder, rounds)
        whole, lines = found[0][0], []
        for kind in (QUIET, SENDING):
            ratios = []
            for turn, each in enumerate(zip(*(rounds for _, rounds in found), strict=True)):
                step_ms = max(plain_ms for _, plain_ms in each) if kind == QUIET else None
                run = read_run([str(Path(folder) / f"{turn} {kind}")])
                try:
                    imported = profile_of(run, ModelReference(name=name), step_ms=step_ms)
                except InputError as error:  # a machine that became slower just then
                    print(f"{name}, {kind}, a round left out: {error}", file=sys.stderr)
                    continue
                ratios.append(_ratios(imported, replace(whole, compute=each[0][0])))
            if not ratios:
                continue
            low, middle, high = np.percentile(ratios, [25, 50, 75], axis=0)
            cells = [f"{m:.3f} ({a:.3f} to {b:.3f})" for a, m, b in zip(low, middle, high, strict=True)]
            step_us = np.median([compute.step_us for compute, _ in found[0][1]])
            lines.append(" | ".join([f"| {name}", kind, f"{step_us / 1e3:.1f}", *cells]) + " |")
    return lines


def _ratios(imported: Profile, measured: Profile) -> tuple[float, float, float, float]:
    """Return forward, backward, last gradient and planned step, imported over measured."""
    ours, theirs = imported.compute, measured.compute
    problem = make_problem(measured)

    def step_us(plan: Plan) -> float:
        ends = [sum(len(bucket.gradients) for bucket in plan.buckets[: at + 1]) for at in range(len(plan.buckets))]
        return simulate_schedule(problem, Schedule.from_boundaries(ends)).iteration_us

    return (
        ours.forward_us / theirs.forward_us,
        ours.backward_us / theirs.backward_us,
        (ours.forward_us + ours.backward_us) / (theirs.forward_us + theirs.backward_us),
        step_us(planner.optimize(imported, measured.cluster)) / step_us(planner.optimize(measured)),
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Traces of gloo ranks beside profiles of the same jobs.")
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=6)
    asked = parser.parse_args()
    print("| model | traced | step ms | forward | backward | last gradient | plan |")
    print("| --- | --- | --: | --: | --: | --: | --: |")
    for name in asked.models or MODELS:
        print("\n".join(compare(name, asked.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
