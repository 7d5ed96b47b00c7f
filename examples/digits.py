"""A ResNet-20 (He et al., 2016, CIFAR form) on scikit-learn's handwritten digits: what a job looks like.

planner profile examples/digits.py:job
planner optimize profile.json
planner run examples/digits.py:job --plan plan.json
"""

from __future__ import annotations

import os
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from planner import TrainingJob

BATCH_SIZE = 16
TEST_SHARE = 5
"""Every fifth digit is kept for testing."""


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and channels_in == channels
            else nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels_in, h, w) → (batch, channels, h / stride, w / stride)."""
        out = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class ResNet20(nn.Module):
    """Three stages of three blocks; 272,186 parameters for one channel and ten classes."""

    def __init__(self, channels_in: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        widths = [16] * 4 + [32] * 3 + [64] * 3
        self.blocks = nn.Sequential(*(Block(a, b, stride=b // a) for a, b in pairwise(widths)))
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, channels_in, h, w) → class scores (batch, classes)."""
        out = self.blocks(functional.relu(self.norm(self.conv(x))))
        scores: Tensor = self.fc(out.mean(dim=(2, 3)))
        return scores


class Digits(NamedTuple):
    """Images (count, 1, 16, 16) in 0..1 and labels (count,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@cache
def digits() -> Digits:
    """Return 1,797 digits of 8×8 pixels, doubled in size."""
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    images = functional.interpolate(images, scale_factor=2, mode="bilinear")
    labels = torch.tensor(raw.target, dtype=torch.long)
    test = torch.arange(len(labels)) % TEST_SHARE == 0
    return Digits(images[~test], labels[~test], images[test], labels[test])


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return this rank's images and labels: each step takes the next part of one fixed shuffle, then begins again."""
    data = digits()
    count = len(data.train_labels)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    # Local updaters have no process group: there the environment says how many ranks were launched.
    joined = torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1"))
    first = (step * ranks + rank) * BATCH_SIZE
    chosen = order[torch.arange(first, first + BATCH_SIZE) % count]
    return data.train_images[chosen], data.train_labels[chosen]


def loss(model: nn.Module, images_and_labels: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy, a scalar."""
    images, labels = images_and_labels
    return functional.cross_entropy(model(images), labels)


@torch.no_grad()
def test_accuracy(model: nn.Module) -> float:
    """Return the share of the test digits that the model gets right."""
    data = digits()
    model.eval()
    device = next(model.parameters()).device
    right = model(data.test_images.to(device)).argmax(1).cpu() == data.test_labels
    model.train()
    return float(right.float().mean())


def job() -> TrainingJob:
    """Return all that is needed to profile and train: no loop, no process group, no device."""
    return TrainingJob(
        model=ResNet20(),
        loss=loss,
        batch=batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        metric=test_accuracy,
    )
