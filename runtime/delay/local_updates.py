"""How a rank updates its own weights between two pulls of the global ones: GLU.

Source: SSD-SGD (Xu et al., arXiv 2012.05396), Eq. 8 and 9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.delay.chunks import blocks
from runtime.plan import DelaySpec


def glu(
    spec: DelaySpec,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    before: Sequence[Tensor],
    rates: Mapping[str, Any],
    lr_sum: float,
) -> None:
    """Update with the global gradient, in place: w ← w − lr_loc·(α·g + wd·w + β·grad_sync), lr_loc = local_lr_scale·lr.

    grad_sync = (pre_weight − w)·(1 − momentum) / (lr·k) is the mean global gradient that a pull shows, and what the
    local steps since then come to. The paper's Eq. 8 prints a plus sign, with the sign of descent inside.

    Args:
        spec: α, β and the scale of the learning rate.
        weights: this rank's, of the parameters of one of the optimizer's groups; changed in place.
        gradients: this rank's own, of its last backward; one for each weight, in its shape.
        before: `pre_weight`, the global weights of a pull before; likewise.
        rates: the group's hyperparameters now.
        lr_sum: of the learning rates of the k steps that led from `before` to the global weights after them (lr·k); 0
            leaves grad_sync out.
    """
    decay, local_lr = rates["weight_decay"], float(rates["lr"]) * spec.local_lr_scale
    for own, gradient, pulled in blocks(weights, gradients, before):
        direction = torch._foreach_mul(gradient, spec.alpha)
        if decay:
            torch._foreach_add_(direction, own, alpha=decay)
        if lr_sum > 0.0:
            apart = torch._foreach_sub(pulled, own)
            torch._foreach_mul_(apart, (1.0 - rates["momentum"]) / lr_sum)
            torch._foreach_add_(direction, apart, alpha=spec.beta)
        torch._foreach_add_(own, direction, alpha=-local_lr)
