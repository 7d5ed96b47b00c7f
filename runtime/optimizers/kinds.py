"""Kinds of optimizers: the one that a wrapper holds, elementwise ones, and those that hardly depend on sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from runtime.optimizers.lamb import LAMB
from runtime.optimizers.layerwise import LayerwiseOptimizer
from runtime.optimizers.units import BY_MATRIX, kind_name, unit_of


def inner_optimizer(optimizer: object) -> torch.optim.Optimizer | None:
    """Return the optimizer whose step calls hooks: itself, or a wrapper's; None where it is not clear which."""
    seen: list[object] = []
    while optimizer is not None and all(optimizer is not one for one in seen):
        attributes = getattr(optimizer, "__dict__", {})
        # A wrapper may be derived from Optimizer, and not initialized as one.
        if isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in attributes:
            return optimizer
        seen.append(optimizer)
        held = {id(value): value for value in attributes.values() if isinstance(value, torch.optim.Optimizer)}
        named = attributes.get("optimizer")
        optimizer = (
            next(iter(held.values())) if len(held) == 1 else named if callable(getattr(named, "step", None)) else None
        )
    return None


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""An optimizer, or several of one model with disjoint parameters."""


def each_of(given: Optimizers | None) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers of a model one by one, as they were given; none of None."""
    return tuple(given) if isinstance(given, Sequence) else () if given is None else (given,)


def inner_optimizers(given: object) -> tuple[torch.optim.Optimizer, ...]:
    """Return the inner optimizer of one object, or of each of a sequence, in order; none of None."""
    found = map(inner_optimizer, given if isinstance(given, Sequence) else (given,))
    return tuple(one for one in found if one is not None)


def find_missing(given: Optimizers | None, parameters: Mapping[str, nn.Parameter]) -> str | None:
    """Return the name of a parameter that is in no group of the optimizer, or of several, or None."""
    groups = [group for one in each_of(given) for group in one.param_groups]
    known = {id(parameter) for group in groups for parameter in group["params"]}
    return next((name for name, parameter in parameters.items() if id(parameter) not in known), None)


_WHY_NOT: tuple[tuple[type[torch.optim.Optimizer], str], ...] = (
    (LayerwiseOptimizer, "scales the step of each layer by norms of the whole layer"),
    (torch.optim.LBFGS, "compares whole gradients of several backwards"),
    (torch.optim.Adafactor, "keeps sums over rows and columns of whole matrices"),
    (torch.optim.SparseAdam, "takes sparse gradients"),
)


def find_not_elementwise(optimizer: torch.optim.Optimizer | None) -> str | None:
    """Return what about an optimizer needs whole parameters, as what follows "found", or None."""
    if optimizer is None:
        return "no optimizer"
    name = type(optimizer).__name__
    for kind, why in _WHY_NOT:
        if isinstance(optimizer, kind):
            return f"{name}, which {why}"
    unit = unit_of(optimizer)
    if unit == "matrix":
        return (
            f"{name}, which {BY_MATRIX.get(kind_name(optimizer), 'declares whole parameters as the unit of its work')}"
        )
    if unit is None:
        return f"{name}, of which this version does not know that it treats every element by itself"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} with differentiable=True, whose step is a part of a graph"
    return None


ADAPTIVE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.Muon, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
    torch.optim.Rprop, LAMB,
)  # fmt: skip
"""Optimizers of torch and of this package, and those derived from them, whose steps hardly depend on the size of
gradients."""
