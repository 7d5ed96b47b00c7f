"""Checks and times the runtime on this machine's device: the script to run on a real GPU.

    python -m benchmarks.device_check --device cuda

Trains a ResNet-20 with DDP and with a plan of DDP's own buckets, taking turns, on two ranks (over NCCL where there are
two GPUs, else over gloo with both ranks on one device). Prints whether the weights are equal bit for bit, both step
times with their ratio, the report of the session, and what it ran on. Exit code 1 if the weights differ.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
from datetime import UTC, datetime

import torch
import torch.distributed as dist

import runtime
from planner.jobs.demo_job import batch
from planner.jobs.launch import LocalWorld, run_ranks
from planner.jobs.training import RankRun, Trainer, build, weights_sha256
from runtime.checks.plan import trainable_parameters
from runtime.plan import ModelReference, Plan, PlanBucket, PlanWorld

JOB = "planner.jobs.demo_job:job"
RANKS = 2
BLOCK_STEPS = 10
FIRST_BUCKET_BYTES = 1024 * 1024
"""DDP's first bucket; all else of so small a model is its second one."""


def ddp_plan(model: torch.nn.Module, ranks: int) -> Plan:
    """The buckets that DDP makes of a model of less than 25 MiB."""
    first: list[str] = []
    rest: list[str] = []
    size_bytes = 0
    for name, parameter in reversed(trainable_parameters(model).items()):
        (first if size_bytes < FIRST_BUCKET_BYTES else rest).append(name)
        size_bytes += parameter.numel() * parameter.element_size()
    return Plan(
        model=ModelReference(name="resnet20"),
        world=PlanWorld(ranks=ranks),
        accuracy="exact",
        buckets=tuple(PlanBucket(gradients=tuple(names)) for names in (first, rest) if names),
    )


def compare(device: str, blocks: int) -> tuple[RankRun, RankRun]:
    """On one rank: (DDP, plan)."""
    built = build(JOB, device)
    trainers = Trainer(build(JOB, device), None), Trainer(built, ddp_plan(built.model, dist.get_world_size()))
    for block in range(blocks):
        for trainer in trainers:
            for step in range(block * BLOCK_STEPS, (block + 1) * BLOCK_STEPS):
                trainer.step(tuple(t.to(built.device) for t in batch(step, dist.get_rank())))
    return trainers[0].close(), trainers[1].close()


def compare_sync_batchnorm(device: str) -> bool:
    """On one rank: whether DDP and a plan give equal parameters and statistics after some steps with SyncBatchNorm."""
    found = []
    for planned in (False, True):
        built = build(JOB, device)
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(built.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        session = runtime.attach(model, optimizer, ddp_plan(model, dist.get_world_size())) if planned else None
        forward = model if planned else torch.nn.parallel.DistributedDataParallel(model)
        for step in range(BLOCK_STEPS):
            optimizer.zero_grad()
            built.loss(forward, tuple(t.to(built.device) for t in batch(step, dist.get_rank()))).backward()
            optimizer.step()
        if session is not None:
            session.detach()
        found.append(weights_sha256(model))
    return found[0] == found[1]


def main() -> int:
    """Runs the comparison and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, default=20, help=f"turns of {BLOCK_STEPS} steps each")
    arguments = parser.parse_args()
    backend = "nccl" if arguments.device == "cuda" and torch.cuda.device_count() >= RANKS else "gloo"
    world = LocalWorld(ranks=RANKS, device=arguments.device, backend=backend)
    results = run_ranks(world, compare, arguments.device, arguments.blocks)
    ddp, planned = results[0]
    equal = len({run.weights_sha256 for pair in results for run in pair}) == 1
    ddp_us, planned_us = (statistics.median(run.step_us[BLOCK_STEPS:]) for run in (ddp, planned))
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or platform.machine()
    print(f"{datetime.now(UTC):%Y-%m-%d}, {where}, torch {torch.__version__}, {RANKS} ranks over {backend}")
    print(f"weights equal bit for bit: {'yes' if equal else 'NO'}")
    if arguments.device == "cuda":
        synchronized = all(run_ranks(world, compare_sync_batchnorm, arguments.device))
        print(f"weights equal bit for bit with SyncBatchNorm: {'yes' if synchronized else 'NO'}")
        equal = equal and synchronized
    print(f"DDP {ddp_us / 1e3:.2f} ms, plan {planned_us / 1e3:.2f} ms per step, ratio {planned_us / ddp_us:.3f}")
    print(planned.report)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
