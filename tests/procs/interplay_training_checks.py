"""Optimizers, schedulers and checkpoints around an attached model."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from interplay_harness import (
    ADAM,
    SGD,
    Side,
    batch,
    clone,
    compare,
    like_ddp,
    loss_of,
    mlp,
    outcome,
    ranks_agree,
    same,
    steps,
    with_ddp,
    with_plan,
)
from session_checks import plan_of
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

import runtime

STEPS = 4
LBFGS_TOLERANCE = 1e-9
"""LBFGS in float64 divides by small curvatures: differences of the last bit grow by some orders over its iterations."""


def param_groups() -> dict[str, bool]:
    """Groups with their own rate and decay, and one that joins later: a layer that was frozen until then."""

    def make() -> nn.Module:
        return mlp()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = list(parameters)
        groups = [{"params": [first], "lr": 0.3, "weight_decay": 0.1}, {"params": rest[:-2], "nesterov": True}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    def loop(side: Side) -> None:
        side.model[4].requires_grad_(False)
        steps(side, range(2))
        side.model[4].requires_grad_(True)
        side.optimizer.add_param_group({"params": list(side.model[4].parameters()), "lr": 0.01})
        steps(side, range(2, STEPS))

    return like_ddp(loop, make, optimizer, find_unused_parameters=True)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


def scheduler(name: str) -> dict[str, bool]:
    """Rates after every step; the plateau is found in the loss averaged over ranks by the script."""

    def loop(side: Side) -> list[float]:
        schedule = SCHEDULERS[name](side.optimizer)
        rates = []
        for step in range(6):
            side.optimizer.zero_grad()
            loss = loss_of(side, step)
            loss.backward()
            side.optimizer.step()
            metric = loss.detach().clone()
            dist.all_reduce(metric)
            schedule.step(*((metric,) if name == "ReduceLROnPlateau" else ()))
            rates.append(side.optimizer.param_groups[0]["lr"])
        return rates

    return like_ddp(loop)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
}


def optimizer(name: str) -> dict[str, bool]:
    """Optimizers with other states and implementations."""
    return like_ddp(lambda side: steps(side, range(STEPS)), mlp, OPTIMIZERS[name])


def closure(make_optimizer: Callable[..., torch.optim.Optimizer]) -> dict[str, bool]:
    """`optimizer.step(closure)` of an optimizer that only hands the loss back: each rank gets its own."""

    def loop(side: Side) -> list[Any]:
        found = []
        for step in range(STEPS):

            def evaluate(step: int = step) -> Tensor:
                side.optimizer.zero_grad()
                loss = loss_of(side, step)
                loss.backward()
                return loss

            found.append(clone(side.optimizer.step(evaluate)))
        return found

    return like_ddp(loop, mlp, make_optimizer)


def lbfgs(line_search: str | None) -> dict[str, bool]:
    """LBFGS against DDP whose closure averages the loss itself, and against one process on all ranks' batches."""

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        rate = 0.05 if line_search is None else 0.5  # without a search larger steps diverge, whoever averages
        return torch.optim.LBFGS(parameters, lr=rate, max_iter=6, history_size=4, line_search_fn=line_search)

    def train(side: Side, averaged: bool, whole: bool) -> list[Any]:
        found = []
        for step in range(3):

            def evaluate(step: int = step) -> Tensor:
                side.optimizer.zero_grad()
                x, y = everyone(step) if whole else batch(step)
                loss = functional.cross_entropy(side.forward(x.double()), y)
                loss.backward()
                if averaged:
                    loss = loss.detach() / dist.get_world_size()
                    dist.all_reduce(loss)
                return loss

            found.append(clone(side.optimizer.step(evaluate)))
        return found

    outcomes = []
    reference, planned = with_ddp(mlp().double(), make_optimizer), with_plan(mlp().double(), make_optimizer)
    alone = mlp().double()
    single = Side(alone, alone, make_optimizer(alone.parameters()), None)
    for side, averaged, whole in ((reference, True, False), (planned, False, False), (single, False, True)):
        outcomes.append(outcome(side, train(side, averaged, whole)))
    planned.close()
    results = {}
    for name, expected in (("DDP", outcomes[0]), ("one process", outcomes[2])):
        for kind in ("parameters", "returned"):
            results[f"{kind} of {name}"] = same(expected[kind], outcomes[1][kind], LBFGS_TOLERANCE)
    results["ranks agree"] = ranks_agree({kind: outcomes[1][kind] for kind in ("parameters", "optimizer")})
    results["undone by detach"] = float(planned.optimizer.step(lambda: _own_loss(planned))) == 1.0 + dist.get_rank()
    return results


def everyone(step: int) -> tuple[Tensor, Tensor]:
    """All ranks' batches, one after the other."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, batch(step))
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def _own_loss(side: Side) -> Tensor:
    side.model.zero_grad(set_to_none=False)
    return torch.tensor(1.0 + dist.get_rank())


def _saved(side: Side) -> io.BytesIO:
    file = io.BytesIO()
    state: dict[str, Any] = {"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict()}
    if side.session is not None:
        state["session"] = side.session.state_dict()
    torch.save(state, file)
    file.seek(0)
    return file


def checkpoint(saved_by: str, continued_by: str) -> dict[str, bool]:
    """Saved with torch.save while attached (or from DDP), loaded into a fresh model and optimizer, and continued."""
    sides: dict[str, Callable[..., Side]] = {"DDP": with_ddp, "plan": with_plan}
    uninterrupted = with_ddp(mlp(), ADAM)
    steps(uninterrupted, range(STEPS))
    first = sides[saved_by](mlp(), ADAM)
    steps(first, range(2))
    file = _saved(first)
    first.close()
    state = torch.load(file, weights_only=True)
    results = {"plain names": set(state["model"]) == set(mlp().state_dict())}
    model = mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state["model"])
    second = sides[continued_by](model, ADAM)
    second.optimizer.load_state_dict(state["optimizer"])
    if second.session is not None and "session" in state:
        second.session.load_state_dict(state["session"])
    steps(second, range(2, STEPS))
    results |= compare(outcome(uninterrupted), outcome(second))
    second.close()
    return results


def load_while_attached() -> dict[str, bool]:
    """`load_state_dict` of model and optimizer in the middle of training: back to an earlier state."""

    def loop(side: Side) -> None:
        steps(side, range(2))
        file = _saved(side)
        steps(side, range(2, STEPS))
        state = torch.load(file, weights_only=True)
        side.model.load_state_dict(state["model"])
        side.optimizer.load_state_dict(state["optimizer"])
        steps(side, range(4, 6))

    return like_ddp(loop, mlp, ADAM)


def detach_and_reattach() -> dict[str, bool]:
    """Three sessions with other buckets over one training; gradients left in `.grad` are carried over."""
    reference = with_ddp(mlp(), ADAM)
    steps(reference, range(6))
    model = mlp()
    made = ADAM(model.parameters())
    results = {}
    for number, group in enumerate((1, 6, 3)):
        session = runtime.attach(model, made, plan_of(model, group), timeout_s=60)
        side = Side(model, model, made, session)
        steps(side, range(2 * number, 2 * number + 2))
        kept = clone([p.grad for p in model.parameters()])
        session.detach()
        results[f"gradients stay {number}"] = same(kept, clone([p.grad for p in model.parameters()]))
    results["no hook left"] = not any(
        (
            model._forward_hooks,
            model._forward_pre_hooks,
            made._optimizer_step_pre_hooks,
            made._optimizer_step_post_hooks,
        )
    ) and not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    return results | compare(outcome(reference), outcome(Side(model, model, made, None)))


def two_optimizers(first: Callable[..., torch.optim.Optimizer]) -> dict[str, bool]:
    """One model, one optimizer for a part of its parameters and one for the rest; `attach` is given the first."""

    def loop(side: Side) -> list[Any]:
        held = {id(parameter) for group in side.optimizer.param_groups for parameter in group["params"]}
        other = ADAM([parameter for parameter in side.model.parameters() if id(parameter) not in held])
        for step in range(STEPS):
            side.optimizer.zero_grad()
            other.zero_grad()
            loss_of(side, step).backward()
            side.optimizer.step()
            other.step()
        return [clone(other.state_dict()["state"])]

    return like_ddp(loop, mlp, first)


def muon(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Of matrices, which are all that it takes."""
    return torch.optim.Muon([parameter for parameter in parameters if parameter.ndim == 2], lr=0.02)


TRAINING_CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    "param_groups": param_groups,
    **{f"scheduler-{name}": partial(scheduler, name) for name in SCHEDULERS},
    **{f"optimizer-{name}": partial(optimizer, name) for name in OPTIMIZERS},
    **{f"closure-{name}": partial(closure, made) for name, made in (("SGD", SGD), ("AdamW", ADAM))},
    **{f"lbfgs-{search}": partial(lbfgs, search) for search in (None, "strong_wolfe")},
    **{
        f"checkpoint-{first} to {then}": partial(checkpoint, first, then)
        for first, then in (("plan", "plan"), ("plan", "DDP"), ("DDP", "plan"))
    },
    "load_while_attached": load_while_attached,
    "detach_and_reattach": detach_and_reattach,
    "two_optimizers": partial(two_optimizers, lambda parameters: SGD(list(parameters)[:4])),
    "two_optimizers-Muon": partial(two_optimizers, muon),
}
