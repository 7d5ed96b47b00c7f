"""Jobs for `planner`'s commands: one that keeps a device busy, and a small one of the same kind."""

from __future__ import annotations

import torch

from benchmarks.gpu.models import MODELS
from planner.jobs.job import TrainingJob


def large() -> TrainingJob:
    """ResNet-50, 32 images of 224 × 224."""
    return _job(small=False, batch=32)


def small() -> TrainingJob:
    """The same in thin."""
    return _job(small=True, batch=2)


def _job(*, small: bool, batch: int) -> TrainingJob:
    made = MODELS["ResNet-50"]
    return TrainingJob(
        model=made.make(small),
        loss=lambda model, given: model(*given),
        batch=lambda step, rank: made.batch(small, batch, 1000 * step + rank),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    )
