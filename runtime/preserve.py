"""Leaves a model, its optimizer and the random generators as they were found, whatever was run in between."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def preserved(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Restores, on leaving, parameters, buffers, `.grad`, training flags, optimizer state and generators.

    Tensors keep their identity: values are copied back in place. Costs one copy of the model and of the optimizer's
    state while it is open.
    """
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    gradient_values = [None if gradient is None else gradient.detach().clone() for _, gradient in gradients]
    training = [(module, module.training) for module in model.modules()]
    state = _optimizer_state(optimizer)
    generators = _generators()
    try:
        yield
    finally:
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
        _restore_generators(generators)


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


def _generators() -> tuple[Any, Any, Tensor, list[Tensor]]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _restore_generators(saved: tuple[Any, Any, Tensor, list[Tensor]]) -> None:
    python, numpy, cpu, cuda = saved
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
