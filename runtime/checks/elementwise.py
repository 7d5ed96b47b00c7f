"""Optimizers whose step can be made on any part of the weights alone: those that treat every element by itself."""

from __future__ import annotations

import torch

from runtime.optimizers import LayerwiseOptimizer

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
"""Those of torch. What is derived from them may not be; a class of one's own says so by `elementwise = True`."""

_WHY_NOT: tuple[tuple[type[torch.optim.Optimizer], str], ...] = (
    (LayerwiseOptimizer, "scales the step of each layer by norms of the whole layer"),
    (torch.optim.LBFGS, "compares whole gradients of several backwards"),
    (torch.optim.Adafactor, "keeps sums over rows and columns of whole matrices"),
    (torch.optim.Muon, "orthogonalizes whole matrices"),
    (torch.optim.SparseAdam, "takes sparse gradients"),
)


def find_not_elementwise(optimizer: torch.optim.Optimizer | None) -> str | None:
    """What about an optimizer needs whole parameters, as what follows "found", or None."""
    if optimizer is None:
        return "no optimizer"
    name = type(optimizer).__name__
    for kind, why in _WHY_NOT:
        if isinstance(optimizer, kind):
            return f"{name}, which {why}"
    if type(optimizer) not in ELEMENTWISE and getattr(type(optimizer), "elementwise", False) is not True:
        return f"{name}, of which this version does not know that it treats every element by itself"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} with differentiable=True, whose step is a part of a graph"
    return None


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What the optimizer keeps from step to step on this rank, scalars left out."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
