"""Tiny jobs for updaters, which are processes of their own and find them here by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from runtime.local_async import LocalJob, Part, PartSampler
from runtime.local_async.memory import AtomicCounter
from runtime.plan import LocalAsyncSpec, ModelReference, Plan, PlanBucket, PlanWorld

LAYERS = (("out.weight", "out.bias"), ("norm.weight", "norm.bias", "hidden.weight", "hidden.bias"))
"""In readiness order: two blocks."""
SAMPLES = 24


class Net(nn.Module):
    """Two layers with a norm, whose buffers are averaged; a frozen parameter and a buffer of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.full((1,), 2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) → (batch, 3)."""
        scores: Tensor = self.out(torch.tanh(self.norm(self.hidden(x)))) * self.scale
        return scores


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs, and targets that follow from them."""
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * rank + number))
    return inputs, torch.sin(inputs[:, :3]) + 1.0


def loss(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    """Mean square."""
    return ((model(given[0]) - given[1]) ** 2).mean()


def sgd(parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
    """With momentum and weight decay."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    """Rates that change in every step."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)


def plain(**changes: Any) -> LocalJob:
    """The usual one."""
    torch.manual_seed(7)
    usual: dict[str, Any] = {"model": Net(), "loss": loss, "batch": batch, "optimizer": sgd}
    return LocalJob(**(usual | changes))


def scheduled() -> LocalJob:
    """With rates that change."""
    return plain(schedule=cosine)


def calm() -> LocalJob:
    """Rates that bear the momenta of many updaters at once."""
    return plain(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.005, momentum=0.9))


def normless() -> LocalJob:
    """Without statistics of minibatches, which make means of models other than models of means."""
    torch.manual_seed(7)
    return plain(model=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))


class Checkpointed(Net):
    """Computes what follows the first layer once more in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) → (batch, 3)."""
        rest = nn.Sequential(self.norm, nn.Tanh(), self.out)
        scores: Tensor = checkpoint(rest, self.hidden(x), use_reentrant=self.reentrant)
        return scores * self.scale


def checkpointed(reentrant: bool) -> LocalJob:
    """With an activation checkpoint."""
    return plain(model=Checkpointed(reentrant))


def odd_loss() -> LocalJob:
    """A loss that raises."""

    def raising(model: nn.Module, given: Any) -> Tensor:
        raise ArithmeticError("odd")

    return plain(loss=raising)


def odd_updater(rank: int, parent: int) -> LocalJob:
    """Makes another model in the updaters of rank 1."""
    return plain(model=nn.Sequential(nn.Linear(6, 3))) if rank == 1 and os.getpid() != parent else plain()


class Odd(nn.Module):
    """One weight, called as jobs call a model."""

    def __init__(self, weight: Tensor, other: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        if other is not None:
            self.register_buffer("other", other)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) → (batch, 1)."""
        return x[:, :1] * self.weight.sum()


def view_of_another() -> LocalJob:
    """A buffer that is a part of a parameter."""
    weight = torch.ones(6)
    return plain(model=Odd(weight, weight[2:]))


def overlapping() -> LocalJob:
    """A parameter whose elements are one."""
    return plain(model=Odd(torch.ones(1).expand(6)))


def lbfgs() -> LocalJob:
    """An optimizer that asks for several gradients."""
    return plain(optimizer=lambda parameters: torch.optim.LBFGS(parameters))


def loaded(folder: str = "", batch_samples: int = 4) -> LocalJob:
    """From a data set of numbered samples; where there is a folder, each updater writes down what it saw."""
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(SAMPLES, 6, generator=generator), torch.arange(float(SAMPLES)))

    def loader(part: Part) -> Iterable[Any]:
        return DataLoader(data, batch_samples, sampler=PartSampler(SAMPLES, part))

    def numbered_loss(model: nn.Module, given: Sequence[Tensor]) -> Tensor:
        if folder:
            with (Path(folder) / f"{os.getpid()}").open("a") as file:
                file.write(" ".join(str(int(number)) for number in given[1]) + "\n")
        return ((model(given[0]) - given[1][:, None] / SAMPLES) ** 2).mean()

    return plain(batch=None, loader=loader, loss=numbered_loss)


def drawn(updater: int, updaters: int, passes: int) -> list[int]:
    """Samples of an updater of one rank, in order."""
    sampler, numbers = PartSampler(SAMPLES, Part(updater, updaters)), []
    for number in range(passes):
        sampler.set_epoch(number)
        numbers += list(sampler)
    return numbers


def faulty(fault: str, folder: str, at: int = 6) -> LocalJob:
    """The updater that is given one minibatch is killed, stops, or raises; the rank itself never is."""
    parent = os.getpid() if not Path(folder, "parent").exists() else 0
    if parent:
        Path(folder, "parent").write_text(str(parent))

    def failing(number: int, rank: int) -> Any:
        if number == at and not parent and fault != "none":
            if fault == "raise":
                raise ArithmeticError("on purpose")
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        time.sleep(0.002)
        return batch(number, rank)

    return plain(batch=failing)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Values of now."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def trained_alone(job: LocalJob, steps: int) -> nn.Module:
    """What plain training in one process comes to."""
    optimizer = job.optimizer(p for p in job.model.parameters() if p.requires_grad)
    schedule = None if job.schedule is None else job.schedule(optimizer)
    for step in range(steps):
        assert job.batch is not None
        optimizer.zero_grad()
        job.loss(job.model, job.batch(step, 0)).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return job.model


def plan_of(spec: LocalAsyncSpec | None, ranks: int = 1, **changes: Any) -> Plan:
    """Of `Net`; a bucket for each block."""
    values: dict[str, Any] = {
        "model": ModelReference(name="net"), "world": PlanWorld(ranks=ranks),
        "accuracy": "exact" if spec is None else "relaxed",
        "buckets": tuple(PlanBucket(gradients=names) for names in LAYERS), "local_async": spec,
    }  # fmt: skip
    return Plan(**(values | changes))


TURNS = (
    "snapshot 0", "snapshot 1", "update 1", "average", "snapshot 1", "update 0", "average", "update 1", "average",
    "snapshot 0", "snapshot 1", "update 0", "average", "update 1", "average", "snapshot 0", "update 0", "average",
)  # fmt: skip
"""A forced order of two updaters and their parent: snapshots before and updates after averagings, and between."""


class Turns:
    """Lets events happen in the order of `TURNS`, over processes."""

    def __init__(self, counter: AtomicCounter, me: str) -> None:
        self._counter, self._me = counter, me
        self._mine = iter([i for i, turn in enumerate(TURNS) if turn.endswith(me)])
        self._now = -1

    def wait(self) -> None:
        """Until it is this one's turn; at the end of the list there is none."""
        self._now = next(self._mine, len(TURNS))
        until = time.monotonic() + 60.0
        while self._now < len(TURNS) and self._counter.value != self._now:
            assert time.monotonic() < until, f"{self._me} waited for turn {self._now}, at {self._counter.value}"
            time.sleep(0.0005)

    def over(self) -> None:
        """The next one's turn."""
        if self._now < len(TURNS):
            self._counter.take()


class TurnSGD(torch.optim.SGD):
    """Updates when it is its turn."""

    turns: Turns

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As ever."""
        self.turns.wait()
        super().step(closure)
        self.turns.over()


def in_turns(counter: AtomicCounter, parent: int) -> LocalJob:
    """A job whose snapshots and updates follow `TURNS`; in the rank itself it follows nothing.

    Which of the two updaters a process is follows from the first minibatch that it gets, for it is given in turn.
    """
    if os.getpid() == parent:
        return plain()
    me: list[Turns] = []

    def turned(number: int, rank: int) -> Any:
        if not me:
            me.append(Turns(counter, str(number)))
            TurnSGD.turns = me[0]
        me[0].wait()
        return batch(number, rank)

    def before_the_turn_ends(model: nn.Module, given: Any) -> Tensor:
        found = loss(model, given)
        me[0].over()
        return found

    def turn_sgd(parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
        return TurnSGD(parameters, lr=0.05, momentum=0.9)

    return plain(batch=turned, loss=before_the_turn_ends, optimizer=turn_sgd)
