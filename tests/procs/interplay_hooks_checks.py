"""What scripts do in hooks on parameters that they register at any time: before attach, after it, around a switch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from interplay_harness import SGD, Side, batch, clone, like_ddp, loss_of, ranks_agree, same, steps
from lossy_reference import TOPK, lossy
from session_checks import plan_of
from step_checks import raised
from torch import nn

import runtime
from runtime.plan import DelaySpec, PlanWorld, StepPlan, UpdatePlan

STEPS = 4
Hook = Callable[[nn.Parameter], None]


def large_and_small() -> nn.Sequential:
    """Two weights above `runtime.core.buckets.LARGE_BYTES`, and small parameters between them."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 128), nn.Tanh(), nn.Linear(128, 129), nn.Tanh(), nn.Linear(129, 130), nn.Linear(130, 3)
    )


def _clamped(parameter: nn.Parameter) -> None:
    parameter.grad.clamp_(-0.002, 0.002)


def _added(parameter: nn.Parameter) -> None:
    parameter.grad.add_(0.01 * (1 + dist.get_rank()))


def _replaced(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad.clamp(-0.002, 0.002) * 3.0


def _data(parameter: nn.Parameter) -> None:
    parameter.grad.data = parameter.grad.data * 0.5


def _let_go(parameter: nn.Parameter) -> None:
    if parameter.dim() == 1:
        parameter.grad = None


IN_HOOKS: dict[str, Hook] = {
    "clamped": _clamped,
    "added": _added,
    "replaced": _replaced,
    "data": _data,
    "let go": _let_go,
    "seen": lambda parameter: None,
}


def register(model: nn.Module, hook: Hook) -> list[Any]:
    """Registers a hook on every parameter; what it finds in `.grad` each time, before it does anything."""
    seen: list[Any] = []

    def looking(parameter: nn.Parameter) -> None:
        seen.append(clone(parameter.grad))
        hook(parameter)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(looking)
    return seen


def in_hooks(how: str) -> dict[str, bool]:
    """Registered after attach, on all parameters; gradients are zeroed in both ways, and buckets change on the way."""

    def loop(side: Side) -> list[Any]:
        steps(side, [0])
        seen = register(side.model, IN_HOOKS[how])
        for step in range(1, 2 * STEPS):
            if side.session is not None and step == STEPS:
                side.session.switch(plan_of(side.model, 3))
            side.optimizer.zero_grad(set_to_none=step % 3 > 0)
            loss_of(side, step).backward()
            side.optimizer.step()
        return sorted(seen, key=lambda tensor: tuple(tensor.shape))  # the order of arrival is autograd's

    return like_ddp(loop, large_and_small)


def around_a_switch() -> dict[str, bool]:
    """Registered before attach, after it and after a switch, each on some parameters; then taken off."""

    def loop(side: Side) -> None:
        handles = []
        for step in range(STEPS):
            if side.session is not None and step == 2:
                side.session.switch(plan_of(side.model, 1))
            parameters = list(side.model.parameters())[step::STEPS]
            handles += [one.register_post_accumulate_grad_hook(_replaced) for one in parameters]
            steps(side, [step])
        for handle in handles:
            handle.remove()
        steps(side, [STEPS])

    def make() -> nn.Module:
        model = large_and_small()
        model[0].weight.register_post_accumulate_grad_hook(_added)
        return model

    return like_ddp(loop, make)


def in_accumulation() -> dict[str, bool]:
    """Hooks in each micro-batch, inside of `no_sync` and outside."""

    def loop(side: Side) -> None:
        register(side.model, _clamped)
        for step in range(STEPS):
            side.optimizer.zero_grad()
            with side.no_sync():
                loss_of(side, 2 * step).backward()
            loss_of(side, 2 * step + 1).backward()
            side.optimizer.step()

    return like_ddp(loop, large_and_small)


def on_nodes() -> dict[str, bool]:
    """Hooks on the nodes that accumulate gradients, and on a layer's output and module, beside those on parameters."""

    def loop(side: Side) -> list[Any]:
        seen: list[Any] = []
        weight = side.model[2].weight
        node = torch.autograd.graph.get_gradient_edge(weight).node
        node.register_hook(lambda *_: seen.append(float(weight.grad.abs().sum()) > 0))
        node.register_prehook(lambda gradients: (gradients[0] * 2.0,))
        side.model[4].register_full_backward_hook(lambda _m, i, _o: (i[0] * 0.5,))
        weight.register_post_accumulate_grad_hook(_added)
        weight.register_hook(lambda gradient: gradient + 0.1)
        steps(side, range(STEPS))
        return seen

    return like_ddp(loop, large_and_small)


def at_others(how: str) -> dict[str, bool]:
    """Hooks look at, keep or change gradients that are on their way already: DDP has copied those before."""

    def loop(side: Side) -> list[Any]:
        found: list[Any] = []
        parameters = list(side.model.parameters())

        def look(*_: Any) -> None:
            found.append([clone(p.grad) for p in parameters])

        def clamp_all(_: nn.Parameter) -> None:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-0.002, 0.002)

        layer = side.model[2]
        node = parameters[2].expand_as(parameters[2]).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        hook_outputs = partial(layer.register_forward_hook, lambda _m, _i, o: o.register_hook(look) and None)
        first = int(how != "in hooks on outputs from the first step on")
        steps(side, range(first))
        register: dict[str, Callable[[], Any]] = {
            "seen": lambda: parameters[2].register_post_accumulate_grad_hook(look),
            "kept": lambda: [p.register_post_accumulate_grad_hook(lambda p: found.append(p.grad)) for p in parameters],
            "changed": lambda: parameters[2].register_post_accumulate_grad_hook(clamp_all),
            "in module hooks": lambda: layer.register_full_backward_hook(look),
            "in hooks on outputs": hook_outputs,
            "in hooks on outputs from the first step on": hook_outputs,
            "in hooks on nodes": lambda: node.register_hook(look),
        }
        register[how]()
        for step in range(first, STEPS):
            side.optimizer.zero_grad(set_to_none=step % 2 > 0)
            loss_of(side, step).backward()
            side.optimizer.step()
        return sorted(found, key=lambda one: tuple(one.shape)) if how == "kept" else found

    return like_ddp(loop, large_and_small)


def stepping() -> dict[str, bool]:
    """An optimizer for each parameter steps in a hook and lets go of `.grad`: on each rank alone, as with DDP."""

    def loop(side: Side) -> list[Any]:
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in side.model.parameters()}

        def step_now(parameter: nn.Parameter) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step_now)
        for step in range(STEPS):
            loss_of(side, step).backward()
        return []

    results = like_ddp(loop, large_and_small)
    del results["ranks agree"]  # they do not with DDP
    return results


def converted(how: str) -> dict[str, bool]:
    """Parameters get another dtype and their own back, which gives them new nodes; as with DDP that never saw it."""

    def loop(side: Side) -> None:
        part = side.model if how != "part" else side.model[2]
        if how == "hooked":
            register(side.model, _clamped)
        for step in range(STEPS):
            if side.session is not None and step == 2:
                part.bfloat16().to(torch.get_default_dtype())
            elif step == 2:  # DDP would no longer exchange: only the values
                for parameter in part.parameters():
                    parameter.data.copy_(parameter.detach().bfloat16())
            steps(side, [step])
        other = torch.float64 if torch.get_default_dtype() == torch.float32 else torch.float32
        side.model.to(other)
        if side.session is not None:
            message = raised(lambda: side.model(batch(0)[0].to(other)).sum().backward())
            assert "when the model was attached" in message, message
        side.model.to(torch.get_default_dtype())
        side.optimizer.zero_grad()

    return like_ddp(loop, large_and_small)


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "exact": lambda model: plan_of(model, 3),
    "sparse": lambda model: lossy(plan_of(model, 3), [TOPK, None]),
    "sharded step": lambda model: plan_of(
        model, 3, updates=UpdatePlan(step=StepPlan(sharded=True)), interface=("sharded-step",)
    ),
    "delay": lambda model: plan_of(
        model, 3, accuracy="relaxed", delay=DelaySpec(steps=2, warmup_steps=2),
        world=PlanWorld(ranks=dist.get_world_size(), nodes=dist.get_world_size()),
    ),
}  # fmt: skip


def other_plans(kind: str) -> dict[str, bool]:
    """Hooks registered after attach do what those from before it do, with plans that send other things."""
    results = {}
    for how in ("clamped", "replaced", "added"):
        outcomes = []
        for late in (False, True):
            model = large_and_small()
            seen = [] if late else register(model, IN_HOOKS[how])
            optimizer = SGD(model.parameters())
            session = runtime.attach(model, optimizer, KINDS[kind](model), timeout_s=60, drift=False, guard=False)
            if late:
                seen = register(model, IN_HOOKS[how])
            steps(Side(model, model, optimizer, session), range(2 * STEPS))
            if kind != "delay":
                results[f"{how}, {late}: ranks agree"] = ranks_agree(list(model.parameters()))
            outcomes.append((clone(list(model.parameters())), seen))
            session.detach()
        results[how] = same(*outcomes)
    return results


HOOK_CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    **{f"in_hooks-{how}": partial(in_hooks, how) for how in IN_HOOKS},
    "in_hooks-around a switch": around_a_switch,
    "in_hooks-accumulated": in_accumulation,
    "in_hooks-on nodes": on_nodes,
    "in_hooks-stepping": stepping,
    **{
        f"in_hooks-at others, {how}": partial(at_others, how)
        for how in (
            *("seen", "kept", "changed", "in module hooks"),
            *("in hooks on outputs", "in hooks on outputs from the first step on", "in hooks on nodes"),
        )
    },
    **{f"in_hooks-{kind}": partial(other_plans, kind) for kind in KINDS},
    **{f"converted_and_back-{how}": partial(converted, how) for how in ("whole", "part", "hooked")},
}
