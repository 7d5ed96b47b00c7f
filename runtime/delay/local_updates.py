"""How a rank updates its own weights between two pulls of the global ones. `LOCAL_UPDATES` is the only list of ways.

All of them work on lists of tensors of one parameter group, in place. Sources: SSD-SGD (Xu et al., arXiv 2012.05396),
Eq. 8 and 9; DC-ASGD (Zheng et al., ICML 2017), Eq. 10 and its adaptive form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from runtime.delay.chunks import blocks
from runtime.plan import DelaySpec

COMPENSATION, MEMORY, TINY = 2.0, 0.95, 1e-7
"""Of DC-ASGD-a: the variance control λ₀, the moving average's memory, and what keeps its root from zero."""


@dataclass(frozen=True)
class LocalStep:
    """What a local update works on; lists have one tensor for each parameter of a group."""

    names: Sequence[str]
    weights: Sequence[Tensor]
    """This rank's; changed in place."""
    gradients: Sequence[Tensor]
    """This rank's own, of its last backward."""
    before: Sequence[Tensor]
    """`pre_weight`: the global weights of a pull before."""
    rates: Mapping[str, Any]
    """The group's hyperparameters now."""
    lr_sum: float
    """Of the learning rates of the k steps that led from `before` to the global weights after them: lr · k."""
    spec: DelaySpec
    state: dict[str, Tensor] = field(default_factory=dict)
    """The updater's own, by name; it is saved with the session's state."""

    @property
    def local_lr(self) -> float:
        """lr_loc of the paper."""
        return float(self.rates["lr"]) * self.spec.local_lr_scale


LocalUpdate = Callable[[LocalStep], None]


def glu(step: LocalStep) -> None:
    """Global gradient for local update: w ← w − lr_loc·(α·g + wd·w + β·grad_sync).

    grad_sync = (pre_weight − w)·(1 − momentum) / (lr·k) is the mean global gradient that a pull shows, and what the
    local steps since then come to. The paper's Eq. 8 prints a plus sign, with the sign of descent inside.
    """
    decay, sync = step.rates["weight_decay"], step.lr_sum > 0.0
    for weights, gradients, before in blocks(step.weights, step.gradients, step.before):
        direction = torch._foreach_mul(gradients, step.spec.alpha)
        if decay:
            torch._foreach_add_(direction, weights, alpha=decay)
        if sync:
            apart = torch._foreach_sub(before, weights)
            torch._foreach_mul_(apart, (1.0 - step.rates["momentum"]) / step.lr_sum)
            torch._foreach_add_(direction, apart, alpha=step.spec.beta)
        torch._foreach_add_(weights, direction, alpha=-step.local_lr)


def sgd(step: LocalStep) -> None:
    """Plain SGD of the rank's own gradients: w ← w − lr_loc·(g + wd·w)."""
    for weights, gradients in blocks(step.weights, step.gradients):
        direction = gradients
        if step.rates["weight_decay"]:
            direction = list(torch._foreach_add(gradients, weights, alpha=step.rates["weight_decay"]))
        torch._foreach_add_(weights, direction, alpha=-step.local_lr)


def dc_asgd(step: LocalStep) -> None:
    """Delay-compensated: w ← w − lr_loc·(g + λ·g⊙g⊙(w − pre_weight) + wd·w), λ = λ₀ / √(mean square of g)."""
    for name, weight, gradient, before in zip(step.names, step.weights, step.gradients, step.before, strict=True):
        square = gradient * gradient
        mean = step.state.get(name)
        mean = square.clone() if mean is None else mean.mul_(MEMORY).add_(square, alpha=1.0 - MEMORY)
        step.state[name] = mean
        compensation = square.mul_(weight - before).div_(mean.sqrt().add_(TINY)).mul_(COMPENSATION)
        direction = compensation.add_(gradient).add_(weight, alpha=step.rates["weight_decay"])
        weight.add_(direction, alpha=-step.local_lr)


LOCAL_UPDATES: Mapping[str, LocalUpdate] = MappingProxyType({"glu": glu, "sgd": sgd, "dc_asgd": dc_asgd})
"""Name → update. Add one here and the contract test covers it."""
