"""What the ranks of the profile tests do."""

from __future__ import annotations

import io
import random
from contextlib import redirect_stderr
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from session_checks import convnet, images
from torch import Tensor, nn
from torch.nn import functional

from planner import profile_step
from runtime.errors import InputError


class Sleepy(nn.Module):
    """Layers of which one sleeps in backward, one is frozen and one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))
        self.frozen, self.unused = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 64) → (batch, 64)."""
        return self.third(Sleep.apply(self.frozen(self.second(self.first(x)))))


class Sleep(torch.autograd.Function):
    """The identity; its backward takes 20 ms."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        """x."""
        return x.clone()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        """The gradient, later."""
        import time

        time.sleep(0.02)
        return gradient


def profiles_of_known_times() -> dict[str, Any]:
    """Profiles the sleepy model, then adds to that; what it says on the way, and what is refused."""
    torch.manual_seed(0)
    model = Sleepy()
    x = torch.randn(8, 64)

    def step() -> None:
        model(x).sum().backward()

    said = io.StringIO()
    with redirect_stderr(said):
        profile = profile_step(model, step)
    refused = []
    other = nn.Linear(64, 64)
    for attempt in (
        lambda: profile_step(other, lambda: other(x).sum().backward(), add_to=profile),
        lambda: profile_step(model, step, accuracy="fast"),  # type: ignore[arg-type]
        lambda: profile_step(model, step, add_to=profile, compile="eager"),
    ):
        try:
            attempt()
        except InputError as error:
            refused.append(str(error))
    relaxed = profile_step(model, step, accuracy="relaxed", add_to=profile)
    return {"profile": profile, "relaxed": relaxed, "said": said.getvalue(), "refused": refused}


def leaves_all_as_found() -> dict[str, bool]:
    """Profiles a model in the middle of its training; compares everything with before."""
    torch.manual_seed(dist.get_rank())  # ranks differ, and must go on differing
    model = convnet()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = images(0)
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    model[1].eval()
    before = _state(model, optimizer)
    identities = [id(parameter.grad) for parameter in model.parameters()]

    def step() -> None:
        optimizer.zero_grad()
        torch.rand(1), random.random(), np.random.rand()
        functional.cross_entropy(model(x), y).backward()

    profile_step(model, step, optimizer)
    after = _state(model, optimizer)
    results = {key: _equal(before[key], after[key]) for key in before}
    results["same gradient objects"] = identities == [id(parameter.grad) for parameter in model.parameters()]
    results["no hooks"] = not model._forward_hooks and not model._forward_pre_hooks
    return results


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    return {
        "parameters and buffers": [t.clone() for t in model.state_dict().values()],
        "gradients": [p.grad.clone() for p in model.parameters()],
        "momenta": momenta,
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "training flags": [module.training for module in model.modules()],
        "torch generator": torch.get_rng_state(),
        "python generator": random.getstate(),
        "numpy generator": np.random.get_state()[1].tolist(),
    }


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list) and a and isinstance(a[0], Tensor):
        return all(map(torch.equal, a, b))
    return bool(a == b)


def both() -> dict[str, Any]:
    """The two checks in one start of processes."""
    return {**profiles_of_known_times(), "left": leaves_all_as_found()}
