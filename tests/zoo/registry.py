"""The registry of the zoo, and the batches and optimizers that its jobs share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner import TrainingJob

Factory = Callable[[], TrainingJob]

VOCABULARY, LENGTH, SEQUENCES = 61, 12, 2
"""Of batches of text."""
PIXELS, IMAGES, CLASSES = 16, 2, 5
"""Of batches of images."""


@dataclass(frozen=True)
class Member:
    """One model of the zoo."""

    family: str
    factory: Factory
    data_dependent: bool
    """Whether what the forward does depends on the values of its tensors; no graph can hold that."""

    @property
    def spec(self) -> str:
        """As the commands take it."""
        return f"{self.factory.__module__}:{self.factory.__name__}"


ZOO: dict[str, Member] = {}
"""Every model by name."""


def member(family: str, *, data_dependent: bool = False) -> Callable[[Factory], Factory]:
    """Registers a function that makes a job."""

    def register(factory: Factory) -> Factory:
        assert factory.__name__ not in ZOO
        ZOO[factory.__name__] = Member(family, factory, data_dependent)
        return factory

    return register


def generator(step: int, rank: int) -> torch.Generator:
    """The same numbers for the same step and rank."""
    return torch.Generator().manual_seed(1000 * step + rank)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """For most."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """For convolutions."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def tokens(step: int, rank: int) -> Tensor:
    """(SEQUENCES, LENGTH) token numbers, none of them 0."""
    return torch.randint(1, VOCABULARY, (SEQUENCES, LENGTH), generator=generator(step, rank))


def pictures(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """(IMAGES, 3, PIXELS, PIXELS) of noise, and labels."""
    source = generator(step, rank)
    images = torch.randn(IMAGES, 3, PIXELS, PIXELS, generator=source)
    return images, torch.randint(CLASSES, (IMAGES,), generator=source)


def labels_of(images_and_labels: tuple[Tensor, Tensor]) -> Tensor:
    """The second of the pair."""
    return images_and_labels[1]


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of a model that is called with one tensor."""
    x, y = batch
    return functional.cross_entropy(model(x), y)


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross-entropy of a language model."""
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that a model of transformers computes when it is given labels, called with keywords."""
    loss: Tensor = model(**batch).loss
    return loss


def image_job(model: nn.Module) -> TrainingJob:
    """A classifier of images."""
    return TrainingJob(model=model, loss=classify, batch=pictures, optimizer=sgd)


def text_job(model: nn.Module) -> TrainingJob:
    """A language model."""
    return TrainingJob(model=model, loss=next_token, batch=tokens, optimizer=adamw)


def job(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Callable[[int, int], Any]) -> TrainingJob:
    """Any other model."""
    return TrainingJob(model=model, loss=loss, batch=batch, optimizer=adamw)
