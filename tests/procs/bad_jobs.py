"""Jobs that fail, each in its own way; and what every rank is told when they are profiled and trained."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner import TrainingJob
from planner.jobs.lr_schedule import Course
from planner.jobs.on_rank import profile_rank, train_rank
from runtime.errors import PlannerError


def _batch(step: int, rank: int) -> Tensor:
    return torch.full((2, 3), float(step + rank))


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _job(**fields: Any) -> TrainingJob:
    sound = {"model": nn.Linear(3, 1), "loss": _loss, "batch": _batch, "optimizer": _sgd}
    return TrainingJob(**(sound | fields))


def _raise(error: BaseException) -> Any:
    raise error


def batch_raises() -> TrainingJob:
    """As a data set that is not there."""
    return _job(batch=lambda step, rank: open("/absent/data"))


def batch_leaves() -> TrainingJob:
    """Calls sys.exit inside the batch."""
    return _job(batch=lambda step, rank: sys.exit("no more data"))


def batch_raises_later() -> TrainingJob:
    """Soon, but not at once."""
    return _job(batch=lambda step, rank: _batch(step, rank) if step < 2 else _raise(IndexError("two only")))


def loss_raises() -> TrainingJob:
    """A batch that does not fit the model."""
    return _job(batch=lambda step, rank: torch.ones(2, 4))


def loss_is_a_vector() -> TrainingJob:
    """The mean was forgotten."""
    return _job(loss=lambda model, batch: model(batch))


def loss_is_a_number() -> TrainingJob:
    """`.item()` too early."""
    return _job(loss=lambda model, batch: _loss(model, batch).item())


def loss_is_detached() -> TrainingJob:
    """Nothing to go back through."""
    return _job(loss=lambda model, batch: _loss(model, batch).detach())


def loss_ignores_the_model() -> TrainingJob:
    """A gradient, but none of the model's."""
    return _job(loss=lambda model, batch: torch.ones(1, requires_grad=True).sum())


def optimizer_is_none() -> TrainingJob:
    """A return was forgotten."""
    return _job(optimizer=lambda parameters: None)


def optimizer_raises() -> TrainingJob:
    """An option that it does not know."""
    return _job(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=-1.0))


def muon_of_all() -> TrainingJob:
    """A bias is no matrix."""
    return _job(optimizer=torch.optim.Muon)


def update_raises() -> TrainingJob:
    """An optimizer that wants a closure."""
    return _job(optimizer=torch.optim.LBFGS)


def meta() -> TrainingJob:
    """A model without values."""
    return _job(model=nn.Linear(3, 1, device="meta"))


def differ() -> TrainingJob:
    """Ranks build different models."""
    return _job(model=nn.Linear(3, 1 + dist.get_rank()))


def not_a_number() -> TrainingJob:
    """Trains, though to nothing."""
    return _job(loss=lambda model, batch: _loss(model, batch) * float("nan"))


def told(path: str, names: list[str]) -> dict[str, dict[str, str]]:
    """By job and command: `Type: message` of what it says, or nothing."""
    said: dict[str, dict[str, str]] = {name: {} for name in names}
    for name in names:
        for command, function, arguments in (
            ("profile", profile_rank, ("cpu", False)),
            ("run", train_rank, (None, Course(3), "cpu", False)),
        ):
            said[name][command] = ""
            try:
                function(f"{path}:{name}", *arguments)
            except PlannerError as error:
                said[name][command] = f"{type(error).__name__}: {error}"
            # What a failed job has left of a step must not meet the next one.
            dist.barrier()
    return said
