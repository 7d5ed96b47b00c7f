"""What scripts do with `.grad` itself: zeroed, replaced, deleted, set before backward, kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from interplay_harness import ADAM, SGD, Side, clone, like_ddp, loss_of, mlp, same, steps, told, with_plan
from interplay_hooks_checks import KINDS
from step_checks import raised
from torch import Tensor

import runtime

STEPS = 4


def zero_grad(how: str) -> dict[str, bool]:
    """Each form of zeroing, also of the model instead of the optimizer, and none at all."""

    def loop(side: Side) -> None:
        for step in range(STEPS):
            if how == "model":
                side.model.zero_grad()
            elif how != "never":
                side.optimizer.zero_grad(set_to_none=how == "none" or (how == "in turn" and step % 2 == 0))
            loss_of(side, step).backward()
            side.optimizer.step()

    return like_ddp(loop, optimizer=ADAM)


def _halved(side: Side) -> None:
    for parameter in side.model.parameters():
        parameter.grad = parameter.grad * 0.5


def _deleted(side: Side) -> None:
    del side.model[0].weight.grad
    side.model[2].bias.grad = None


def _in_place(side: Side) -> None:
    for parameter in side.model.parameters():
        parameter.grad.data.add_(0.01)
        parameter.grad.mul_(2.0)


def _data(side: Side) -> None:
    for parameter in side.model.parameters():
        parameter.grad.data = parameter.grad.data.clamp(-0.02, 0.02)


def _swapped(side: Side) -> None:
    first, second = side.model[0].bias, side.model[2].bias
    first.grad, second.grad = second.grad, first.grad


AFTER_BACKWARD: dict[str, Callable[[Side], None]] = {
    "halved": _halved,
    "deleted": _deleted,
    "in place": _in_place,
    "data": _data,
    "swapped": _swapped,
}


def edited_gradients(how: str, set_to_none: bool) -> dict[str, bool]:
    """`.grad` replaced, deleted or changed between backward and the update."""

    def loop(side: Side) -> None:
        for step in range(STEPS):
            side.optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(side, step).backward()
            AFTER_BACKWARD[how](side)
            side.optimizer.step()

    return like_ddp(loop)


def own_gradients(how: str) -> dict[str, bool]:
    """`.grad` set by the user before backward, which adds to it: every step, or once and zeroed in place after."""

    def loop(side: Side) -> None:
        for step in range(STEPS):
            side.optimizer.zero_grad(set_to_none=False)
            if how == "each step" or step == 1:
                for number, parameter in enumerate(side.model.parameters()):
                    own = torch.full_like(parameter, 0.01 * (number + dist.get_rank()))
                    parameter.grad = own.t().contiguous().t() if how == "transposed" and own.dim() == 2 else own
            if how == "some" and step == 1:
                side.model[2].weight.grad = None
            loss_of(side, step).backward()
            side.optimizer.step()

    return like_ddp(loop)


def detached_in_place() -> dict[str, bool]:
    """`.grad.detach_()` before zeroing, as `zero_grad` of old did it."""

    def loop(side: Side) -> None:
        for step in range(STEPS):
            for parameter in side.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.detach_()
                    parameter.grad.zero_()
            loss_of(side, step).backward()
            side.optimizer.step()

    return like_ddp(loop)


KEEP: dict[str, Callable[[Tensor], Tensor]] = {
    "cloned": Tensor.clone,
    "as they are": lambda gradient: gradient,
    "detached": Tensor.detach,
    "data": lambda gradient: gradient.data,
    "flattened": lambda gradient: gradient.view(-1),
    "numpy": lambda gradient: torch.from_numpy(gradient.numpy()),
    "DLPack": torch.from_dlpack,
}


def kept_gradients(how: str) -> dict[str, bool]:
    """Gradients of two losses kept side by side and joined (PCGrad); zero_grad lets go of them in between."""

    def loop(side: Side) -> None:
        for step in range(STEPS):
            kept = []
            for part in range(2):
                side.optimizer.zero_grad()
                loss_of(side, 2 * step + part).backward()
                kept.append([KEEP[how](p.grad) for p in side.model.parameters()])
            for parameter, first, second in zip(side.model.parameters(), *kept, strict=True):
                first, second = first.view(parameter.shape), second.view(parameter.shape)
                parameter.grad = first * (first * second > 0) + second
            side.optimizer.step()

    return like_ddp(loop)


def watched_gradients() -> dict[str, bool]:
    """Aliases of `.grad` made once follow gradients that are only ever zeroed in place."""

    def loop(side: Side) -> None:
        loss_of(side, 0).backward()
        aliases = [p.grad.detach() for p in side.model.parameters()]
        for step in range(STEPS):
            side.optimizer.zero_grad(set_to_none=False)
            loss_of(side, step).backward()
            side.optimizer.step()
            for parameter, alias in zip(side.model.parameters(), aliases, strict=True):
                parameter.data.sub_(alias, alpha=0.01)

    return like_ddp(loop)


def kept_with(kind: str) -> dict[str, bool]:
    """Gradients that DLPack keeps, with plans that send something else: what clones of them come to."""
    outcomes = []
    for keep in (Tensor.clone, torch.from_dlpack):
        model = mlp()
        optimizer = SGD(model.parameters())
        session = runtime.attach(model, optimizer, KINDS[kind](model), timeout_s=60, drift=False, guard=False)
        kept = []
        for step in range(2 * STEPS):
            optimizer.zero_grad()
            loss_of(Side(model, model, optimizer, session), step).backward()
            kept += [keep(p.grad) for p in model.parameters()]
            optimizer.step()
        outcomes.append((kept, clone(list(model.parameters()))))
        session.detach()
    return {"equal": same(*outcomes)}


def in_a_graph() -> dict[str, bool]:
    """The last `.grad`s are factors in the next loss, whose graph saves them; zero_grad lets go of them before."""

    def loop(side: Side) -> None:
        loss_of(side, 0).backward()
        for step in range(1, STEPS):
            parameters = list(side.model.parameters())
            turned = [
                (p * q.grad.mean() * q.grad.sum(0).sum()).sum()
                for p, q in zip(parameters, parameters[::-1], strict=True)
            ]
            late = sum((p * p.grad).sum() for p in parameters)
            side.optimizer.zero_grad()
            (loss_of(side, step) + 0.1 * sum(turned)).backward()
            with side.no_sync():
                (0.1 * late).backward()
            side.optimizer.step()

    return like_ddp(loop)


def kept_both_ways() -> dict[str, bool]:
    """One gradient is let go of and kept by DLPack, another of its bucket zeroed in place and looked at: refused."""
    side = with_plan(mlp())
    steps(side, [0])
    side.optimizer.zero_grad()
    loss_of(side, 1).backward()
    first, second = side.model[0].weight, side.model[0].bias
    kept = [torch.from_dlpack(first.grad), torch.from_dlpack(second.grad)]
    first.grad = None
    message = raised(lambda: loss_of(side, 2).backward())
    kept.clear()
    side.optimizer.zero_grad()
    steps(side, [2])
    side.close()
    return told(message, ["the gradient of 0.bias", "looked at through DLPack", ".grad.clone()"])


GRADIENT_CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    **{f"zero_grad-{how}": partial(zero_grad, how) for how in ("none", "zero", "in turn", "model", "never")},
    **{f"edited-{how}": partial(edited_gradients, how, True) for how in AFTER_BACKWARD},
    **{f"edited-{how}-zeroed": partial(edited_gradients, how, False) for how in AFTER_BACKWARD},
    "detached_in_place": detached_in_place,
    **{f"own-{how}": partial(own_gradients, how) for how in ("each step", "once", "some", "transposed")},
    **{f"kept-{how}": partial(kept_gradients, how) for how in KEEP},
    "kept-in a graph": in_a_graph,
    "kept-both ways": kept_both_ways,
    **{f"kept-{kind}": partial(kept_with, kind) for kind in ("sparse", "delay")},
    "watched": watched_gradients,
}
