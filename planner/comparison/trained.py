"""What contestants train: a job, of which each block makes a new optimizer."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from planner.training import KEPT_BATCHES, BuiltJob


class Trained(Protocol):
    """A model with a way to make one step of it."""

    model: nn.Module
    name: str
    """Stands before messages of what its functions raise."""

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the block that begins."""
        ...

    def step(self, forward: nn.Module, optimizer: torch.optim.Optimizer, number: int, *, in_ddp: bool) -> float | None:
        """Makes one step.

        Args:
            forward: what to call in place of the model.
            optimizer: of this block.
            number: of the step in its block, from 0.
            in_ddp: whether `forward` is DDP around the model.

        Returns:
            The loss, where it is known.
        """
        ...


class TrainedJob:
    """A TrainingJob on this rank; its batches are made beforehand."""

    def __init__(self, built: BuiltJob) -> None:
        self.model, self.name, self._built = built.model, built.spec, built
        self._batches: list[Any] = [built.batch(step) for step in range(KEPT_BATCHES)]

    def optimizer(self) -> torch.optim.Optimizer:
        """See `Trained`."""
        trained = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        return self._built.job.optimizer(trained)

    def step(self, forward: nn.Module, optimizer: torch.optim.Optimizer, number: int, *, in_ddp: bool) -> float | None:
        """See `Trained`."""
        optimizer.zero_grad()
        loss = self._built.loss(forward, self._batches[number % KEPT_BATCHES])
        self._built.backward(loss, in_ddp=in_ddp)
        optimizer.step()
        return float(loss.detach())
