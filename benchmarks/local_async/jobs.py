"""What is trained: a ResNet-20 and a SqueezeNet-style network on digits, the same by every way to train."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.digits import ResNet20, digits, loss
from planner import TrainingJob
from planner.jobs.lr_schedule import LrSchedule
from planner.jobs.training import make_scheduler
from runtime.local_async import LocalJob

RANKS = 2
BATCH_SIZE = 16
"""Of each updater, and of each rank of minibatch SGD."""
DEADLINE_S = 300.0
"""Eight updaters on two cores may take long for their first minibatch."""
RATES = {"resnet20": 0.05, "squeezenet": 0.05}
"""Learning rates by model, the same for every way to train."""
COSINE = LrSchedule(cosine=True)


class Fire(nn.Module):
    """1×1 convolutions to few channels, then 1×1 and 3×3 ones side by side; normalized, which the original is not."""

    def __init__(self, before: int, squeezed: int, each: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(before, squeezed, 1, bias=False)
        self.narrow = nn.Conv2d(squeezed, each, 1, bias=False)
        self.wide = nn.Conv2d(squeezed, each, 3, padding=1, bias=False)
        self.norm_squeezed, self.norm = nn.BatchNorm2d(squeezed), nn.BatchNorm2d(2 * each)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, before, h, w) → (batch, 2 · each, h, w)."""
        few = functional.relu(self.norm_squeezed(self.squeeze(x)))
        return functional.relu(self.norm(torch.cat([self.narrow(few), self.wide(few)], dim=1)))


class SqueezeNet(nn.Module):
    """After SqueezeNet (Iandola et al., 2016): fire modules, a convolution to classes, and the mean over places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.fires = nn.Sequential(
            *(Fire(32, 8, 32), Fire(64, 8, 32), nn.MaxPool2d(2)),
            *(Fire(64, 16, 64), Fire(128, 16, 64), nn.MaxPool2d(2)),
            *(Fire(128, 24, 96), Fire(192, 32, 128)),
        )
        self.classes = nn.Conv2d(256, 10, 1)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 16, 16) → (batch, 10)."""
        scores: Tensor = self.classes(self.fires(self.stem(images)))
        return scores.mean(dim=(2, 3))


MODELS: dict[str, type[nn.Module]] = {"resnet20": ResNet20, "squeezenet": SqueezeNet}


def batch(step: int, rank: int, seed: int = 0, ranks: int = RANKS) -> tuple[Tensor, Tensor]:
    """Ranks share the digits, which are shuffled anew for each pass; a minibatch follows from its number and rank."""
    data = digits()
    count = len(data.train_labels)
    in_pass = count // (ranks * BATCH_SIZE)
    generator = torch.Generator().manual_seed(1000 * seed + step // in_pass)
    first = ((step % in_pass) * ranks + rank % ranks) * BATCH_SIZE
    chosen = torch.randperm(count, generator=generator)[first : first + BATCH_SIZE]
    return data.train_images[chosen], data.train_labels[chosen]


def _optimizer(rate: float, parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def _job(name: str) -> TrainingJob:
    digits()  # read before anybody begins to count
    return TrainingJob(model=MODELS[name](), loss=loss, batch=batch, optimizer=partial(_optimizer, RATES[name]))


def resnet20() -> TrainingJob:
    """To be profiled."""
    return _job("resnet20")


def squeezenet() -> TrainingJob:
    """To be profiled."""
    return _job("squeezenet")


def learner(name: str, seed: int, steps: int, ranks: int = RANKS, rates: LrSchedule = COSINE) -> LocalJob:
    """To be trained to the end, with a schedule over the minibatches of a rank."""
    digits()
    torch.manual_seed(seed)
    return LocalJob(
        model=MODELS[name](),
        loss=loss,
        batch=partial(batch, seed=seed, ranks=ranks),
        optimizer=partial(_optimizer, RATES[name]),
        schedule=partial(make_scheduler, rates, steps),
    )


def spec(name: str) -> str:
    """How commands name the job."""
    return f"benchmarks.local_async.jobs:{name}"
