"""The model that variants train: a job, of which each block makes a new optimizer, or a script's with its own."""

from __future__ import annotations

import copy
import inspect
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from planner.jobs.training import KEPT_BATCHES, BuiltJob, attribute_user_errors, make_optimizer
from runtime.core.options import CompileArgument
from runtime.errors import InputError
from runtime.monitor.preserve import preserved
from runtime.optimizers.kinds import Optimizers, each_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


class Trained:
    """A model with a way to make one step of it."""

    name: str
    """Prefix of the messages of errors that its functions raise."""

    def __init__(self, model: nn.Module, metric: Callable[[nn.Module], Any] | None = None) -> None:
        self.model, self._metric = model, metric
        self.compile: CompileArgument | None = None
        """Arguments of `torch.compile` for the model, in every variant; None: it is not compiled."""
        self.no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context of the variant whose block runs, in which gradients only accumulate."""

    def restored(self, optimizer: Optimizers) -> AbstractContextManager[None]:
        """Restore everything that steps change, on leaving."""
        return preserved(self.model, each_of(optimizer))

    def share(self, shares: Mapping[str, int] | None) -> Callable[[], float] | None:
        """Train by batches of these shares of a step's samples from now on, where planner makes them; return what gives
        their weight, None: all ranks weigh alike. `shares`: by rank; None: batches stay as they are.
        """
        return None

    def optimizer(self) -> Optimizers:
        """Return the optimizer of the block that begins."""
        raise NotImplementedError

    def prepare(self, number: int) -> str:
        """Make what a step needs before it is timed, and return a digest of its batch; empty if it is not known."""
        return ""

    def metric(self) -> float | None:
        """Return the metric of the model in evaluation mode, without gradients; None if there is none."""
        if self._metric is None:
            return None
        training = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad(), attribute_user_errors(f"{self.name}: metric(model)"):
                return float(self._metric(self.model))
        finally:
            for module, flag in training:
                module.training = flag

    def step(self, forward: nn.Module, optimizer: Optimizers, number: int) -> float | None:
        """Make one step and return its loss, if it is known.

        Args:
            forward: the model, or DDP around it.
            optimizer: of the block.
            number: of the step in its block, from 0.
        """
        raise NotImplementedError


class TrainedJob(Trained):
    """A TrainingJob on this rank; its batches are made beforehand."""

    def __init__(self, built: BuiltJob) -> None:
        super().__init__(built.model)
        self.name, self._built, self.compile = built.spec, built, built.job.compile
        self._kept: dict[tuple[int, ...], list[Any]] = {}
        """Batches by shares; without any for none."""
        self.share(None)

    def share(self, shares: Mapping[str, int] | None) -> Callable[[], float] | None:
        """See `Trained.share`; batches are made now, unless there are some."""
        self._built, key = self._built.sharing(shares), tuple((shares or {}).values())
        if key not in self._kept:
            self._kept[key] = [self._built.batch(step) for step in range(KEPT_BATCHES)]
        self._batches = self._kept[key]
        return self._built.weight

    def optimizer(self) -> Optimizers:
        """Make the job's optimizers."""
        return make_optimizer(self._built.job, self.name)

    def step(self, forward: nn.Module, optimizer: Optimizers, number: int) -> float | None:
        """Make one step of the job; arguments as of `Trained.step`."""
        return float(self._built.train(self._batches[number % KEPT_BATCHES], forward, optimizer))


class TrainedScript(Trained):
    """The model of a script that trains by a function of its own."""

    name = "planner.compare: step(model)"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        step: Callable[..., object],
        also: Sequence[Stateful],
        metric: Callable[[nn.Module], float] | None = None,
    ) -> None:
        """Train a model by `step`, which changes `also` as well, and judge it by `metric`."""
        super().__init__(model, metric)
        self._optimizer, self._step, self._also = optimizer, step, also
        self.first: int | None = None
        """Number of the batch of the first step; None: each step has the same batch, number 0."""

    @property
    def takes_number(self) -> bool:
        """Return whether the script's step has a parameter called `number`."""
        try:
            return "number" in inspect.signature(self._step).parameters
        except (TypeError, ValueError):
            return False

    def optimizer(self) -> Optimizers:
        """Return the script's optimizer."""
        return self._optimizer

    def step(self, forward: nn.Module, optimizer: Optimizers, number: int) -> float | None:
        """Make one step of the script; arguments as of `Trained.step`.

        Raises:
            InputError: the function calls another model than it is given.
        """
        called: list[bool] = []
        watched = number == 0 and isinstance(forward, DistributedDataParallel)
        with ExitStack() as stack:
            if watched:
                stack.callback(forward.register_forward_pre_hook(lambda *_: called.append(True)).remove)
            stack.enter_context(attribute_user_errors(self.name))
            batch = 0 if self.first is None else self.first + number
            loss = self._step(forward, **({"number": batch} if self.takes_number else {}))
        if watched and not called:
            raise InputError(
                f"{self.name}: found no call of the model that it is given, expected one: with DDP that is "
                f"DistributedDataParallel(model); call it in place of the script's own"
            )
        if isinstance(loss, Tensor):
            return float(loss.detach()) if loss.numel() == 1 else None
        return float(loss) if isinstance(loss, numbers.Real) else None

    @contextmanager
    def restored(self, optimizer: Optimizers) -> Iterator[None]:
        """Restore everything that steps change, on leaving, with what else the script named."""
        states = [copy.deepcopy(one.state_dict()) for one in self._also]
        try:
            with super().restored(optimizer):
                yield
        finally:
            for one, state in zip(self._also, states, strict=True):
                one.load_state_dict(state)
