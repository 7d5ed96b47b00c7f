"""Profiles read from traces of torch.profiler beside `planner.profile_step` of the same jobs, on two gloo ranks.

    python -m benchmarks.traced_ranks                    # 5 models, three rounds of each
    python -m benchmarks.traced_ranks encoder --rounds 1

In each round the ranks profile a step, trace steps in `no_sync`, and trace steps with messages. The first traces are
imported with the length of a step without the profiler (`--step-ms`). Ratios are medians over rounds of imported over
profiled. *Plan* is the step of the plan made from the trace over that of the plan made from the profile, both as the
profile predicts them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import planner
from benchmarks.overhead import convolutions, encoder, resnet20, wide
from examples import digits
from planner.documents.profile import Profile
from planner.ir import Schedule
from planner.jobs.launch import LocalWorld, run_ranks
from planner.model.modes import simulate_schedule
from planner.model.problem import make_problem
from planner.traces.of_ranks import read_run
from planner.traces.to_profile import profile_of
from runtime.plan import ModelReference, Plan

RANKS, WARM_UP_STEPS, STEPS = 2, 3, 8
QUIET, SENDING = "no_sync", "with messages"


def perceptron() -> nn.Module:
    """7.4 million parameters in a few large layers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 1600), nn.ReLU(), nn.Linear(1600, 4000), nn.Linear(4000, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet20": (resnet20, 2), "convolutions": (convolutions, 2), "encoder": (encoder, 2), "wide": (wide, 1),
    "perceptron": (perceptron, 4),
}  # fmt: skip
"""Model → its maker, and how many of the demonstration's batches a step takes."""


def measure(name: str, folder: str, rounds: int) -> tuple[list[Profile], list[float]]:
    """On one rank: profile and trace in turn; return the profiles, and milliseconds of steps without the profiler."""
    make, batches = MODELS[name]
    rank, profiles, plain_ms = dist.get_rank(), [], []
    images, labels = (torch.cat([part] * batches) for part in digits.batch(0, rank))
    torch.manual_seed(0)
    bare, wrapped = make(), DistributedDataParallel(make())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in (bare, wrapped)]

    def loss(model: nn.Module) -> None:
        functional.cross_entropy(model(images), labels).backward()

    def steps(quiet: bool, count: int) -> float:
        begun_s = time.perf_counter()
        with wrapped.no_sync() if quiet else contextlib.nullcontext():
            for _ in range(count):
                optimizers[1].zero_grad()
                loss(wrapped)
                optimizers[1].step()
        return (time.perf_counter() - begun_s) / count * 1e3

    for turn in range(rounds):
        profiles.append(planner.profile_step(bare, lambda: loss(bare), optimizers[0]))
        for kind in (QUIET, SENDING):
            steps(kind == QUIET, WARM_UP_STEPS)
            dist.barrier()
            if kind == QUIET:
                plain_ms.append(steps(True, STEPS))
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
                steps(kind == QUIET, STEPS)
            target = Path(folder) / f"{turn} {kind}"
            target.mkdir(exist_ok=True)
            recorded.export_chrome_trace(str(target / f"rank{rank}.json.gz"))
    return profiles, plain_ms


def compare(name: str, rounds: int) -> list[str]:
    """Return the rows of a model."""
    with TemporaryDirectory() as folder:
        found = run_ranks(LocalWorld(ranks=RANKS), measure, name, folder, rounds)
        profiles, plain_ms = found[0][0], [max(times) for times in zip(*(one[1] for one in found), strict=True)]
        lines = []
        for kind in (QUIET, SENDING):
            ratios = []
            for turn, measured in enumerate(profiles):
                run = read_run([str(Path(folder) / f"{turn} {kind}")])
                step_ms = plain_ms[turn] if kind == QUIET else None
                ratios.append(_ratios(profile_of(run, ModelReference(name=name), step_ms=step_ms), measured))
            medians = (f"{statistics.median(column):.3f}" for column in zip(*ratios, strict=True))
            step_us = statistics.median(one.compute.step_us for one in profiles)
            lines.append(" | ".join([f"| {name}", kind, f"{step_us / 1e3:.1f}", *medians]) + " |")
    return lines


def _ratios(imported: Profile, measured: Profile) -> tuple[float, float, float, float]:
    """Return forward, backward, last gradient and planned step, imported over profiled."""
    ours, theirs = imported.compute, measured.compute
    problem = make_problem(measured)

    def step_us(plan: Plan) -> float:
        ends = [sum(len(bucket.gradients) for bucket in plan.buckets[: at + 1]) for at in range(len(plan.buckets))]
        return simulate_schedule(problem, Schedule.from_boundaries(ends)).iteration_us

    planned = planner.optimize(imported, measured.cluster)
    return (
        ours.forward_us / theirs.forward_us,
        ours.backward_us / theirs.backward_us,
        (ours.forward_us + ours.backward_us) / (theirs.forward_us + theirs.backward_us),
        step_us(planned) / step_us(planner.optimize(measured)),
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Traces of gloo ranks beside profiles of the same jobs.")
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print("| model | traced | step ms | forward | backward | last gradient | plan |")
    print("| --- | --- | --: | --: | --: | --: | --: |")
    for name in asked.models or MODELS:
        print("\n".join(compare(name, asked.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
