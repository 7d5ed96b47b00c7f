"""VGG-16 (Simonyan and Zisserman, 2015, configuration D): 138 million parameters, most of them in one layer.

planner profile examples/vgg16.py:job
planner optimize profile.json
planner run examples/vgg16.py:job --plan plan.json --steps 2
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner import TrainingJob

BATCH_SIZE, PIXELS, CLASSES = 2, 224, 1000
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of the convolutions between one pooling and the next."""


class Vgg16(nn.Module):
    """Images (batch, 3, 224, 224) to scores (batch, 1000); 138,357,544 parameters."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for stage in STAGES:
            for channels in stage:
                layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(inplace=True)]
                before = channels
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        side = PIXELS // 2 ** len(STAGES)
        self.classifier = nn.Sequential(
            *(nn.Linear(before * side * side, 4096), nn.ReLU(inplace=True), nn.Dropout()),
            *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout()),
            nn.Linear(4096, CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes."""
        scores: Tensor = self.classifier(self.features(images).flatten(1))
        return scores


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy."""
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Noise with labels: the time of a step does not depend on what is in the images."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    images = torch.randn(BATCH_SIZE, 3, PIXELS, PIXELS, generator=generator)
    return images, torch.randint(CLASSES, (BATCH_SIZE,), generator=generator)


def job() -> TrainingJob:
    """VGG-16 with momentum SGD."""
    return TrainingJob(
        model=Vgg16(),
        loss=loss,
        batch=batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    )
