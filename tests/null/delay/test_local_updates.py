"""Local updates between pulls: what every one keeps to, and each against its formula."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.delay.local_updates import COMPENSATION, LOCAL_UPDATES, MEMORY, LocalStep
from runtime.plan import DelaySpec

SPEC = DelaySpec(steps=2, alpha=2.0, beta=0.5, local_lr_scale=4.0)
RATES = {"lr": 0.125, "momentum": 0.5, "weight_decay": 0.25}


def a_step(**changes: object) -> LocalStep:
    """Two parameters of two shapes."""
    generator = torch.Generator().manual_seed(1)
    weights, gradients, before = (
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3,), (2, 2))] for _ in range(3)
    )
    step = LocalStep(["a", "b"], weights, gradients, before, RATES, 0.25, SPEC)
    return replace(step, **changes)  # type: ignore[arg-type]


def by_formula(name: str, step: LocalStep) -> list[Tensor]:
    """The new weights, written down from the papers."""
    found = []
    lr, decay = step.rates["lr"] * step.spec.local_lr_scale, step.rates["weight_decay"]
    for w, g, pre in zip(step.weights, step.gradients, step.before, strict=True):
        if name == "glu":
            sync = (pre - w) * (1 - step.rates["momentum"]) / step.lr_sum if step.lr_sum else torch.zeros_like(w)
            found.append(w - lr * (step.spec.alpha * g + decay * w + step.spec.beta * sync))
        elif name == "sgd":
            found.append(w - lr * (g + decay * w))
        else:
            found.append(w - lr * (g + COMPENSATION / (g.abs() + 1e-7) * g * g * (w - pre) + decay * w))
    return found


@pytest.mark.parametrize("name", LOCAL_UPDATES)
def test_each_is_its_formula_and_changes_nothing_but_weights(name: str) -> None:
    for changes in ({}, {"lr_sum": 0.0}, {"rates": RATES | {"weight_decay": 0.0}}):
        step = a_step(**changes)
        kept = [tensor.clone() for tensor in (*step.gradients, *step.before)]
        expected = by_formula(name, step)
        LOCAL_UPDATES[name](step)
        for found, wanted in zip(step.weights, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(a, b) for a, b in zip(kept, (*step.gradients, *step.before), strict=True))


@pytest.mark.parametrize("name", LOCAL_UPDATES)
def test_no_rate_is_no_step(name: str) -> None:
    step = a_step(rates=RATES | {"lr": 0.0})
    kept = [weight.clone() for weight in step.weights]
    LOCAL_UPDATES[name](step)
    assert all(torch.equal(a, b) for a, b in zip(kept, step.weights, strict=True))


def test_a_pull_shows_the_mean_global_gradient() -> None:
    """k steps of heavy-ball SGD with one gradient move weights by lr·k·g / (1 − m) in the limit: GLU finds g."""
    lr, momentum, k = 0.125, 0.5, 4
    g = torch.tensor([1.0, -3.0], dtype=torch.float64)
    before = torch.zeros(2, dtype=torch.float64)
    pulled = before - lr * k * g / (1 - momentum)
    spec = replace(SPEC, alpha=0.0, beta=1.0, local_lr_scale=1.0)
    rates = {"lr": lr, "momentum": momentum, "weight_decay": 0.0}
    weights = [pulled.clone()]
    LOCAL_UPDATES["glu"](LocalStep(["a"], weights, [torch.zeros_like(g)], [before], rates, lr * k, spec))
    torch.testing.assert_close((pulled - weights[0]) / lr, g)


def test_compensation_remembers_the_mean_square() -> None:
    step = a_step()
    LOCAL_UPDATES["dc_asgd"](step)
    first = step.gradients[0][0].item() ** 2
    following = replace(step, gradients=[2.0 * gradient for gradient in step.gradients])
    LOCAL_UPDATES["dc_asgd"](following)
    assert math.isclose(step.state["a"][0].item(), MEMORY * first + (1 - MEMORY) * 4 * first, rel_tol=1e-12)
