"""What ranks that share the optimizer's step refuse, and all of the checks in one start of processes."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from session_checks import plan_of
from sharded_checks import CHECKS as STEP_CHECKS
from sharded_checks import MAKERS, SHARED, Net, loss_of, made
from sharded_habits_checks import CHECKS as HABIT_CHECKS
from sharded_memory_checks import memory
from sharded_narrow_checks import CHECKS as NARROW_CHECKS
from step_checks import raised

import runtime
from runtime.optimizers import LARS
from runtime.plan import DelaySpec, Plan

CHECKS = {**STEP_CHECKS, **NARROW_CHECKS, **HABIT_CHECKS, "memory": memory}


def misfits() -> dict[str, str]:
    """What is refused, on all ranks alike."""

    class Own(torch.optim.SGD):
        """Nobody knows what it does."""

    def attach(make: Any, **changes: Any) -> str:
        model = Net().double()
        optimizer = None if make is None else make(list(model.parameters()))
        return raised(lambda: runtime.attach(model, optimizer, plan_of(model, 3, **({"updates": SHARED} | changes))))

    model, optimizer, session = made(True, MAKERS["AdamW"])
    loss_of(model, 0).backward()

    def in_backward(what: Any) -> str:
        handle = model.out.weight.register_post_accumulate_grad_hook(what)  # type: ignore[union-attr,operator]
        model.out.weight.grad = None  # else it is refused for what the hook would see  # type: ignore[union-attr]
        said = raised(lambda: loss_of(model, 1).backward())
        handle.remove()
        return said

    gradient = model.out.weight.grad  # type: ignore[union-attr]
    found = {
        "LARS": attach(lambda p: LARS(p, lr=0.1)),
        "LBFGS": attach(lambda p: torch.optim.LBFGS(p)),
        "Adafactor": attach(lambda p: torch.optim.Adafactor(p)),
        "subclass": attach(lambda p: Own(p, lr=0.1)),
        "none": attach(None),
        "differentiable": attach(lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True)),
        "unowned": attach(lambda p: torch.optim.SGD(p[1:], lr=0.1)),
        "delay": attach(
            lambda p: torch.optim.SGD(p, lr=0.1), accuracy="relaxed", delay=DelaySpec(steps=1, warmup_steps=1)
        ),
        "read": raised(lambda: gradient + 1.0),
        "histogram": raised(lambda: gradient.numpy()),
        "row": raised(lambda: gradient[0]),
        "dim": raised(lambda: gradient.norm(dim=0)),
        "transposed": raised(lambda: gradient.T),
        "said": repr(gradient),
        "norm in backward": in_backward(lambda _: [p.grad.norm() for p in model.parameters()]),
        "step in backward": in_backward(lambda _: optimizer.step()),
    }
    session.detach()
    return found


def deadline() -> str:
    """A rank that makes no step is waited for until the deadline; the last check, for it breaks the group."""
    model = Net().double()
    optimizer = MAKERS["AdamW"](model.parameters())
    plan: Plan = plan_of(model, 3, updates=SHARED)
    session = runtime.attach(model, optimizer, plan, timeout_s=2)
    loss_of(model, 0).backward()
    if dist.get_rank() == 1:
        time.sleep(4)
        return ""
    return raised(optimizer.step) if session.step == 1 else ""


def run() -> dict[str, Any]:
    """Everything."""
    results: dict[str, Any] = {name: check() for name, check in CHECKS.items()}
    if dist.get_world_size() == 2:
        results |= {"misfits": misfits(), "deadline": deadline()}
    return results
