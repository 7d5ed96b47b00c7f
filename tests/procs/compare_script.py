"""A script as people write them, which measures its own step: dropout, momentum, accumulation, a scheduler.

Run by `planner compare` in the tests, and called by their ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import planner

NAMES = ("3.bias", "3.weight", "0.bias", "0.weight")
"""Gradients in readiness order."""


def plan_document(ranks: int = 2, **changes: Any) -> dict[str, Any]:
    """A plan for `Training`, of two buckets."""
    whole = {"collective": "all_reduce", "algorithm": "library", "compressor": {"name": "none"}}
    return {
        "schema": "planner.plan/1", "model": {"name": "script"}, "world": {"ranks": ranks}, "accuracy": "exact",
        "buckets": [{"gradients": list(NAMES[:2]), **whole}, {"gradients": list(NAMES[2:]), **whole}],
    } | changes  # fmt: skip


class Training:
    """A model, what trains it, and its batches."""

    def __init__(self, plan: planner.Plan) -> None:
        rank = dist.get_rank()
        torch.manual_seed(rank)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.session = planner.attach(self.model, self.optimizer, plan)
        self._batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 + rank))

    def step(self, model: nn.Module) -> Tensor:
        """One step in two micro-batches."""
        self.optimizer.zero_grad()
        with self.session.no_sync():
            model(self._batch[:2]).square().mean().backward()
        loss: Tensor = model(self._batch[2:]).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss

    def compare(self, step: Callable[..., object] | None = None, **options: Any) -> planner.Comparison:
        """Shortly."""
        return planner.compare(self.session, step or self.step, steps=2, also=[self.scheduler], **options)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    training = Training(planner.load_plan(sys.argv[1]))
    if sys.argv[2:] != ["--train-only"]:
        print(training.compare())
    training.step(training.model)
    dist.destroy_process_group()
