"""Lines that work with DDP, on one rank alone too, beside the plan that is made by default: it is drop-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from interplay_harness import ADAM, Side, compare, loss_of, mlp, outcome, with_ddp
from torch import Tensor, nn

import planner
from planner.documents.profile import Profile, parse_profile
from runtime.checks.plan import dtype_name, trainable_parameters

STEPS = 4


def profile_of(model: nn.Module) -> Profile:
    """A step with AdamW whose update is so long that sharing it pays."""
    named = list(reversed(trainable_parameters(model).items()))
    gradients = [
        {"name": n, "layer": n, "numel": p.numel(), "dtype": dtype_name(p.dtype), "backward_us": 1e3} for n, p in named
    ]
    line = {"alpha_us": 50.0, "beta_us_per_byte": 1e-3}
    return parse_profile(
        {
            "schema": "planner.profile/1",
            "model": {"name": "test"},
            "world": {"ranks": dist.get_world_size()},
            "compute": {
                "forward_us": 3e3,
                "update_us": 8e3,
                "gradients": gradients,
                "optimizer": {
                    "name": "AdamW",
                    "adaptive": True,
                    "elementwise": True,
                    "holds_all": True,
                    "state_bytes": 8 * sum(p.numel() for _, p in named),
                },
            },
            "cluster": {
                "schema": "planner.cluster/1",
                "nodes": dist.get_world_size(),
                "collectives": {"all_reduce": line, "reduce_scatter": line, "all_gather": line},
            },
        }
    )


def loop(side: Side) -> dict[str, Any]:
    """What a script logs, saves and swaps: in turn on rank 0 and on the last rank alone, and on all of them."""
    alone: dict[str, Any] = {}
    first, second = side.model[0].bias, side.model[2].bias  # type: ignore[index]
    seen: list[Tensor] = []
    for step in range(STEPS):
        side.optimizer.zero_grad()
        loss_of(side, step).backward()
        gradients = [p.grad for p in side.model.parameters() if p.grad is not None]
        if dist.get_rank() == (0 if step % 2 else dist.get_world_size() - 1):
            alone[f"norms {step}"] = [gradient.norm() for gradient in gradients]
            alone[f"first rows {step}"] = [gradient[0].clone() for gradient in gradients]
            alone[f"as numbers {step}"] = [gradient.numpy().tolist() for gradient in gradients]
        seen += [gradient.abs().max() for gradient in gradients] + [gradient.mean() for gradient in gradients]
        side.optimizer.step()
        if dist.get_rank() == step % 2:
            alone[f"state {step}"] = side.optimizer.state_dict()
        first.data, second.data = second.data, first.data
    return {"on every rank": torch.stack(seen), "alone": alone}


def default_plan() -> dict[str, bool]:
    """Of a step where ranks that share the optimizer's step would be faster."""
    model = mlp()
    profile = profile_of(model)
    plan = planner.optimize(profile)
    results = {
        "sharing would pay": planner.optimize(profile, allow=["sharded-step"]).sharded,
        "drop-in": plan.interfaces == () and not plan.sharded,
    }
    outcomes = []
    optimizer = ADAM(model.parameters())
    session = planner.attach(model, optimizer, plan, timeout_s=60)
    for side in (with_ddp(mlp(), ADAM), Side(model, model, optimizer, session)):
        outcomes.append(outcome(side, loop(side)))
        side.close()
    return results | compare(*outcomes)


INTERFACE_CHECKS: dict[str, Callable[[], dict[str, bool]]] = {"drop_in": default_plan}
