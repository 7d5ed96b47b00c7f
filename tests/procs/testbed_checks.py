"""What ranks do on an emulated cluster; see test_testbed.py."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from planner import TrainingJob
from planner.profile.bench import Bench
from planner.profile.links import Limits, measure_apart, parts_of
from planner.testbed.hosts import emulation_here
from planner.testbed.wiring import shaping
from runtime.comm.world import World

MESSAGE_BYTES = 4 * 2**20
REPEATS = 3


def sent_bytes() -> dict[str, int]:
    """What each interface of this process's network namespace has sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return {name.strip(): int(columns.split()[8]) for name, _, columns in (line.partition(":") for line in lines)}


def all_reduce_s(group: dist.ProcessGroup) -> tuple[float, dict[str, int]]:
    """(least of a few times of an all-reduce of 4 MiB, bytes that interfaces sent in all of them)."""
    tensor = torch.ones(MESSAGE_BYTES // 4)
    before, times_s = sent_bytes(), []
    for _ in range(REPEATS):
        dist.barrier(group=group)
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        times_s.append(time.perf_counter() - start)
    dist.barrier()
    after = sent_bytes()
    return min(times_s), {name: after[name] - before[name] for name in after}


def ranks_of_a_host_and_of_two() -> dict[str, Any]:
    """On 2x2@100mbit: where this rank is, and all-reduces inside its host and between hosts, at two rates."""
    rank = dist.get_rank()
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    found: dict[str, Any] = {
        "sum": float(total),
        "namespace": os.readlink("/proc/self/ns/net"),
        "environment": [os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE")],
        "emulation": emulation_here(),
        "inside": all_reduce_s(inside),
    }
    parts, names = parts_of(["0", "0", "1", "1"]), ("all_reduce", "all_gather", "reduce_scatter")
    assert parts is not None
    bench, by_kind = Bench(World.join(), torch.device("cpu")), {"intra": names, "inter": names}
    found["apart"] = measure_apart(bench, parts, 2**18, by_kind, Limits(4.0))
    if rank % 2 == 0:  # one exchange at a time: the ranks of a host share its link
        found["slow"] = all_reduce_s(between)
        subprocess.run(["tc", *shaping(400e6).replace("add", "replace").split()], check=True)
        dist.barrier(group=between)
        found["fast"] = all_reduce_s(between)
    else:
        dist.barrier()
        dist.barrier()
    return found


def stop_a_host() -> None:
    """One rank is killed, the other waits for it."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()


def job() -> TrainingJob:
    """A small model that says when its ranks train."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))

    def batch(step: int, rank: int) -> torch.Tensor:
        if step == 2 and "TESTBED_MOMENT" in os.environ:
            Path(os.environ["TESTBED_MOMENT"]).write_text(os.readlink("/proc/self/ns/net"))
            time.sleep(float(os.environ["TESTBED_HOLD_S"]))
        return torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + rank))

    return TrainingJob(
        model=model,
        loss=lambda model, batch: model(batch).square().mean(),
        batch=batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
