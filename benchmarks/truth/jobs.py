"""The models whose steps are predicted: few and many gradients, small and large, with and without a heavy head.

Data are random: only time counts here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.learning import CharLstm
from examples.charlm import CharLM
from examples.digits import ResNet20
from planner import TrainingJob


class Residual(nn.Module):
    """Two convolutions and a way past them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)),
            *(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)),
        )
        same = stride == 1 and before == after
        self.past: nn.Module = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, images: Tensor) -> Tensor:
        """(batch, before, height, width) → (batch, after, …)."""
        return functional.relu(self.body(images) + self.past(images))


def resnet18() -> nn.Module:
    """ResNet-18 (He et al., 2016) with a stem for small images: 11.2 million parameters, 62 gradients."""
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [Residual(before, after, 2 if before != after else 1) for before, after in pairwise(widths)]
    stem = (nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def vgg() -> nn.Module:
    """Convolutions with few parameters before layers with many: 5.6 million, 93 % of them in one matrix."""
    layers: list[nn.Module] = []
    before = 3
    for channels in (16, 32, 64):
        layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        before = channels
    head = (nn.Flatten(), nn.Linear(64 * 4 * 4, 5120), nn.ReLU(inplace=True), nn.Linear(5120, 64), nn.Linear(64, 10))
    return nn.Sequential(*layers, *head)


def _job(model: nn.Module, batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]) -> TrainingJob:
    def make(step: int, rank: int) -> tuple[Tensor, Tensor]:
        return batch(torch.Generator().manual_seed(1000 * step + rank))

    def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = pair
        return functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())

    return TrainingJob(
        model=model, loss=loss, batch=make, optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)
    )


def _images(count: int, pixels: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    return lambda g: (
        torch.randn(count, 3, pixels, pixels, generator=g),
        torch.randint(10, (count,), generator=g),
    )


def _words(count: int, length: int, known: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        words = torch.randint(known, (count, length + 1), generator=generator)
        return words[:, :-1], words[:, 1:]

    return batch


def resnet20_job() -> TrainingJob:
    """0.27 million parameters in 65 gradients, 32 × 32 pixels in one channel."""
    make = _images(16, 32)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images, labels = make(generator)
        return images[:, :1], labels

    return _job(ResNet20(), batch)


def resnet18_job() -> TrainingJob:
    """11.2 million parameters, batches of 16 with 16 × 16 pixels."""
    return _job(resnet18(), _images(16, 16))


def vgg_job() -> TrainingJob:
    """A heavy head, batches of 32 with 32 × 32 pixels."""
    return _job(vgg(), _images(32, 32))


def lstm_job() -> TrainingJob:
    """Sequences of 24 words, 8 at a time."""
    return _job(CharLstm(2000, 256), _words(8, 24, 2000))


def gpt_job() -> TrainingJob:
    """The small GPT of the examples on random characters."""
    return _job(CharLM(96), _words(8, 64, 96))
