"""Leaves a model, its optimizer and the random generators as they were found, whatever was run in between."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def preserved(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Restores, on leaving, parameters, buffers, `.grad`, training flags, optimizer state and generators.

    Tensors keep their identity: values are copied back in place, and a tensor that a forward has put in place of a
    buffer leaves it. Costs one copy of the model and of the optimizer's state while it is open.
    """
    registered = [(register, dict(register)) for register in _registers(model)]
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    gradient_values = [None if gradient is None else gradient.detach().clone() for _, gradient in gradients]
    training = [(module, module.training) for module in model.modules()]
    state = _optimizer_state(optimizer)
    drawn = generators()
    try:
        yield
    finally:
        for register, held in registered:
            put_back(register, held)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
            for (parameter, gradient), before in zip(gradients, gradient_values, strict=True):
                if gradient is not None and before is not None:
                    gradient.copy_(before)
                parameter.grad = gradient
        for module, flag in training:
            module.training = flag
        _restore_optimizer(optimizer, state)
        restore_generators(drawn)


def _registers(model: nn.Module) -> list[dict[str, Any]]:
    """Where modules keep their tensors; scripted ones keep theirs elsewhere, and no forward replaces them."""
    found: list[Any] = [one for module in model.modules() for one in (module._parameters, module._buffers)]
    return [register for register in found if isinstance(register, dict)]


def put_back(live: Any, saved: Any) -> None:
    """Makes a container hold exactly the objects that a copy of it holds."""
    if _identities(live) == _identities(saved):
        return
    if isinstance(live, list):
        live[:] = saved
    else:
        live.clear()
        live.update(saved)


def _identities(container: Any) -> list[int]:
    items = chain(*container.items()) if isinstance(container, dict) else container
    return [id(item) for item in items]


def _optimizer_state(optimizer: torch.optim.Optimizer | None) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    if optimizer is None:
        return {}, []
    # Values are copied, parameters (the keys, and the lists in the groups) are not.
    state = {parameter: copy.deepcopy(values) for parameter, values in optimizer.state.items()}
    groups = [{k: v if k == "params" else copy.deepcopy(v) for k, v in g.items()} for g in optimizer.param_groups]
    return state, groups


def _restore_optimizer(
    optimizer: torch.optim.Optimizer | None, saved: tuple[dict[Any, Any], list[dict[str, Any]]]
) -> None:
    if optimizer is None:
        return
    state, groups = saved
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.clear()
        group.update(values)


def generators() -> tuple[Any, Any, Tensor, list[Tensor]]:
    """The states of this process's random generators: Python's, numpy's, and torch's on the CPU and on each device."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def restore_generators(states: tuple[Any, Any, Tensor, list[Tensor]]) -> None:
    """Makes what is drawn next what was drawn after `generators()` gave these states."""
    python, numpy, cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
