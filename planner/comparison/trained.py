"""What variants train: a job, of which each block makes a new optimizer, or the model of a script with its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from planner.jobs.training import KEPT_BATCHES, BuiltJob, attribute_user_errors
from runtime.errors import InputError
from runtime.monitor.preserve import preserved


class Trained(Protocol):
    """A model with a way to make one step of it."""

    model: nn.Module
    name: str
    """Stands before messages of what its functions raise."""
    no_sync: Callable[[], AbstractContextManager[None]]
    """Of the variant whose block runs: inside, gradients only accumulate."""

    def restored(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """On leaving, everything that steps change is as it was."""
        ...

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


class Stateful(Protocol):
    """A scheduler, a GradScaler and the like."""

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Goes on from there."""
        ...


class TrainedJob:
    """A TrainingJob on this rank; its batches are made beforehand."""

    def __init__(self, built: BuiltJob) -> None:
        self.model, self.name, self._built = built.model, built.spec, built
        self.no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
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

    def restored(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """See `Trained`."""
        return preserved(self.model, optimizer)


class TrainedScript:
    """The model of a script that trains by a function of its own."""

    name = "planner.compare: step(model)"

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        step: Callable[[nn.Module], object],
        also: Sequence[Stateful],
    ) -> None:
        """`also`: what else the step changes."""
        self.model, self._optimizer, self._step, self._also = model, optimizer, step, also
        self.no_sync: Callable[[], AbstractContextManager[None]] = nullcontext

    def optimizer(self) -> torch.optim.Optimizer:
        """See `Trained`."""
        return self._optimizer

    def step(self, forward: nn.Module, optimizer: torch.optim.Optimizer, number: int, *, in_ddp: bool) -> float | None:
        """See `Trained`. Raises InputError where the function calls another model than it is given."""
        called: list[bool] = []
        watch = forward.register_forward_pre_hook(lambda *_: called.append(True)) if in_ddp and number == 0 else None
        try:
            with attribute_user_errors(self.name):
                loss = self._step(forward)
        finally:
            if watch is not None:
                watch.remove()
        if watch is not None and not called:
            raise InputError(
                f"{self.name}: found no call of the model that it is given, expected one: with DDP that is "
                f"DistributedDataParallel(model); call it in place of the script's own"
            )
        if isinstance(loss, Tensor):
            return float(loss.detach()) if loss.numel() == 1 else None
        return float(loss) if isinstance(loss, int | float) else None

    @contextmanager
    def restored(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """See `Trained`."""
        states = [copy.deepcopy(one.state_dict()) for one in self._also]
        try:
            with preserved(self.model, optimizer):
                yield
        finally:
            for one, state in zip(self._also, states, strict=True):
                one.load_state_dict(state)
