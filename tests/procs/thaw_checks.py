"""What ranks do with parameters that are frozen at attach and train later, in a run without a plan and with one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from interplay_harness import Side, compare, guarded, loss_of, mlp, outcome, ranks_agree, told
from online_checks import hurried, session_of
from session_checks import plan_of
from step_checks import raised
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import planner
from runtime.plan import Plan


def backbone(*, frozen: bool) -> nn.Sequential:
    """Only the last layer trains at first."""
    model = mlp()
    for layer in (model[0], model[2]):
        layer.requires_grad_(not frozen)
    return model


def without_ddp(plan: Plan | None = None, **options: Any) -> Side:
    model = backbone(frozen=True)
    optimizer = torch.optim.AdamW(model[4].parameters(), lr=1e-2)
    return Side(model, model, optimizer, planner.attach(model, optimizer, plan, **({"timeout_s": 60} | options)))


def with_ddp() -> Side:
    """DDP that was made while all parameters were trainable."""
    model = backbone(frozen=False)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    return Side(model, wrapped, torch.optim.AdamW(model[4].parameters(), lr=1e-2), None)


def thaw(side: Side, layer: int, rate: float) -> None:
    """As Lightning's BackboneFinetuning does."""
    thawed = side.model.get_submodule(str(layer)).requires_grad_(True)
    side.optimizer.add_param_group({"params": list(thawed.parameters()), "lr": rate})


def fine_tuned(side: Side, steps: int) -> list[Any]:
    """Thaw one layer after a third of the steps, the other in the midst of an accumulation; freeze one, and thaw it."""
    losses, first = [], side.model.get_submodule("0")
    for step in range(steps):
        side.optimizer.zero_grad()
        if step == steps // 3:
            thaw(side, 2, 3e-3)
        first.requires_grad_(first.weight.requires_grad and step != steps - 2)
        with side.no_sync():
            loss_of(side, 10_000 + step).backward()
        if step == steps // 2:
            thaw(side, 0, 1e-3)
        first.requires_grad_(step >= steps // 2)
        loss = loss_of(side, step)
        loss.backward()
        side.optimizer.step()
        losses.append(loss.detach())
    return losses


def like_ddp(way: Callable[[], AbstractContextManager[Any]], steps: int) -> dict[str, Any]:
    """All that is trained is averaged from its first step on; the run is planned again when there is more of it."""
    reference = with_ddp()
    expected = outcome(reference, fine_tuned(reference, steps))
    with way():
        side = without_ddp()
        found = outcome(side, fine_tuned(side, steps))
        session = session_of(side)
        assert session._pilot is not None
        story = session._pilot.story
        side.close()
    return {
        **compare(expected, found),
        f"told: {story}": sum("more to train" in line for line in story) == 2,
        "in buckets": len(session.plan.gradients) == 6,
    }


def not_planned() -> AbstractContextManager[Any]:
    return mock.patch.dict(os.environ, {"PLANNER": "off"})


def with_a_plan() -> dict[str, Any]:
    """What the given plan does not hold is refused, with an advice that can be followed inside frameworks."""
    side = without_ddp(plan_of(backbone(frozen=True), 2))
    thaw(side, 2, 1e-3)
    said = raised(lambda: loss_of(side, 0))
    side.close()
    return told(said, ["2.weight (frozen then, requires_grad now)", "attach without a plan", "PlannerStrategy()"])


def put_aside() -> dict[str, Any]:
    """`planner.compare` and the like may come while a layer is frozen that the plan holds; it is thawed after that."""
    side = without_ddp(plan_of(backbone(frozen=True), 2))
    session, head = session_of(side), side.model.get_submodule("4")
    head.get_parameter("bias").requires_grad_(False)
    with session._aside("test", nullcontext):
        loss_of(side, 0).backward()
    head.requires_grad_(True)
    side.optimizer.zero_grad()
    loss_of(side, 1).backward()
    results = {"averaged": ranks_agree([p.grad for p in head.parameters()]), "bias": head.bias.grad is not None}
    side.close()
    return results


def unlike() -> dict[str, Any]:
    """Ranks that thaw other layers are told so, alike, and nothing has changed."""
    side = without_ddp()
    thaw(side, 2 if dist.get_rank() else 0, 1e-3)
    said = raised(lambda: loss_of(side, 0))
    side.model.requires_grad_(False)
    side.model.get_submodule("4").requires_grad_(True)
    loss_of(side, 1).backward()
    agree = ranks_agree([p.grad for p in side.model.parameters()])
    side.close()
    return told(said, ["ranks hold different models"]) | {"goes on": agree}


def alone() -> dict[str, Any]:
    """Where one rank thaws a layer and the others do not, every rank ends at the deadline."""
    side = without_ddp(timeout_s=4)
    if dist.get_rank():
        thaw(side, 2, 1e-3)
    begun = time.monotonic()
    said = raised(lambda: loss_of(side, 0).backward())
    waited_s = time.monotonic() - begun
    words = "2.weight, 2.bias: requires_grad was set on this rank" if dist.get_rank() else "did not answer within 4 s"
    return {f"{words!r} in {said!r}": words in said, "in time": waited_s < 60}


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    "with DDP's buckets": lambda: like_ddp(not_planned, 12),
    "planned": lambda: like_ddp(hurried, 300),
    "with a plan": with_a_plan,
    "put aside": put_aside,
    "unlike": unlike,
    "alone": alone,
}


def run(names: list[str]) -> dict[str, dict[str, Any]]:
    """The results of these checks on this rank."""
    return {name: guarded(CHECKS[name]) for name in names}
