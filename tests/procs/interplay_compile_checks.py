"""`torch.compile` before and after attach, against DDP around the same compiled model.

The backend is aot_eager: it traces forward and backward as inductor does, without the minute that C++ takes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from interplay_harness import SGD, Side, batch, compare, loss_of, outcome, ranks_agree, with_ddp
from session_checks import plan_of
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import runtime

STEPS = 4
BACKEND = "aot_eager"


class Custom(nn.Module):
    """Not one of torch's own containers: dynamo takes those apart in another way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) → (batch, 3)."""
        return self.last(torch.relu(self.norm(self.first(x))))


def _stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {"custom": Custom, "sequential": _stack}


def _train(side: Side, forward: Callable[[Tensor], Tensor] | None = None) -> None:
    """With accumulation, so that compiled hooks would be noticed: they carry what `no_sync` was at the forward."""
    call = side.forward if forward is None else forward  # a compiled module has no truth value
    for step in range(STEPS):
        side.optimizer.zero_grad()
        for micro in range(2):
            x, y = batch(2 * step + micro)
            with side.no_sync() if micro == 0 else nullcontext():
                loss = functional.cross_entropy(call(x), y)
            loss.backward()
        side.optimizer.step()


def _attached(model: nn.Module, target: nn.Module) -> Side:
    made = SGD(model.parameters())
    return Side(model, target, made, runtime.attach(target, made, plan_of(target, 3), timeout_s=60))


def _before(model: nn.Module) -> Side:
    side = _attached(model, torch.compile(model, backend=BACKEND))
    _train(side)
    return side


def _fullgraph(model: nn.Module) -> Side:
    """No graph break in the compiled model: the session's hooks are around it."""
    side = _attached(model, torch.compile(model, backend=BACKEND, fullgraph=True))
    _train(side)
    return side


def _after(model: nn.Module) -> Side:
    side = _attached(model, model)
    _train(side, torch.compile(model, backend=BACKEND))
    return side


def _in_place(model: nn.Module) -> Side:
    model.compile(backend=BACKEND)
    side = _attached(model, model)
    _train(side)
    return side


def _blocks(model: nn.Module) -> Side:
    """A graph for each layer, so that gradients come one after the other."""
    for block in model.children():
        block.compile(backend=BACKEND)
    side = _attached(model, model)
    _train(side)
    return side


def _function(model: nn.Module) -> Side:
    side = _attached(model, model)
    _train(side, torch.compile(lambda x: 1.0 * model(x), backend=BACKEND))
    return side


def _whole_step(model: nn.Module) -> Side:
    """The step with its backward in one compiled function."""
    side = _attached(model, model)

    @torch.compile(backend=BACKEND)
    def step(x: Tensor, y: Tensor) -> None:
        functional.cross_entropy(model(x), y).backward()

    for number in range(STEPS):
        side.optimizer.zero_grad()
        for micro in range(2):
            with side.no_sync() if micro == 0 else nullcontext():
                step(*batch(2 * number + micro))
        side.optimizer.step()
    return side


def _warm(model: nn.Module) -> Side:
    """Compiled and run, then attached, then trained through the compiled model."""
    compiled = torch.compile(model, backend=BACKEND)
    with torch.no_grad():
        model.eval()
        compiled(batch(0)[0])
        model.train()
    side = _attached(model, compiled)
    _train(side)
    return side


WAYS: dict[str, Callable[[nn.Module], Side]] = {
    "before": _before,
    "fullgraph": _fullgraph,
    "after": _after,
    "in place": _in_place,
    "blocks": _blocks,
    "function": _function,
    "whole step": _whole_step,
    "warm": _warm,
}


def compiled(way: str, kind: str) -> dict[str, bool]:
    """Weights, statistics and optimizer state, and whether the session saw every step."""
    torch._dynamo.reset()
    reference_model = MODELS[kind]()
    made = SGD(reference_model.parameters())
    wrapped = DistributedDataParallel(torch.compile(reference_model, backend=BACKEND))
    reference = Side(reference_model, wrapped, made, None)
    _train(reference)
    torch._dynamo.reset()
    planned = WAYS[way](MODELS[kind]())
    assert planned.session is not None
    results = {"steps": planned.session.report().steps == STEPS}
    results |= compare(outcome(reference), outcome(planned))
    planned.close()
    return results


def detached_after_compile() -> dict[str, bool]:
    """A compiled model that was attached trains alone after detach, and attached again with others."""
    torch._dynamo.reset()
    model = Custom()
    compiled_model = torch.compile(model, backend=BACKEND)
    side = _attached(model, compiled_model)
    _train(side)
    side.close()
    reference = with_ddp(Custom())
    _train(reference)
    results = compare(outcome(reference), outcome(side))
    side.optimizer.zero_grad()
    loss_of(side, 90).backward()
    results["alone"] = not ranks_agree([p.grad for p in model.parameters()])
    again = _attached(model, compiled_model)
    again.optimizer.zero_grad()
    loss_of(again, 91).backward()
    results["again"] = ranks_agree([p.grad for p in model.parameters()])
    again.close()
    return results


COMPILE_CHECKS: dict[str, Callable[[], Any]] = {
    **{way: partial(compiled, way, "custom") for way in WAYS},
    **{f"{way}-sequential": partial(compiled, way, "sequential") for way in ("after", "whole step")},
    "detached": detached_after_compile,
}
