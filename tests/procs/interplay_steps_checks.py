"""What scripts do between two updates: accumulation, clipping, scaling, unused parameters, errors in backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from interplay_harness import (
    ADAM,
    LOW_PRECISION_TOLERANCE,
    SGD,
    Side,
    batch,
    clone,
    compare,
    like_ddp,
    loss_of,
    mlp,
    outcome,
    same,
    steps,
    told,
    with_ddp,
    with_plan,
)
from interplay_hooks_checks import KINDS
from step_checks import raised
from torch import Tensor, nn
from torch.nn import functional

import runtime
from runtime.errors import CommunicationError

STEPS = 4


def accumulation() -> dict[str, bool]:
    """Three micro-batches per step; the last one exchanges."""

    def loop(side: Side) -> None:
        for step in range(STEPS):
            side.optimizer.zero_grad()
            for micro in range(3):
                with side.no_sync() if micro < 2 else nullcontext():
                    (loss_of(side, 3 * step + micro) / 3).backward()
            side.optimizer.step()

    return like_ddp(loop)


def several_backwards() -> dict[str, bool]:
    """Accumulation without `no_sync`: every backward exchanges."""

    def loop(side: Side) -> None:
        for step in range(STEPS):
            side.optimizer.zero_grad()
            for micro in range(3):
                loss_of(side, 3 * step + micro).backward()
            side.optimizer.step()

    return like_ddp(loop)


def forward_decides() -> dict[str, bool]:
    """`.grad` of each rank with forward and backward inside or outside of `no_sync`, in all combinations."""

    def loop(side: Side) -> list[Any]:
        found = []
        for number, (forward_in, backward_in) in enumerate([(0, 0), (1, 1), (0, 1), (1, 0), (0, 0)]):
            with side.no_sync() if forward_in else nullcontext():
                loss = loss_of(side, number)
            with side.no_sync() if backward_in else nullcontext():
                loss.backward()
            found.append(clone([p.grad for p in side.model.parameters()]))
            if (forward_in, backward_in) != (1, 0):  # what is left of it goes with the next exchange
                side.optimizer.zero_grad()
        return found

    results = like_ddp(loop)
    del results["ranks agree"]  # nothing was updated
    return results


def joint_backward() -> dict[str, bool]:
    """One backward through a forward inside of `no_sync` and one outside, in both orders: it exchanges."""

    def loop(side: Side) -> None:
        for step in range(STEPS):
            side.optimizer.zero_grad()
            losses = []
            for inside in (True, False) if step % 2 else (False, True):
                with side.no_sync() if inside else nullcontext():
                    losses.append(loss_of(side, 2 * step + inside))
            sum(losses).backward()
            side.optimizer.step()

    return like_ddp(loop)


def clipping() -> dict[str, bool]:
    """By global norm, each tensor apart and all at once, and by value; the norms are compared too."""

    def loop(side: Side) -> list[Any]:
        norms = []
        for step in range(6):
            side.optimizer.zero_grad()
            (10 * loss_of(side, step)).backward()
            if step % 3 == 2:
                nn.utils.clip_grad_value_(side.model.parameters(), 0.05)
            else:
                norms.append(nn.utils.clip_grad_norm_(side.model.parameters(), 0.5, foreach=step % 3 == 1, norm_type=2))
            side.optimizer.step()
        return norms

    return like_ddp(loop)


def scaler() -> dict[str, bool]:
    """GradScaler with clipping; in some steps one rank alone overflows, and no rank may update."""

    def loop(side: Side) -> list[Any]:
        scaling = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        found = []
        for step in range(8):
            side.optimizer.zero_grad()
            loss = loss_of(side, step)
            if step in (2, 5) and dist.get_rank() == step % 2:
                loss = loss * float("inf")
            scaling.scale(loss).backward()
            before = clone(list(side.model.parameters()))
            if step % 2:
                scaling.unscale_(side.optimizer)
                nn.utils.clip_grad_norm_(side.model.parameters(), 1.0)
            scaling.step(side.optimizer)
            scaling.update()
            moved = not same(before, clone(list(side.model.parameters())))
            found += [scaling.get_scale(), moved]
        assert found[1::2] == [step not in (2, 5) for step in range(8)]
        return found

    return like_ddp(loop)


def autocast() -> dict[str, bool]:
    """bfloat16 forward and backward over float32 parameters."""

    def loop(side: Side) -> None:
        for step in range(STEPS):
            side.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                x, y = batch(step)
                loss = functional.cross_entropy(side.forward(x.float()), y)
            loss.backward()
            side.optimizer.step()

    return like_ddp(loop, lambda: mlp().float(), tolerance=LOW_PRECISION_TOLERANCE)


def two_losses() -> dict[str, bool]:
    """Two backwards through one forward. DDP averages only the first, so it is given their sum; float64, 1e-12."""
    reference, planned = with_ddp(mlp().double(), ADAM), with_plan(mlp().double(), ADAM)
    for step in range(STEPS):
        x, y = batch(step)
        for side in (reference, planned):
            side.optimizer.zero_grad()
            output = side.forward(x.double())
            first, second = functional.cross_entropy(output, y), output.square().mean()
            if side.session is None:
                (first + second).backward()
            else:
                first.backward(retain_graph=True)
                second.backward()
            side.optimizer.step()
    found = outcome(planned)
    results = {kind: same(value, found[kind], 1e-12) for kind, value in outcome(reference).items()}
    planned.close()
    return results | compare(found, found)


def unused(where: str) -> dict[str, bool]:
    """Layers that some steps leave out, on one rank or on all, with an optimizer that skips what has no gradient."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.trunk = nn.Linear(6, 6)
            self.heads = nn.ModuleList([nn.Linear(6, 3) for _ in range(3)])

        def forward(self, x: Tensor, used: int) -> Tensor:
            return self.heads[used](self.trunk(x))

    def loop(side: Side) -> list[Any]:
        found = []
        for step in range(6):
            used = step % 2 if where == "everywhere" else (step + dist.get_rank()) % 3
            side.optimizer.zero_grad(set_to_none=step != 3)
            x, y = batch(step)
            functional.cross_entropy(side.forward(x, used), y).backward()
            found.append(clone([p.grad for p in side.model.parameters()]))
            side.optimizer.step()
        return found

    return like_ddp(loop, Branches, ADAM, find_unused_parameters=True)


def _raise_in(layer: nn.Module) -> Any:
    def fail(_gradient: Tensor) -> None:
        raise ArithmeticError("on purpose")

    return layer.weight.register_hook(fail)


def exception(then: str) -> dict[str, bool]:
    """A backward that raises in the middle on all ranks; then ordinary steps, or the same graph once more.

    `elsewhere`: after other buckets on each rank; `alone`: on rank 1, of which the others are told. Against DDP that
    never failed: DDP itself refuses the next forward.
    """
    reference, planned = with_ddp(mlp()), with_plan(mlp())
    steps(reference, range(STEPS))
    rank, results = dist.get_rank(), dict[str, bool]()
    for step in range(STEPS):
        planned.optimizer.zero_grad()
        loss = loss_of(planned, step)
        if step == 1:
            fails = then != "alone" or rank == 1
            handle = _raise_in(planned.model[0 if then != "elsewhere" or rank == 1 else 4]) if fails else None
            expected = (
                "on purpose" if fails else f"an exception ended the backward of 1 of {dist.get_world_size()} ranks"
            )
            try:
                loss.backward(retain_graph=True)
                results["raised"] = False
            except (ArithmeticError, CommunicationError) as error:
                results["raised"] = expected in str(error)
            if handle is not None:
                handle.remove()
            planned.optimizer.zero_grad()
            if then != "same graph":
                loss = loss_of(planned, step)
        loss.backward()
        planned.optimizer.step()
    results |= compare(outcome(reference), outcome(planned))
    planned.close()
    return results


class Fuse(nn.Module):
    """Passes on what it gets; its backward raises once it is blown. No hook, which would part `.grad`s from buckets."""

    blown = False

    def forward(self, x: Tensor) -> Tensor:
        return _Raise.apply(x) if self.blown else x  # type: ignore[no-any-return,no-untyped-call]


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *_gradients: Any) -> Any:
        raise ArithmeticError("on purpose")


def zeroed_on_the_way() -> dict[str, bool]:
    """After a backward that raises on all ranks, rank 0 zeroes its gradients in place while messages of theirs wait for
    the other ranks, whose backward comes later; then ordinary steps. Against DDP that never failed.
    """

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), Fuse(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    reference, planned = with_ddp(made()), with_plan(made())
    store, zeroed, results = dist.distributed_c10d._get_default_store(), "rank 0 has zeroed", dict[str, bool]()
    for side in (reference, planned):
        for step in range(STEPS):
            if side is planned and step == 1:
                if dist.get_rank() > 0:
                    store.wait([zeroed])  # for ever, if rank 0's zeroing waited for this rank
                planned.model[1].blown = True  # type: ignore[assignment]
                try:
                    loss_of(planned, step).backward()
                except ArithmeticError:
                    results["raised"] = any(p.grad is not None for p in planned.model.parameters())
                planned.model[1].blown = False  # type: ignore[assignment]
                planned.optimizer.zero_grad(set_to_none=False)
                store.set(zeroed, "")
            loss_of(side, step).backward()
            side.optimizer.step()
            side.optimizer.zero_grad(set_to_none=False)
    results |= compare(outcome(reference), outcome(planned))
    planned.close()
    return results


def exception_in_forward() -> dict[str, bool]:
    """A forward that raises half-way on all ranks, then ordinary steps."""

    def loop(side: Side) -> None:
        steps(side, range(2))
        try:
            side.forward(torch.ones(5, 7))
        except RuntimeError:
            steps(side, range(2, STEPS))

    return like_ddp(loop)


def hooks_of_the_user() -> dict[str, bool]:
    """Hooks on parameters and modules see and change this rank's own gradient, before it is averaged."""

    def loop(side: Side) -> list[Any]:
        seen: list[Any] = []
        for parameter in side.model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        side.model[2].register_full_backward_hook(lambda _m, _i, o: seen.append(clone(o[0])))
        side.model[2].register_forward_hook(lambda _m, _i, o: o * 1.5)
        steps(side, range(STEPS))
        return seen

    return like_ddp(loop)


def gradient_penalty() -> dict[str, bool]:
    """`torch.autograd.grad` with create_graph inside the step, as WGAN-GP does; backward goes through it."""

    def loop(side: Side) -> None:
        for step in range(STEPS):
            side.optimizer.zero_grad()
            x, _ = batch(step)
            x.requires_grad_()
            y = side.forward(x)
            [slope] = torch.autograd.grad(y.sum(), x, create_graph=True)
            (y.square().mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
            side.optimizer.step()

    return like_ddp(loop)


def create_graph(kind: str) -> dict[str, bool]:
    """`backward(create_graph=True)` is refused, as autograd refuses it with DDP; training goes on after it."""
    model = mlp()
    optimizer = SGD(model.parameters())
    session = runtime.attach(model, optimizer, KINDS[kind](model), timeout_s=60, drift=False, guard=False)
    side = Side(model, model, optimizer, session)
    steps(side, range(3))
    message = raised(lambda: loss_of(side, 0).backward(create_graph=True))
    steps(side, range(3, 6))
    side.close()
    return told(message, ["requires a gradient itself", "torch.autograd.grad"])


def create_graph_alone() -> dict[str, bool]:
    """The same inside of `no_sync`: a penalty on this rank's own gradients, differentiated before they travel."""

    def loop(side: Side) -> None:
        for step in range(STEPS):
            side.optimizer.zero_grad()
            with side.no_sync():
                loss_of(side, step).backward(create_graph=True)
                penalty = sum(p.grad.square().sum() for p in side.model.parameters())
                for parameter in side.model.parameters():
                    parameter.grad = None
            (loss_of(side, step) + 0.1 * penalty).backward()
            side.optimizer.step()

    return like_ddp(loop)


STEP_CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    "accumulation": accumulation,
    "several_backwards": several_backwards,
    "forward_decides": forward_decides,
    "joint_backward": joint_backward,
    "clipping": clipping,
    "scaler": scaler,
    "autocast": autocast,
    "hooks_of_the_user": hooks_of_the_user,
    "gradient_penalty": gradient_penalty,
    **{f"create_graph-{kind}": partial(create_graph, kind) for kind in KINDS},
    "create_graph-in no_sync": create_graph_alone,
    "two_losses": two_losses,
    "exception_in_forward": exception_in_forward,
    "zeroed_on_the_way": zeroed_on_the_way,
    **{f"unused-{where}": partial(unused, where) for where in ("somewhere", "everywhere")},
    **{f"exception-{then}": partial(exception, then) for then in ("new forward", "same graph", "elsewhere", "alone")},
}
