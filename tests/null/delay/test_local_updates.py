"""The local update between pulls, GLU: against its formula, and what it keeps to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.delay.local_weights import glu
from runtime.plan import DelaySpec

SPEC = DelaySpec(steps=2, alpha=2.0, beta=0.5, local_lr_scale=4.0)
RATES = {"lr": 0.125, "momentum": 0.5, "weight_decay": 0.25}


def tensors() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(weights, gradients, `pre_weight`) of two parameters of two shapes."""
    generator = torch.Generator().manual_seed(1)
    weights, gradients, before = (
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3,), (2, 2))] for _ in range(3)
    )
    return weights, gradients, before


@pytest.mark.parametrize(
    ("lr_sum", "changes"), [(0.25, {}), (0.0, {}), (0.25, {"weight_decay": 0.0}), (0.25, {"lr": 0.0})]
)
def test_it_is_its_formula_and_changes_nothing_but_weights(lr_sum: float, changes: dict[str, Any]) -> None:
    rates = RATES | changes
    weights, gradients, before = tensors()
    kept = [tensor.clone() for tensor in (*gradients, *before)]
    expected = []
    for w, g, pre in zip(weights, gradients, before, strict=True):
        sync = (pre - w) * (1 - rates["momentum"]) / lr_sum if lr_sum else torch.zeros_like(w)
        expected.append(w - rates["lr"] * 4.0 * (2.0 * g + rates["weight_decay"] * w + 0.5 * sync))
    glu(SPEC, weights, gradients, before, rates, lr_sum)
    for found, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(kept, (*gradients, *before), strict=True))


def test_a_pull_shows_the_mean_global_gradient() -> None:
    """k steps of heavy-ball SGD with one gradient move weights by lr·k·g / (1 − m) in the limit: GLU finds g."""
    lr, momentum, k = 0.125, 0.5, 4
    g = torch.tensor([1.0, -3.0], dtype=torch.float64)
    before = torch.zeros(2, dtype=torch.float64)
    pulled = before - lr * k * g / (1 - momentum)
    spec = replace(SPEC, alpha=0.0, beta=1.0, local_lr_scale=1.0)
    rates = {"lr": lr, "momentum": momentum, "weight_decay": 0.0}
    weights = [pulled.clone()]
    glu(spec, weights, [torch.zeros_like(g)], [before], rates, lr * k)
    torch.testing.assert_close((pulled - weights[0]) / lr, g)
