"""Models in which values decide what runs; and loops that look so but are fixed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner import TrainingJob

from .registry import generator, image_job, job, member

WIDTH = 8


def vectors(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """(6, WIDTH) of noise, and targets of the same shape."""
    source = generator(step, rank)
    return torch.randn(6, WIDTH, generator=source), torch.randn(6, WIDTH, generator=source)


def regress(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error."""
    return functional.mse_loss(model(batch[0]), batch[1])


class Branch(nn.Module):
    """One of two ways, by the sign of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.positive, self.negative = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) → the same."""
        y = self.first(x)
        result: Tensor = self.positive(y) if y.sum() > 0 else self.negative(y)
        return result


@member("control flow", data_dependent=True)
def branch() -> TrainingJob:
    """`if y.sum() > 0`: each step uses one of two layers."""
    return job(Branch(), regress, vectors)


class Ponder(nn.Module):
    """Adaptive computation: thinks until it is sure."""

    def __init__(self) -> None:
        super().__init__()
        self.think, self.sure, self.out = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) → the same."""
        state, total = torch.zeros_like(x), torch.zeros(x.shape[0], 1)
        steps = 0
        while steps < 6 and float(total.detach().min()) < 1.0:
            state = self.think(x, state)
            total = total + torch.sigmoid(self.sure(state))
            steps += 1
        result: Tensor = self.out(state * total)
        return result


@member("control flow", data_dependent=True)
def adaptive_computation() -> TrainingJob:
    """A loop until a condition holds."""
    return job(Ponder(), regress, vectors)


class EarlyExit(nn.Module):
    """Leaves at the first head that is sure enough."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Flatten(), nn.LazyLinear(12), nn.Tanh()) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(12, 5) for _ in range(3))
        self(torch.zeros(1, 3, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        """Images to scores."""
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            scores: Tensor = head(x)
            if scores.softmax(-1).amax(-1).mean() > 0.5:
                break
        return scores


@member("control flow", data_dependent=True)
def early_exit() -> TrainingJob:
    """Deeper layers get no gradient in steps that leave early."""
    return image_job(EarlyExit())


class Ode(nn.Module):
    """A neural differential equation, integrated by Runge-Kutta in a fixed number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(WIDTH + 1, 16), nn.Tanh(), nn.Linear(16, WIDTH))

    def slope(self, time: float, x: Tensor) -> Tensor:
        """dx/dt."""
        slope: Tensor = self.field(torch.cat([x, torch.full_like(x[:, :1], time)], -1))
        return slope

    def forward(self, x: Tensor, steps: int = 3) -> Tensor:
        """From time 0 to time 1."""
        h = 1.0 / steps
        for i in range(steps):
            k1 = self.slope(i * h, x)
            k2 = self.slope((i + 0.5) * h, x + h / 2 * k1)
            x = x + h * k2
        return x


@member("differential equation")
def neural_ode() -> TrainingJob:
    """The same layers many times over, in a loop of fixed length."""
    return job(Ode(), regress, vectors)


class Equilibrium(nn.Module):
    """Iterates without gradients for some rounds, then once with them; counts its calls."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inject, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) → the same."""
        self.count += 1
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(4):
                z = torch.tanh(self.again(z) + self.inject(x))
        return torch.tanh(self.again(z) + self.inject(x))


@member("differential equation")
def equilibrium() -> TrainingJob:
    """Rounds without gradients before the one that has them; a buffer counts the forwards."""
    return job(Equilibrium(), regress, vectors)
