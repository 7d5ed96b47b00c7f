"""Optimizers inside others: objects with a `step` that hold the one that updates weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from interplay_harness import ADAM, SGD, Side, like_ddp, loss_of, mlp, steps, told
from session_checks import plan_of
from sharded_checks import SHARED
from step_checks import raised
from torch import Tensor, nn

import runtime
from runtime.plan import DelaySpec, PlanWorld


class Prepared(torch.optim.Optimizer):
    """Derived from Optimizer and not initialized as one, as accelerate's is; only forwards."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.steps += 1
        return self.optimizer.step(closure)


class Lookahead:
    """Weights of its own, which it goes half of the way to with every second step; an ordinary object."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.optim, self.count = optim, 0
        self.slow = [p.detach().clone() for group in optim.param_groups for p in group["params"]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optim, name)

    @torch.no_grad()
    def step(self) -> None:
        self.optim.step()
        self.count += 1
        if self.count % 2 == 0:
            parameters = [p for group in self.optim.param_groups for p in group["params"]]
            for slow, parameter in zip(self.slow, parameters, strict=True):
                parameter.copy_(slow.lerp_(parameter, 0.5))


class ByHand:
    """Knows no optimizer."""

    param_groups = ()

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}}

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)


WRAPPED: dict[str, Callable[..., Any]] = {
    "prepared": lambda p: Prepared(ADAM(p)),
    "lookahead": lambda p: Lookahead(SGD(p)),
    "twice": lambda p: Prepared(Prepared(SGD(p))),
    "by hand": ByHand,
}


def wrapped(name: str) -> dict[str, Any]:
    """An exact plan."""

    def loop(side: Side) -> Any:
        steps(side, range(6))
        if side.session is None:
            return side.optimizer.state_dict()
        return side.session.optimizer_state_dict()

    return like_ddp(loop, mlp, WRAPPED[name])


def wrapped_lbfgs() -> dict[str, bool]:
    """Ranks decide by the average of the closures' losses; DDP's closure averages by itself."""

    def loop(side: Side) -> list[float]:
        def closure() -> Tensor:
            side.optimizer.zero_grad()
            loss = loss_of(side, 0)
            loss.backward()
            if side.session is None:
                torch.distributed.all_reduce(loss.data)
                loss.data /= torch.distributed.get_world_size()
            return loss

        return [float(side.optimizer.step(closure)) for _ in range(2)]  # type: ignore[arg-type]

    make = lambda p: Prepared(torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"))  # noqa: E731
    found = like_ddp(loop, mlp, make, tolerance=1e-9)
    return {kind: good for kind, good in found.items() if kind in ("parameters", "ranks agree")}


def refused() -> dict[str, Any]:
    """Where a plan does a part of the step itself."""
    model = mlp()
    ranks = torch.distributed.get_world_size()
    delay = {
        "delay": DelaySpec(steps=1, warmup_steps=1), "accuracy": "relaxed",
        "world": PlanWorld(ranks=ranks, nodes=ranks),
    }  # fmt: skip
    results: dict[str, Any] = {}
    for what, changes in {"delay": delay, "shared": {"updates": SHARED}}.items():
        for name in WRAPPED:
            plan, made = plan_of(model, 2, **changes), WRAPPED[name](model.parameters())
            message = raised(partial(runtime.attach, model, made, plan, timeout_s=20))
            words = [f"but found {type(made).__name__}, a wrapper", "give attach the one inside"]
            results |= {f"{what}, {name}: {key}": good for key, good in told(message, words).items()}
    return results


WRAPPER_CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"wrapped-{name}": partial(wrapped, name) for name in WRAPPED},
    "wrapped-LBFGS": wrapped_lbfgs,
    "wrapped-refused": refused,
}
