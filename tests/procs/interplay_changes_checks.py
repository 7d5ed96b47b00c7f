"""Models that are changed while they are attached: refused by name, or borne."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from interplay_harness import (
    Side,
    batch,
    clone,
    like_ddp,
    loss_of,
    mlp,
    ranks_agree,
    steps,
    told,
    with_plan,
)
from session_checks import plan_of
from step_checks import raised
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

import runtime

CURE = "session.detach(), profile the model again"


def _unfreeze(side: Side) -> None:
    side.model[0].weight.requires_grad_(True)


def _replace_parameter(side: Side) -> None:
    side.model[2].weight = nn.Parameter(torch.zeros(8, 8))


def _replace_layer(side: Side) -> None:
    side.model[4] = nn.Linear(8, 3)


def _add_layer(side: Side) -> None:
    side.model.append(nn.Linear(3, 3))


def _add_parameter(side: Side) -> None:
    side.model[1].register_parameter("scale", nn.Parameter(torch.ones(1)))


def _assign(side: Side) -> None:
    side.model.load_state_dict(mlp().state_dict(), assign=True)


def _shard(side: Side) -> None:
    fully_shard(side.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


AFTER_ATTACH: dict[str, tuple[Callable[[Side], None], list[str]]] = {
    "unfrozen": (_unfreeze, ["0.weight (frozen then, requires_grad now)", "attach without a plan"]),
    "replaced parameter": (_replace_parameter, ["2.weight (replaced by another parameter)", CURE]),
    "replaced layer": (_replace_layer, ["4.weight (replaced", "4.bias (replaced", CURE]),
    "added layer": (_add_layer, ["5.weight (new)", CURE]),
    "added parameter": (_add_parameter, ["1.scale (new)", CURE]),
    "assigned state": (_assign, ["0.bias (replaced", "2.weight (replaced"]),
    "fully_shard": (_shard, ["wrapped in FSDP", "after attach"]),
}


def _partly_frozen() -> nn.Sequential:
    model = mlp()
    model[0].weight.requires_grad_(False)
    return model


def after_attach(case: str) -> dict[str, Any]:
    """The message of a model that was changed between two steps; nothing has been sent then, on any rank."""
    change, words = AFTER_ATTACH[case]
    side = with_plan(_partly_frozen())
    steps(side, range(2))
    change(side)
    sent: list[Any] = []
    assert side.session is not None
    launch, broadcast = side.session._exchange.launcher.communicator.launch, dist.broadcast
    side.session._exchange.launcher.communicator.launch = lambda *_: sent.append("bucket")  # type: ignore[method-assign]
    dist.broadcast = lambda *_, **__: sent.append("buffers")
    try:
        message = raised(lambda: loss_of(side, 2).backward())
    finally:
        side.session._exchange.launcher.communicator.launch, dist.broadcast = launch, broadcast  # type: ignore[method-assign]
    results = told(message, words) | {"nothing sent": not sent}
    with torch.no_grad():
        side.session.detach()
    return results


def without_forward() -> dict[str, Any]:
    """A new parameter in a model whose forward is never called itself (a method of its own is)."""

    class Method(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def loss(self, step: int) -> Tensor:
            x, y = batch(step)
            return functional.cross_entropy(self.inner(x), y)

    model = Method()
    session = runtime.attach(model, None, plan_of(model, 2), timeout_s=20)
    model.loss(0).backward()
    results = {"averaged": ranks_agree([p.grad for p in model.parameters()])}
    model.inner.append(nn.Linear(3, 3))
    results |= told(raised(lambda: model.loss(1).backward()), ["inner.5.weight (new)"])
    session.detach()
    return results


def _other_precision(side: Side) -> None:
    side.model.double() if side.model[0].weight.dtype == torch.float32 else side.model.float()


def _one_layer(side: Side) -> None:
    side.model[2].bfloat16()
    side.model[2].register_forward_pre_hook(lambda _m, x: (x[0].bfloat16(),))
    side.model[2].register_forward_hook(lambda _m, _x, y: y.to(side.model[0].weight.dtype))


CONVERSIONS: dict[str, tuple[Callable[[Side], None], str]] = {
    "model": (_other_precision, "4."),
    "one layer": (_one_layer, "2."),
}


def converted(case: str, set_to_none: bool) -> dict[str, Any]:
    """`model.double()` and `model[2].bfloat16()` after attach; with gradients, which are converted too, or without."""
    convert, name = CONVERSIONS[case]
    side = with_plan(mlp())
    steps(side, [0])
    side.optimizer.zero_grad(set_to_none=set_to_none)
    convert(side)

    def step() -> None:
        x, y = batch(1)
        functional.cross_entropy(side.forward(x.to(side.model[0].weight.dtype)), y).backward()

    results = told(raised(step), [name, "now and was", "convert the model before attach"])
    side.close()
    return results


def wrapped_later() -> dict[str, Any]:
    """DDP around an attached model, or around a module that holds it."""
    results: dict[str, Any] = {}
    for name, wrap in (("itself", lambda m: m), ("inside", lambda m: nn.Sequential(m, nn.Linear(3, 3)))):
        side = with_plan(mlp())
        outer = DistributedDataParallel(wrap(side.model))
        message = raised(lambda outer=outer: outer(batch(0)[0]))  # type: ignore[misc]
        found = told(message, ["called inside a DistributedDataParallel", "session.detach()"])
        results |= {f"{name}: {key}": good for key, good in found.items()}
        side.close()
    return results


def benign_changes() -> dict[str, bool]:
    """What may change after attach: layers without parameters, layers taken off, parametrizations, frozen newcomers."""

    def loop(side: Side) -> list[Any]:
        steps(side, [0])
        side.model[1] = nn.ReLU()
        steps(side, [1])
        side.model.append(nn.Linear(3, 3).requires_grad_(False))
        nn.init.eye_(side.model[5].weight)
        nn.init.zeros_(side.model[5].bias)
        steps(side, [2])
        side.model[2], taken = nn.Identity(), side.model[2]
        steps(side, [3])
        side.model[2] = taken
        steps(side, [4])
        return [clone(list(taken.parameters()))]

    return like_ddp(loop, mlp, find_unused_parameters=True)


def parametrized_later() -> dict[str, Any]:
    """Weight normalization put on after attach makes new parameters; put on before, it trains as with DDP."""
    side = with_plan(mlp())
    parametrizations.weight_norm(side.model[0])
    results = told(raised(lambda: loss_of(side, 0).backward()), ["0.parametrizations.weight.original", "(new)"])
    side.close()

    def make() -> nn.Module:
        model = mlp()
        parametrizations.weight_norm(model[0])
        return model

    return results | like_ddp(lambda one: steps(one, range(3)), make)


CHANGE_CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    **{case: partial(after_attach, case) for case in AFTER_ATTACH},
    "without forward": without_forward,
    **{
        f"converted {case}{'' if none else ' with gradients'}": partial(converted, case, none)
        for case in CONVERSIONS
        for none in (True, False)
    },
    "wrapped in DDP": wrapped_later,
    "harmless": benign_changes,
    "parametrized": parametrized_later,
}
