"""Parameters and buffers that a model has DDP ignore: experts of a rank's own, which no rank sends to another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from interplay_harness import SGD, Side, clone, loss_of, mlp, outcome, ranks_agree, same, steps, told, with_ddp
from interplay_hooks_checks import KINDS
from session_checks import plan_of
from sharded_checks import LATE
from step_checks import raised
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import planner
import runtime
from runtime.checks.plan import model_fingerprint

STEPS = 5
IGNORED = ["expert.weight", "expert.bias", "expert.bank", "own", ".own"]
"""The root module's own parameter by both names: DDP takes the first where it broadcasts, the second for gradients."""


class Experts(nn.Module):
    """A layer and a buffer that each rank has of its own, of other shapes than on other ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        rank = dist.get_rank()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.frozen = nn.Parameter(torch.full((8,), float(rank)), requires_grad=False)
        self.register_buffer("seen", torch.full((8,), float(rank)))
        torch.manual_seed(1 + rank)
        self.expert = nn.Linear(8, 8 * (1 + rank))
        self.expert.register_buffer("bank", torch.randn(8 + rank))
        self.own = nn.Parameter(torch.randn(8))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, IGNORED)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) → (batch, 3)."""
        middle = self.expert(torch.tanh(self.first(x)) + self.own + self.frozen + self.seen)
        logits: Tensor = self.last(middle.unflatten(1, (-1, 8)).mean(1) * self.expert.bank[0])
        return logits


def split(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies of what ranks share, and of what each has of its own."""
    state = clone(dict(model.state_dict()))
    return {n: t for n, t in state.items() if n not in IGNORED}, {n: t for n, t in state.items() if n in IGNORED}


def experts(how: str) -> dict[str, Any]:
    """As with DDP, with a plan and without; ranks differ where the model says so, and nowhere else."""
    reference = with_ddp(Experts())
    steps(reference, range(STEPS))
    model = Experts()
    before = split(model)[1]
    optimizer = SGD(p for p in model.parameters() if p.requires_grad)
    plan = plan_of(model, 2) if how == "with a plan" else None
    side = Side(model, model, optimizer, planner.attach(model, optimizer, plan, timeout_s=60))
    own_kept = same(split(model)[1], before)
    steps(side, range(STEPS))
    expected, found = outcome(reference), outcome(side)
    side.close()
    tolerance = 0.0 if dist.get_world_size() == 2 else 1e-12
    shared, own = split(model)
    return {
        **{what: same(expected[what], found[what], tolerance) for what in expected},
        "not broadcast": own_kept,
        "shared": ranks_agree(shared),
        "own": not any(ranks_agree(own[name]) for name in own),
    }


def experts_by(kind: str) -> dict[str, Any]:
    """With plans of other kinds: the optimizer of each rank updates its own by the gradients of its own."""
    model = Experts()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    plan = plan_of(model, 2, updates=LATE) if kind == "late gather" else KINDS[kind](model)
    session = runtime.attach(model, optimizer, plan, timeout_s=60, drift=False, guard=False)
    side, results = Side(model, model, optimizer, session), {}
    own = [model.expert.weight, model.expert.bias, model.own]
    for step in range(STEPS):
        mine = [parameter.detach().clone() for parameter in own]
        optimizer.zero_grad()
        loss = loss_of(side, step)
        expected = torch.autograd.grad(loss, own, retain_graph=True)
        loss.backward()
        results[f"{step}: gradients"] = all(torch.equal(p.grad, g) for p, g in zip(own, expected, strict=True))
        optimizer.step()
        moved = [before.add(g, alpha=-0.1) for before, g in zip(mine, expected, strict=True)]
        results[f"{step}: weights"] = all(torch.equal(p.detach(), w) for p, w in zip(own, moved, strict=True))
    with session.global_weights():
        results["shared"] = ranks_agree(split(model)[0])
    session.detach()
    return results


def unlike_models() -> dict[str, Any]:
    """A frozen parameter of another shape on each rank that no rank has DDP ignore: said before anything is sent."""
    model = mlp()
    model.register_parameter("extra", nn.Parameter(torch.ones(1 + dist.get_rank()), requires_grad=False))
    message = raised(lambda: runtime.attach(model, None, plan_of(model, 2), timeout_s=20))
    return told(message, ["ranks hold different parameters and buffers", "_set_params_and_buffers_to_ignore_for_model"])


def one_fingerprint() -> dict[str, Any]:
    """A plan of the model without what it ignores is a plan of it."""
    model = Experts()
    print_ = model_fingerprint(model)
    del model.expert, model.own
    return {"fingerprint": model_fingerprint(model) == print_}


IGNORED_CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"ignored-{how}": partial(experts, how) for how in ("with a plan", "without")},
    **{f"ignored-{kind}": partial(experts_by, kind) for kind in (*KINDS, "late gather")},
    "ignored-fingerprint": one_fingerprint,
    "refused-unlike models": unlike_models,
}
