"""LARS and LAMB as their papers print them: one parameter after the other, in float64, on no library's arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def lars_reference(
    weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]], rates: Sequence[float], *, momentum: float,
    weight_decay: float, trust_coefficient: float, nesterov: bool = False, adapted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """The weights after as many steps as there are rates; layers that are not adapted are not decayed either."""
    found = []
    for layer, start in enumerate(weights):
        w = start.detach().double().clone()
        v = torch.zeros_like(w)
        for gradient, lr in zip(gradients, rates, strict=True):
            g = gradient[layer].double()
            decay = weight_decay if adapted[layer] else 0.0
            ratio = 1.0
            w_norm, g_norm = (math.sqrt(float((t * t).sum())) for t in (w, g))
            if adapted[layer] and w_norm > 0.0 and g_norm + decay * w_norm > 0.0:
                ratio = trust_coefficient * w_norm / (g_norm + decay * w_norm)
            push = lr * ratio * (g + decay * w)
            v = momentum * v + push
            w = w - (momentum * v + push if nesterov else v)
        found.append(w)
    return found


def lamb_reference(
    weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]], rates: Sequence[float], *,
    betas: tuple[float, float], eps: float, weight_decay: float, bias_correction: bool, adapted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """See `lars_reference`."""
    found = []
    for layer, start in enumerate(weights):
        w = start.detach().double().clone()
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        for step, (gradient, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
            g = gradient[layer].double()
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g * g
            m_hat = m / (1 - betas[0] ** step) if bias_correction else m
            v_hat = v / (1 - betas[1] ** step) if bias_correction else v
            r = m_hat / (v_hat.sqrt() + eps) + (weight_decay if adapted[layer] else 0.0) * w
            w_norm, r_norm = (math.sqrt(float((t * t).sum())) for t in (w, r))
            ratio = w_norm / r_norm if adapted[layer] and w_norm > 0.0 and r_norm > 0.0 else 1.0
            w = w - lr * ratio * r
        found.append(w)
    return found


SHAPES = ((7, 5), (5,), (3, 2, 3, 3), (), (4, 4), (1, 9))
"""Of layers; scalars and vectors are excluded."""


def layers(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Parameters of `SHAPES`; the fifth one is zero, which has no direction to scale."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    with torch.no_grad():
        made[4].zero_()
    return made


def gradients_of(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Of `SHAPES`; equal on every rank."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator).to(dtype) * (0.1 + index) for index, shape in enumerate(SHAPES)]


def run(optimizer: Any, parameters: Sequence[torch.nn.Parameter], rates: Sequence[float], first: int = 0) -> None:
    """As many steps as there are rates."""
    for step, lr in enumerate(rates, start=first):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for parameter, gradient in zip(parameters, gradients_of(step, dtype=parameters[0].dtype), strict=True):
            parameter.grad = gradient
        optimizer.step()
