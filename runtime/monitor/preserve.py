"""Leaves a model, its optimizers and the random generators as they were found, whatever was run in between."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def preserved(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Iterator[None]:
    """Restores, on leaving, parameters, buffers, `.grad`, training flags, state of the optimizers, and generators.

    Tensors keep their identity: values are copied back in place, and a tensor that a forward has put in place of a
    buffer leaves it. Costs one copy of the model and of the optimizer's state while it is open.
    """
    # Scripted modules keep their tensors elsewhere, and no forward replaces them.
    registers: list[Any] = [one for module in model.modules() for one in (module._parameters, module._buffers)]
    registered = [(register, dict(register)) for register in registers if isinstance(register, dict)]
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    gradient_values = [None if gradient is None else gradient.detach().clone() for _, gradient in gradients]
    training = [(module, module.training) for module in model.modules()]
    # Values are copied, parameters (the keys of the state, and the lists in the groups) are not.
    saved = [
        (
            optimizer,
            {parameter: copy.deepcopy(values) for parameter, values in optimizer.state.items()},
            [
                {key: value if key == "params" else copy.deepcopy(value) for key, value in group.items()}
                for group in optimizer.param_groups
            ],
        )
        for optimizer in optimizers
    ]
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
        for one, state, groups in saved:
            one.state.clear()
            one.state.update(state)
            for group, options in zip(one.param_groups, groups, strict=True):
                group.clear()
                group.update(options)
        restore_generators(drawn)


def put_back(live: Any, saved: Any) -> None:
    """Make a container hold exactly the objects that a copy of it holds."""

    def identities(container: Any) -> list[int]:
        return [id(item) for item in (chain(*container.items()) if isinstance(container, dict) else container)]

    if identities(live) == identities(saved):
        return
    if isinstance(live, list):
        live[:] = saved
    else:
        live.clear()
        live.update(saved)


def generators() -> tuple[Any, Any, Tensor, list[Tensor]]:
    """Return the states of the random generators: Python's, numpy's, and torch's on the CPU and on each device."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def restore_generators(states: tuple[Any, Any, Tensor, list[Tensor]]) -> None:
    """Make what is drawn next what was drawn after `generators()` gave these states."""
    python, numpy, cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
