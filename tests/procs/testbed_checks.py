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
from torch.nn.parallel import DistributedDataParallel

from planner import TrainingJob
from planner.profile.node_links import measure_apart
from planner.profile.progress import Silent
from planner.testbed.emulation import emulation_here
from planner.testbed.wiring import shaping
from runtime.comm.world import World
from runtime.torch_compat import all_gather_single, all_to_all_single, reduce_scatter_single

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
    names = [str(number // 2) for number in range(4)]
    found["apart"] = measure_apart(World.join(), names, torch.device("cpu"), 2**18, Silent())
    if rank % 2 == 0:  # one exchange at a time: the ranks of a host share its link
        found["slow"] = all_reduce_s(between)
        subprocess.run(["tc", *shaping(400e6).replace("add", "replace").split()], check=True)
        dist.barrier(group=between)
        found["fast"] = all_reduce_s(between)
    else:
        dist.barrier()
        dist.barrier()
    return found


def sleeping_collectives() -> dict[str, Any]:
    """On sleep:2x1@100mbit: collectives by their results, how long one took, and a step of DDP."""
    rank = dist.get_rank()
    mine = torch.tensor([1.0 + rank, 3.0 + rank])
    summed, sent = mine.clone(), mine.clone()
    dist.all_reduce(summed)
    dist.broadcast(sent, src=1)
    whole, part = torch.zeros(4), torch.zeros(1)
    all_gather_single(whole, mine)
    reduce_scatter_single(part, mine)
    swapped = torch.zeros(2)
    all_to_all_single(swapped, mine)
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, f"rank {rank}")
    if rank == 0:
        dist.send(mine, 1)
    else:
        dist.recv(mine, 0)
    # Before the second rank begins, nothing can end: this rank's own time is all of it.
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(torch.ones(2**18))
    took_s = time.perf_counter() - start
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    model(torch.tensor([[1.0 + rank, 0.0]])).sum().backward()
    gradient = model.module.weight.grad
    return {
        "results": [summed.tolist(), sent.tolist(), whole.tolist(), part.tolist(), mine.tolist(), swapped.tolist()],
        "objects": objects,
        "took_s": took_s,
        "gradient": None if gradient is None else gradient.tolist(),
        "backend": dist.get_backend(),
        "emulation": emulation_here(),
    }


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
