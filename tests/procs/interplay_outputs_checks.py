"""Models that return what outlives the graph: their own parameters, views of them, inputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from interplay_harness import SGD, Side, batch, clone, like_ddp, mlp, with_plan
from interplay_hooks_checks import KINDS
from torch import Tensor, nn
from torch.nn import functional

import runtime

STEPS = 4


class Scaled(nn.Module):
    """Returns its logits beside a factor for them, which is a parameter, and nested once more."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how != "alone":
            self.net = mlp()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        """(batch, 6) → (batch, 3) and (3,)."""
        factor = self.scale.view(3) if self.how == "view" else self.scale
        if self.how == "alone":
            return {"nested": [factor]}
        return self.net(x), {"nested": [factor]}


def loss_of(side: Side, step: int) -> Tensor:
    """The factor is used apart from the logits, too, so that its gradient may come first."""
    x, y = batch(step)
    found = side.forward(x)
    logits, factor = (x[:, :3], found) if isinstance(found, dict) else found
    scale = factor["nested"][0]
    return functional.cross_entropy(logits * scale, y) + (scale - 2).square().mean()


def returned(how: str) -> dict[str, bool]:
    """Ordinary steps, accumulation with `no_sync`, forward and backward on different sides of it, uneven numbers."""

    def loop(side: Side) -> list[Any]:
        found = []
        for step in range(STEPS):
            side.optimizer.zero_grad()
            for micro in range(1 + (dist.get_rank() + step) % 3):  # not the same on all ranks
                with side.no_sync():
                    loss_of(side, 10 * step + micro).backward()
            found.append(clone([p.grad for p in side.model.parameters()]))
            loss = loss_of(side, 10 * step + 9)
            with side.no_sync() if step % 2 else nullcontext():
                loss.backward()
            side.optimizer.step()
        with side.no_sync():
            loss = loss_of(side, 99)
        loss.backward()
        return found

    return like_ddp(loop, partial(Scaled, how))


def no_hook_stays() -> dict[str, bool]:
    """On what a forward returned, after many of them and after detach; a graph from before detach is run after it."""
    side = with_plan(Scaled("parameter"))
    for step in range(STEPS):
        loss_of(side, step).backward()
    results = {"no hook while attached": not side.model.scale._backward_hooks}
    loss = loss_of(side, STEPS)
    side.close()
    loss.backward()
    return results | {"no hook after detach": not side.model.scale._backward_hooks}


def with_other_plans(kind: str) -> dict[str, bool]:
    """Micro-batches are as many steps as exchange: beside the same model that returns its logits alone."""
    outcomes = []
    for how in ("view", "parameter"):
        model = Scaled(how)
        optimizer = SGD(model.parameters())
        session = runtime.attach(model, optimizer, KINDS[kind](model), timeout_s=60, drift=False, guard=False)
        side = Side(model, model, optimizer, session)
        for step in range(2 * STEPS):
            optimizer.zero_grad()
            with session.no_sync():
                loss_of(side, 2 * step).backward()
            loss_of(side, 2 * step + 1).backward()
            optimizer.step()
        outcomes.append((session.step, clone(list(model.parameters()))))
        session.detach()
    (_, expected), (exchanged, found) = outcomes
    equal = all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return {"steps": exchanged == 2 * STEPS, "as with a view": equal}


OUTPUT_CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    **{f"returned-{how}": partial(returned, how) for how in ("parameter", "view", "alone")},
    "returned-no hook stays": no_hook_stays,
    **{f"returned-{kind}": partial(with_other_plans, kind) for kind in KINDS},
}
