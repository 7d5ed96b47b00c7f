"""What the ranks of the switch tests do: plans that change between steps, each against DDP that never changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from drift_checks import CHECKS as DRIFT_CHECKS
from interplay_harness import (
    ADAM,
    SGD,
    Side,
    batch,
    clone,
    compare,
    guarded,
    loss_of,
    mlp,
    outcome,
    ranks_agree,
    same,
    steps,
    told,
    with_ddp,
    with_plan,
)
from session_checks import plan_of
from step_checks import raised
from torch import Tensor, nn
from torch.nn import functional

from runtime.plan import PlanBucket, PlanWorld


def switch(side: Side, group: int, at_step: int | None = None) -> None:
    """To buckets of `group` gradients, where the side has a plan."""
    if side.session is not None:
        side.session.switch(plan_of(side.model, group), at_step)


def against_ddp(
    loop: Callable[[Side], Any],
    make: Callable[[], nn.Module] = mlp,
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
    **options: Any,
) -> dict[str, bool]:
    """The same loop both ways; with DDP its switches do nothing."""
    outcomes = []
    for side in (with_ddp(make(), optimizer, **options), with_plan(make(), optimizer, group=1)):
        outcomes.append(outcome(side, loop(side)))
        side.close()
    return compare(*outcomes)


def between_steps() -> dict[str, bool]:
    """At once, and at steps to come, with both ways to zero."""

    def loop(side: Side) -> None:
        steps(side, range(3))
        switch(side, 3)
        steps(side, range(3, 5))
        switch(side, 100, at_step=8)
        steps(side, range(5, 10))
        switch(side, 2)
        for step in range(10, 13):
            side.optimizer.zero_grad(set_to_none=False)
            loss_of(side, step).backward()
            if step == 11:
                switch(side, 4)  # between backward and the update
            side.optimizer.step()

    results = {f"SGD, {what}": good for what, good in against_ddp(loop).items()}
    return results | {f"Adam, {what}": good for what, good in against_ddp(loop, optimizer=ADAM).items()}


def accumulated() -> dict[str, bool]:
    """In the middle of accumulation: at once after a backward in `no_sync`, and due at the next step."""
    kept: list[bool] = []

    def loop(side: Side) -> None:
        for step in range(4):
            side.optimizer.zero_grad(set_to_none=step % 2 == 0)
            for micro in range(3):
                with side.no_sync() if micro < 2 else contextlib.nullcontext():
                    loss_of(side, 10 * step + micro).backward()
                if micro == step % 2:
                    gradients = [p.grad for p in side.model.parameters()]
                    values = clone(gradients)
                    switch(side, step + 2, at_step=step + 1 if step == 2 else None)
                    kept.append(all(p.grad is g for p, g in zip(side.model.parameters(), gradients, strict=True)))
                    kept.append(same(values, gradients))
            side.optimizer.step()

    return against_ddp(loop) | {"`.grad` is what it was": all(kept)}


class Choosing(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor, use: int) -> Tensor:
        """(batch, 6) → (batch, 3)."""
        y: Tensor = self.layers[0](x) + self.layers[use](x)
        return y


def unused_since() -> dict[str, bool]:
    """A layer that only a backward in `no_sync` used, on rank 1 alone, before the switch; and one that nobody used."""

    def loop(side: Side) -> None:
        for step in range(3):
            side.optimizer.zero_grad(set_to_none=True)
            with side.no_sync():
                x, y = batch(10 * step)
                functional.cross_entropy(side.forward(x, dist.get_rank()), y).backward()
            switch(side, step + 2)
            x, y = batch(10 * step + 1)
            functional.cross_entropy(side.forward(x, 0), y).backward()
            side.optimizer.step()

    return against_ddp(loop, Choosing, find_unused_parameters=True)


def hooks_on(parameter: nn.Parameter) -> int:
    """How many hooks the node has that accumulates its gradient."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    mine = node.register_hook(lambda *_: None)
    mine.remove()
    return len(mine.hooks_dict_ref())


def kept_gradients() -> dict[str, bool]:
    """What a script holds of the old plan's gradients stays as it was while the new plan trains."""
    side = with_plan(mlp(), group=2)
    assert side.session is not None
    steps(side, range(2))
    held = [p.grad for p in side.model.parameters()]
    looked_at = [g.detach().view(-1) for g in held if g is not None]
    values = clone(held)
    side.optimizer.zero_grad()
    switch(side, 3)
    steps(side, range(2, 5))
    results = {
        "held": same(values, held),
        "looked at": same([g.reshape(-1) for g in values], looked_at),
        "moved on": not same(values, [p.grad for p in side.model.parameters()]),
        "one hook each": {hooks_on(p) for p in side.model.parameters()} == {1},
    }
    side.close()
    results["no hook after detach"] = {hooks_on(p) for p in side.model.parameters()} == {0}
    return results


def session_follows() -> dict[str, bool]:
    """Counter, plan, report and state after switches."""
    side = with_plan(mlp(), group=1)
    session = side.session
    assert session is not None
    old, new = session.plan, plan_of(side.model, 3)
    steps(side, range(3))
    results = {"three steps": session.step == 3 and session.report().steps == 3}
    session.switch(new, at_step=5)
    results["not yet"] = session.plan is old and session.state_dict()["plan"] == old.digest()
    steps(side, range(3, 5))
    results["at its step"] = session.plan == new and session.step == 5 and session.report().steps == 0
    results["state"] = session.state_dict() == {"plan": new.digest(), "ranks": dist.get_world_size()}
    loss = loss_of(side, 5)
    session.switch(plan_of(side.model, 2))
    loss.backward()  # its forward was the old plan's
    side.optimizer.step()
    report = session.report()
    results["report"] = report.steps == 1 and len(report.buckets) == 3 and report.forward_us > 0.0
    session.switch(old, at_step=7)
    session.switch(new, at_step=8)  # in place of the first
    steps(side, range(6, 8))
    results["replaced"] = session.plan == new
    session.switch(old, at_step=9)
    side.close()
    return results | {"ranks agree": ranks_agree(clone(dict(side.model.named_parameters())))}


def refusals() -> dict[str, bool]:
    """Each said alike on both ranks; afterwards all is as if nobody had asked, also a switch that was due."""
    rank = dist.get_rank()
    messages: dict[str, tuple[str, list[str]]] = {}

    def loop(side: Side) -> None:
        steps(side, range(3))
        session = side.session
        if session is None:
            return steps(side, range(3, 8))
        model, good = side.model, plan_of(side.model, 3)
        short = plan_of(model, 1, buckets=(PlanBucket(gradients=good.gradients[:-1]),))
        other = plan_of(nn.Sequential(nn.Linear(2, 2)), 1)
        unknown = plan_of(model, 1, buckets=(PlanBucket(gradients=good.gradients, algorithm="gossip"),))
        session.switch(good, at_step=6)

        def case(name: str, words: list[str], plan: Any, at_step: Any = None) -> None:
            messages[name] = raised(lambda: session.switch(plan, at_step)), ["PlanMismatch", *words]

        case("past", ["at_step: found 2, but 3 steps are done; expected 3 or later"], good, 2)
        case("no step", ["at_step: found 'soon', expected the number of a step"], good, "soon")
        case("plans", ["ranks hold different plans"], plan_of(model, 2 + rank))
        case("steps", ["different steps to change plans at", "rank 0: 7, rank 1: 8"], good, 7 + rank)
        case("ranks", ["made for 7 ranks, found 2"], plan_of(model, 3, world=PlanWorld(ranks=7)))
        case("on one rank", ["rank 1: the plan was made for 7 ranks"],
             plan_of(model, 3, world=PlanWorld(ranks=7)) if rank else good)  # fmt: skip
        case("short", ["trainable in the model but not in the plan: 0.weight"], short)
        case("other model", ["another model", "not in the plan: 2.weight"], other)
        case("collective", ["all_reduce/gossip, which is unknown here"], unknown)
        case("file", ["/nowhere/plan.json: no such file"], "/nowhere/plan.json")
        steps(side, range(3, 8))
        assert session.plan == good

    results = against_ddp(loop)
    side = with_plan(mlp())
    session, plan = side.session, plan_of(side.model, 3)
    assert session is not None
    inside: list[str] = []
    loss = loss_of(side, 0)
    loss.register_hook(lambda _: inside.append(raised(lambda: session.switch(plan))))
    loss.backward()
    messages["inside"] = inside[0], ["InputError", "while a backward runs"]
    side.close()
    messages["detached"] = raised(lambda: session.switch(plan)), ["InputError", "detached"]
    for name, (message, words) in messages.items():
        results |= {f"{name}: {what}": good for what, good in told(message, words).items()}
    return results


def after_an_exception() -> dict[str, bool]:
    """A backward that raised on all ranks, then a switch, then steps."""

    def loop(side: Side) -> None:
        steps(side, range(2))
        if side.session is not None:

            def fail(_gradient: Tensor) -> None:
                raise ArithmeticError("on purpose")

            handle = side.model[2].weight.register_hook(fail)
            with contextlib.suppress(ArithmeticError):
                loss_of(side, 2).backward()
            handle.remove()
            switch(side, 3)
        steps(side, range(2, 5))

    return against_ddp(loop)


def frozen_meanwhile() -> dict[str, bool]:
    """A parameter that was frozen after attach is the new plan's still, and thaws."""

    def loop(side: Side) -> None:
        first = next(iter(side.model.parameters()))
        steps(side, range(2))
        first.requires_grad_(False)
        side.optimizer.zero_grad()
        if side.session is not None:
            buckets = tuple(reversed(side.session.plan.buckets))
            side.session.switch(plan_of(side.model, 1, buckets=buckets))
        steps(side, range(2, 4))
        first.requires_grad_(True)
        steps(side, range(4, 6))

    return against_ddp(loop, find_unused_parameters=True)


CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    check.__name__: check
    for check in (
        *(between_steps, accumulated, unused_since, kept_gradients, session_follows, refusals),
        *(after_an_exception, frozen_meanwhile),
    )
}


def run() -> dict[str, dict[str, bool]]:
    """All checks in one start of processes."""
    return {name: guarded(check) for name, check in (CHECKS | DRIFT_CHECKS).items()}
