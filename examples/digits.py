"""A ResNet-20 on handwritten digits: what a job looks like.

planner profile examples/digits.py:job
planner optimize profile.json
planner run examples/digits.py:job --plan plan.json
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner import TrainingJob
from planner.jobs.demo_job import ResNet20, digits

BATCH_SIZE = 16
"""Digits per rank and step."""


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Images and labels, drawn at random; the same step and rank always draw the same ones."""
    data = digits()
    generator = torch.Generator().manual_seed(1000 * step + rank)
    chosen = torch.randint(len(data.train_labels), (BATCH_SIZE,), generator=generator)
    return data.train_images[chosen], data.train_labels[chosen]


def loss(model: nn.Module, images_and_labels: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy, a scalar."""
    images, labels = images_and_labels
    return functional.cross_entropy(model(images), labels)


def job() -> TrainingJob:
    """All that is needed to profile and train: no loop, no process group, no device."""
    return TrainingJob(
        model=ResNet20(),
        loss=loss,
        batch=batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    )
