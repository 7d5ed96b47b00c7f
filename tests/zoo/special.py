"""Habits that make models hard to see through: frozen parts, hooks, own autograd functions, TorchScript, casts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner import TrainingJob

from .controlflow import WIDTH, regress, vectors
from .convolutions import conv
from .registry import CLASSES, PIXELS, image_job, job, member, pictures


class FineTuned(nn.Module):
    """A frozen body whose batch norm stays in eval mode, an adapter of low rank, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(3, 8), nn.AdaptiveAvgPool2d(2), nn.Flatten()).requires_grad_(False)
        self.frozen = nn.Linear(32, 16).requires_grad_(False)
        self.low, self.high = nn.Linear(32, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.head = nn.Linear(16, CLASSES)

    def train(self, mode: bool = True) -> FineTuned:
        """The body stays as it is."""
        super().train(mode)
        self.body.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Images to scores."""
        with torch.no_grad():
            x = self.body(x)
        scores: Tensor = self.head(self.frozen(x) + self.high(self.low(x)))
        return scores


@member("frozen parts")
def fine_tuned() -> TrainingJob:
    """A frozen body in eval mode under no_grad, with an adapter beside a frozen layer."""
    model = FineTuned()
    model.train()
    return image_job(model)


class Step(torch.autograd.Function):
    """Rounds; its gradient is passed straight through."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        """To whole numbers."""
        return x.round()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        """As if nothing had been done."""
        return gradient


class Codebook(nn.Module):
    """VQ-VAE: the nearest of some vectors stands for each; averages of what they stood for are kept in a buffer."""

    usage: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        self.vectors = nn.Embedding(12, 4)
        self.register_buffer("usage", torch.zeros(12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What is decoded, and the loss that draws vectors near."""
        z = self.encode(x)
        nearest = torch.cdist(z, self.vectors.weight).argmin(-1)
        if self.training:
            self.usage.mul_(0.99).add_(functional.one_hot(nearest, 12).sum(0), alpha=0.01)
        chosen = self.vectors(nearest)
        commitment = (z - chosen.detach()).square().mean() + (z.detach() - chosen).square().mean()
        return self.decode(z + (chosen - z).detach()), commitment


@member("generative")
def vq_vae() -> TrainingJob:
    """Nearest vectors, gradients straight through, a buffer that is updated in place; a tuple comes out."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        again, commitment = model(batch[0])
        return functional.mse_loss(again, batch[0]) + commitment

    return job(Codebook(), loss, vectors)


class Rounded(nn.Module):
    """Linear layers with rounding between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) → the same."""
        for layer in self.layers:
            x = Step.apply(layer(x) * 16) / 16
        return x


@member("own operations")
def straight_through() -> TrainingJob:
    """An autograd function of its own."""
    return job(Rounded(), regress, vectors)


@member("own operations")
def scripted_part() -> TrainingJob:
    """A part compiled with TorchScript, which takes no hooks."""
    inner = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU())
    return job(nn.Sequential(torch.jit.script(inner), nn.Linear(16, WIDTH)), regress, vectors)


class Mixed(nn.Module):
    """Half precision inside, full precision around."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * PIXELS * PIXELS, 16)
        self.second = nn.Linear(16, 16).to(torch.bfloat16)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Casts by hand, and by autocast."""
        with torch.autocast("cpu", torch.bfloat16):
            y = self.first(x.flatten(1)).relu()
        y = self.second(y.to(torch.bfloat16)).float()
        scores: Tensor = self.last(y)
        return scores


@member("mixed precision")
def mixed_precision() -> TrainingJob:
    """A bfloat16 layer among others, autocast inside the forward."""
    return image_job(Mixed())


class Parts(nn.ModuleDict):
    """Parts without a forward: the loss puts them together."""


@member("parts")
def only_parts() -> TrainingJob:
    """The loss calls the parts of the model, never the model."""
    model = Parts({"encoder": nn.Linear(WIDTH, 4), "decoder": nn.Linear(4, WIDTH)})

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        parts: Any = model
        return functional.mse_loss(parts["decoder"](parts["encoder"](batch[0]).tanh()), batch[1])

    return job(model, loss, vectors)


class TwoViews(nn.Module):
    """Contrastive learning: the model is called twice in a step, and once as its own averaged teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(conv(3, 8, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6))
        self.teacher = nn.Sequential(conv(3, 8, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6))
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor, *, teach: bool = False) -> Tensor:
        """Either of the two; the teacher moves towards the student first."""
        if not teach:
            code: Tensor = self.student(x)
            return code
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
            code = self.teacher(x)
        return code


@member("siamese")
def teacher_and_student() -> TrainingJob:
    """A step of two calls, the first of which trains nothing and changes weights in place."""

    def loss(model: nn.Module, images: Tensor) -> Tensor:
        target = model(images.flip(-1), teach=True)
        return 1 - functional.cosine_similarity(model(images), target).mean()

    return job(TwoViews(), loss, lambda step, rank: pictures(step, rank)[0])
