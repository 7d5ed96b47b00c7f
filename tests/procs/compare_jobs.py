"""Jobs that `planner compare` measures in its tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from planner import TrainingJob


class Mixed(nn.Module):
    """Layers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 1, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        """Shape (batch, 8) to (batch, 1)."""
        return self.second(self.first(inputs).double())


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def _job(model: nn.Module) -> TrainingJob:
    return TrainingJob(
        model=model,
        loss=lambda model, batch: model(batch).square().mean(),
        batch=_batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    )


def job() -> TrainingJob:
    """Three layers with statistics; DDP makes several buckets of them where they are small enough."""
    return _job(nn.Sequential(nn.Linear(8, 20_000), nn.BatchNorm1d(20_000), nn.Linear(20_000, 8)))


def mixed() -> TrainingJob:
    """Gradients of two dtypes."""
    return _job(Mixed())
