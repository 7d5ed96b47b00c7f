"""A training script by `planner.attach` alone, whose plan makes it post-local SGD; it ends, and continues later."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import planner

WARMUP, EVERY = 4, 3
PLAN = {
    "schema": "planner.plan/1", "model": {"name": "post-local SGD"}, "world": {"ranks": 2}, "accuracy": "relaxed",
    "buckets": [{"gradients": ["2.bias", "2.weight"]}, {"gradients": ["0.bias", "0.weight"]}],
    "outer": {"every": EVERY, "optimizer": {"name": "nesterov", "lr": 1.0, "momentum": 0.0}, "warmup_steps": WARMUP},
}  # fmt: skip


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """Of one rank's batch."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1000 * rank + step), dtype=torch.float64)
    loss: Tensor = (model(x) - x[:, :2].sin()).square().mean()
    return loss


def train(folder: Path, steps: int) -> None:
    """Train from where the last call ended, in other processes, up to this number of steps."""
    (folder / f"plan-{dist.get_rank()}.json").write_text(json.dumps(PLAN))
    model, optimizer = made()
    session = planner.attach(model, optimizer, folder / f"plan-{dist.get_rank()}.json")
    checkpoint = folder / f"{dist.get_rank()}.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        session.load_state_dict(saved["session"])
    for step in range(session.step, steps):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "session": session.state_dict()}
    torch.save(states, checkpoint)
    session.detach()
