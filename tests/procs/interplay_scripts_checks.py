"""Models whose forward is no Python: scripts, traces, a part of a model that is one, graphs of fx and torch.export."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from interplay_harness import Side, like_ddp, loss_of, mlp, ranks_agree, steps, with_ddp
from interplay_hooks_checks import KINDS
from session_checks import plan_of
from sharded_checks import LATE
from torch import nn

import planner
import runtime

STEPS = 4


def _normalized() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def _scripted() -> nn.Module:
    scripted: nn.Module = torch.jit.script(_normalized())
    return scripted


def _with_a_scripted_part() -> nn.Module:
    model = mlp()
    model[2] = torch.jit.script(model[2])
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "script": _scripted,
    "trace": lambda: torch.jit.trace(_normalized(), torch.ones(5, 6)),
    "a part": _with_a_scripted_part,
    "fx": lambda: torch.fx.symbolic_trace(_normalized()),
    "export": lambda: torch.export.export(mlp(), (torch.ones(5, 6),)).module(),
}


def like_ddp_with(kind: str) -> dict[str, Any]:
    """Accumulation too, whose `no_sync` the forward's hooks see."""

    def loop(side: Side) -> None:
        for step in range(STEPS):
            side.optimizer.zero_grad()
            with side.no_sync():
                loss_of(side, 100 + step).backward()
            loss_of(side, step).backward()
            side.optimizer.step()

    loop(with_ddp(MODELS[kind]()))  # the first calls of a script measure it, and give other bits
    return like_ddp(loop, MODELS[kind])


def scripted_by(kind: str) -> dict[str, Any]:
    """A script with other plans, and without one."""
    model = _scripted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session: runtime.Session
    if kind == "without":
        session = planner.attach(model, optimizer, timeout_s=60)
    else:
        plan = plan_of(model, 2, updates=LATE) if kind == "late gather" else KINDS[kind](model)
        session = runtime.attach(model, optimizer, plan, timeout_s=60, drift=False, guard=False)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    steps(Side(model, model, optimizer, session), range(STEPS))
    results = {"seen": bool(session._recorder.steps) and session._recorder.steps[-1].forward is not None}
    with session.global_weights():
        after = [parameter.detach().clone() for parameter in model.parameters()]
    session.detach()
    moved = any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    return results | {"ranks agree": ranks_agree(after), "trained": moved}


SCRIPT_CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"script-{kind}": partial(like_ddp_with, kind) for kind in MODELS},
    **{f"script-by {kind}": partial(scripted_by, kind) for kind in (*KINDS, "late gather", "without")},
}
