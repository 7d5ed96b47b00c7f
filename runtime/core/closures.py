"""Optimizers that decide by the loss which their closure returns: it is averaged, so that all ranks decide alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.communicator import raise_failure
from runtime.comm.world import World
from runtime.core.weights import Weights

DECIDE_BY_LOSS: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.LBFGS,)
"""Line search and stopping compare losses. Every other optimizer of torch only hands the closure's loss back."""


class LossAveraging:
    """Lets LBFGS see the average loss of all ranks.

    Each rank's closure returns the loss of its own batch. Gradients are averaged, so without this one rank would stop
    or step shorter than another, and wait for ever for collectives that the other one does not start.
    """

    def __init__(self, world: World, device: torch.device, weights: Weights) -> None:
        """`device`: the parameters', for not every backend carries tensors of the host; `weights`: of the gradients."""
        self._world, self._device, self._weights = world, device, weights

    def install(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
        """Hook the optimizers' steps; returns the handles. Nothing to do for most optimizers or with one rank."""
        if self._world.group is None:
            return []
        return [
            optimizer.register_step_pre_hook(lambda _, *given: with_closures(self._averaged, *given))
            for optimizer in optimizers
            if isinstance(optimizer, DECIDE_BY_LOSS)
        ]

    def _averaged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def averaged() -> Any:
            loss = closure()
            total = loss.detach().clone() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64)
            total, share = total.to(self._device), self._weights.share
            total = total * share / self._world.ranks if share else torch.zeros_like(total)  # no NaN comes through
            try:
                dist.all_reduce(total, group=self._world.group)
            except RuntimeError as error:
                raise_failure(self._world, "averaging the closure's loss", error)
            return total

        return averaged


Closure = Callable[[], Any]


def with_closures(
    wrap: Callable[[Closure], Closure], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an optimizer's step, of which one may be callable, with another closure in its place."""
    replaced = tuple(wrap(a) if is_closure(a) else a for a in arguments)
    return replaced, {name: wrap(a) if is_closure(a) else a for name, a in keywords.items()}


def is_closure(argument: Any) -> bool:
    # Whether torch counts the optimizer, which may be callable, among the arguments does not matter.
    return callable(argument) and not isinstance(argument, torch.optim.Optimizer)


def after_backward(
    action: Callable[[], None], arguments: tuple[Any, ...], keywords: dict[str, Any],
    before: Callable[[], None] = lambda: None,
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:  # fmt: skip
    """Do something between backward and an optimizer's step, whose hook gives its arguments: now, or at the end of each
    closure; then return other arguments for the step. `before`: what to do at the beginning of each closure.
    """
    if not any(map(is_closure, (*arguments, *keywords.values()))):
        action()
        return None

    def wrapped(closure: Closure) -> Closure:
        def run() -> Any:
            before()
            loss = closure()
            action()
            return loss

        return run

    return with_closures(wrapped, arguments, keywords)
