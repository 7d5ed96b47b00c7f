"""Means over workers that all of them wait for: of weights and optimizer states, where outer steps end or resume."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtime.comm.world import World
from runtime.outer.anchors import wide_dtype

WHAT = "averaging the workers' state"


def mean_over(world: World, tensor: Tensor, scale: float = 1.0) -> Tensor:
    """Return the mean of all workers' tensors of one shape, the same on all of them, which all have to call this. Where
    they are times a `scale` of each worker's own, it is the mean without these, times this worker's.
    """
    flat = tensor.detach().reshape(-1).to(wide_dtype(tensor.dtype)) / scale
    parts = world.gather_parts(flat, WHAT).view(world.ranks, -1)
    return mean_of(list(parts)).view(tensor.shape) * scale


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the mean of tensors of one shape, in order; equal ones stay what they are, bit for bit."""
    first, *rest = tensors
    apart = torch.zeros_like(first)
    for one in rest:
        apart.add_(one - first)
    return first + apart / len(tensors)


def is_averaged(key: str, value: Any) -> bool:
    """Tell whether an optimizer's state of this name is averaged; step counts, numbers and the like are rank 0's."""
    return isinstance(value, Tensor) and value.is_floating_point() and key != "step"


@torch.no_grad()
def average_optimizer(world: World, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Give an optimizer's state of these parameters the mean over workers; all of them call this.

    State that some workers have not (their parameter got no gradient) becomes that of the first worker that has it.
    """
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        values = {key: None if is_averaged(key, value) else value for key, value in state.items()}
        everyone: list[dict[str, Any]] = world.gather(values, WHAT)
        if not any(everyone):
            continue
        first = next(rank for rank, found in enumerate(everyone) if found)
        if all(found.keys() == everyone[first].keys() for found in everyone):
            for key, value in everyone[first].items():
                mean = mean_over(world, state[key].to(parameter.device)) if value is None else value
                put(state, key, mean, parameter.device)
            continue
        for key, value in world.gather(state if world.rank == first else None, WHAT)[first].items():
            put(optimizer.state[parameter], key, value, parameter.device)


def put(state: dict[str, Any], key: str, value: Any, device: torch.device) -> None:
    """Write a value into an optimizer's state, in the memory that is there, else, if not on the host, on `device`."""
    if isinstance(state.get(key), Tensor) and isinstance(value, Tensor):
        state[key].copy_(value)
    else:
        state[key] = value.to(device) if isinstance(value, Tensor) and value.device.type != "cpu" else value
