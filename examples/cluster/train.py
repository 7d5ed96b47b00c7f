"""A training script for many machines: plans in the run, saves, and continues on as many ranks as there are.

`torchrun.sh`, `slurm.sh` and `pytorchjob.yaml` start it. With DDP it would differ in one line.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import planner


def main() -> None:
    """Train; rank 0 saves and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--checkpoint", type=Path, help="a file that all ranks see: saved here, continued from here")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)]
    model = nn.Sequential(*layers, nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = planner.attach(model, optimizer)  # in place of DistributedDataParallel(model)

    done = 0
    if arguments.checkpoint is not None and arguments.checkpoint.exists():
        state = torch.load(arguments.checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    loss = torch.zeros(())
    for step in range(done, arguments.steps):
        generator = torch.Generator().manual_seed(1_000_000 * dist.get_rank() + step)
        images = torch.randn(64, 256, generator=generator).to(device)
        labels = torch.randint(10, (64,), generator=generator).to(device)
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        saves = step + 1 == arguments.steps or (step + 1) % arguments.save_every == 0
        if arguments.checkpoint is not None and dist.get_rank() == 0 and saves:
            partial = arguments.checkpoint.with_suffix(".part")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": step + 1}, partial)
            partial.replace(arguments.checkpoint)  # whole or not at all
    session.explain(None)
    if dist.get_rank() == 0:
        print(f"steps {done} to {arguments.steps} on {dist.get_world_size()} ranks: loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
