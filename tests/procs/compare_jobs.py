"""Jobs that `planner compare` measures in its tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from foreign_jobs import bert
from torch import Tensor, nn

from planner import TrainingJob
from runtime.comm.collectives import COLLECTIVES
from runtime.plan.transports import LIBRARY


class Mixed(nn.Module):
    """Layers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 1, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        """Shape (batch, 8) to (batch, 1)."""
        return self.second(self.first(inputs).double())


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def _job(model: nn.Module) -> TrainingJob:
    return TrainingJob(
        model=model,
        loss=lambda model, batch: model(batch).square().mean(),
        batch=_batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    )


def job() -> TrainingJob:
    """Three layers with statistics and dropout; DDP makes several buckets of them where they are small enough."""
    return _job(nn.Sequential(nn.Linear(8, 20_000), nn.BatchNorm1d(20_000), nn.Dropout(0.1), nn.Linear(20_000, 8)))


def mixed() -> TrainingJob:
    """Gradients of two dtypes."""
    return _job(Mixed())


DROPPED = "cls.predictions.transform.dense.bias"
"""Of BERT: the only gradient of the bucket that is dropped."""


def bert_with_a_dropped_bucket() -> TrainingJob:
    """BERT on ranks whose runtime loses what one small bucket brings; DDP, which does not ask it, loses nothing."""
    made = bert()
    elements = dict(made.model.named_parameters())[DROPPED].numel()
    run = COLLECTIVES[LIBRARY]

    def forgetful(message: Any, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        mine = message.flat.clone()
        yield from run(message, group)
        if len(mine) < 2 * elements:
            message.flat[:elements] = mine[:elements]

    COLLECTIVES[LIBRARY] = forgetful  # type: ignore[index]
    return made


class Drawing(nn.Linear):
    """Adds noise from a generator of its own, whose state nobody can put back."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self._noise = torch.Generator().manual_seed(0)

    def forward(self, inputs: Tensor) -> Tensor:
        """Shape (batch, 8) to (batch, 8)."""
        return super().forward(inputs) + torch.randn(inputs.shape, generator=self._noise)


def drawing() -> TrainingJob:
    """A job that is never the same twice."""
    return _job(Drawing())


def _learner(batch: Any = _batch, **changes: Any) -> TrainingJob:
    """A job whose loss falls, with targets to learn; gradients in `LEARNED`."""
    fields: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 8)),
        "loss": lambda model, batch: (model(batch) - batch.flip(1)).square().mean(),
        "batch": batch,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    }
    return TrainingJob(**fields | changes)


LEARNED = ("3.bias", "3.weight", "0.bias", "0.weight")
"""Gradients of `_learner` in readiness order."""


def learner() -> TrainingJob:
    """With a metric."""
    return _learner(metric=lambda model: float(next(model.parameters()).norm()))


def learner_with_other_batches() -> TrainingJob:
    """No two calls give the same batch."""

    def batch(step: int, rank: int) -> Tensor:
        generator = torch.Generator()
        generator.seed()
        return torch.randn(8, 8, generator=generator)

    return _learner(batch)


def learner_with_another_loss() -> TrainingJob:
    """No two calls give the same loss."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        value: Tensor = model(batch).square().mean() * (1.0 + random.SystemRandom().random())
        return value

    return _learner(loss=loss)


def exploding() -> TrainingJob:
    """The loss is soon not finite."""
    return _learner(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e30))


def constant() -> TrainingJob:
    """The loss does not change."""
    return _learner(loss=lambda model, batch: (model(batch) * 0.0).sum() + 1.0)


class Squared(nn.Linear):
    """A forward that torch compiles as one graph."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Shape (batch, 8) to (batch, 8)."""
        return super().forward(inputs).square()


def compiled() -> TrainingJob:
    """Compiled; the metric is the number of runs of the model's compiled graphs."""
    runs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        return lambda *inputs: [runs.append(graph), graph.forward(*inputs)][1]

    model = Squared(8, 8)
    return _learner(model=model, compile={"backend": backend}, metric=lambda model: float(len(runs)))
