"""What variants train: a job, of which each block makes a new optimizer, or the model of a script with its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from planner.jobs.training import KEPT_BATCHES, BuiltJob, attribute_user_errors
from runtime.errors import InputError
from runtime.monitor.preserve import preserved

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


class Trained:
    """A model with a way to make one step of it."""

    name: str
    """Stands before messages of what its functions raise."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
        """Of the variant whose block runs: inside, gradients only accumulate."""

    def restored(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Leave everything that steps change as it was."""
        return preserved(self.model, optimizer)

    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of the block that begins."""
        raise NotImplementedError

    def step(self, forward: nn.Module, optimizer: torch.optim.Optimizer, number: int, *, in_ddp: bool) -> float | None:
        """Make one step, the `number`-th of its block, from 0, and return the loss where it is known.

        `forward` is called in place of the model: with `in_ddp` it is DDP around that.
        """
        raise NotImplementedError


class TrainedJob(Trained):
    """A TrainingJob on this rank; its batches are made beforehand."""

    def __init__(self, built: BuiltJob) -> None:
        super().__init__(built.model)
        self.name, self._built = built.spec, built
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


class TrainedScript(Trained):
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
        super().__init__(model)
        self._optimizer, self._step, self._also = optimizer, step, also

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
            with super().restored(optimizer):
                yield
        finally:
            for one, state in zip(self._also, states, strict=True):
                one.load_state_dict(state)
