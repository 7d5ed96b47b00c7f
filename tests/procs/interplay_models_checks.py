"""Models that are unlike a plain stack of layers, and how they are called."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
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
    ranks_agree,
    same,
    steps,
    with_ddp,
    with_plan,
)
from session_checks import follow_rank_0, plan_of
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import runtime

STEPS = 4


def batchnorm(momentum: float | None) -> dict[str, bool]:
    """Statistics after steps with accumulation or two forwards, and an evaluation in between; cumulative ones too."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(8, momentum=momentum)
        return nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 3), nn.BatchNorm1d(3, affine=False))

    def loop(side: Side) -> list[Any]:
        found = []
        steps(side, range(2))
        side.model.eval()
        with torch.no_grad():
            found.append(clone(side.forward(torch.ones(2, 6))))
        side.model.train()
        side.optimizer.zero_grad()
        with side.no_sync():
            loss_of(side, 2).backward()
        loss_of(side, 3).backward()
        side.optimizer.step()
        (loss_of(side, 5) + loss_of(side, 6)).backward()  # the second forward's exchange of buffers is in between
        side.optimizer.step()
        side.model[1].eval()
        steps(side, [4])  # fine-tuning with frozen statistics
        return found

    return like_ddp(loop, make)


def tied() -> dict[str, bool]:
    """An output layer that shares the embedding's weight."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.mix, self.output = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)
            self.output.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.output(torch.tanh(self.mix(self.embedding(tokens)))).flatten(0, 1)

    def loop(side: Side) -> None:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            tokens = torch.randint(0, 11, (4, 6), generator=generator)
            side.optimizer.zero_grad()
            functional.cross_entropy(side.forward(tokens[:, :-1]), tokens[:, 1:].flatten()).backward()
            side.optimizer.step()

    return like_ddp(loop, Language, ADAM)


def shared_layer() -> dict[str, bool]:
    """One layer called three times in a forward."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.again, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(3):
                x = torch.tanh(self.again(x))
            return self.last(x)

    return like_ddp(lambda side: steps(side, range(STEPS)), Repeated)


def frozen_before() -> dict[str, bool]:
    """A frozen trunk, as in fine-tuning; its parameters are neither in the plan nor in the optimizer."""

    def make() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    return like_ddp(lambda side: steps(side, range(STEPS)), make)


def frozen_after() -> dict[str, bool]:
    """Frozen after attach and thawed again, on all ranks and on one rank alone; Adam skips what has no gradient."""

    def loop(side: Side) -> list[Any]:
        found = []
        for step in range(6):
            side.model[2].requires_grad_(step not in (1, 2) and not (step == 4 and dist.get_rank() == 0))
            steps(side, [step])
            found.append(clone([p.grad for p in side.model.parameters()]))
        return found

    return like_ddp(loop, mlp, ADAM, find_unused_parameters=True)


def mixed_dtypes() -> dict[str, bool]:
    """bfloat16 and float32 parameters in one bucket, through several steps."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.low, self.high = nn.Linear(6, 6).to(torch.bfloat16), nn.Linear(6, 3)
            self.scale = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return self.high((self.low(x.bfloat16()) * self.scale).to(self.high.weight.dtype))

    return like_ddp(lambda side: steps(side, range(STEPS)), Mixed, tolerance=LOW_PRECISION_TOLERANCE)


class Checkpointed(nn.Module):
    """Recomputes every layer in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh()) for _ in range(3)])
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) → (batch, 3)."""
        x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.last(x)


def checkpointing(reentrant: bool, autocast: bool, accumulated: bool) -> dict[str, bool]:
    """Against DDP with the same checkpoints; dropout has to be the same in the recomputed forward."""

    def loop(side: Side) -> None:
        torch.manual_seed(7)
        for step in range(STEPS):
            side.optimizer.zero_grad()
            if accumulated:
                with side.no_sync():
                    loss_of(side, 50 + step).backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                x, y = batch(step)
                loss = functional.cross_entropy(side.forward(x.float() if autocast else x), y)
            loss.backward()
            side.optimizer.step()

    def make() -> nn.Module:
        model = Checkpointed(reentrant)
        return model.float() if autocast else model

    return like_ddp(loop, make, tolerance=LOW_PRECISION_TOLERANCE if autocast else 1e-12)


def whole_model_checkpointed(reentrant: bool) -> dict[str, bool]:
    """`checkpoint(model, x)`: the model's own forward runs again inside backward. Against DDP without checkpoints."""
    reference, planned = with_ddp(mlp()), with_plan(mlp())
    steps(reference, range(STEPS))
    for step in range(STEPS):
        x, y = batch(step)
        planned.optimizer.zero_grad()
        output = checkpoint(planned.forward, x.requires_grad_(), use_reentrant=reentrant)
        functional.cross_entropy(output, y).backward()
        planned.optimizer.step()
    results = compare(outcome(reference), outcome(planned))
    planned.close()
    return results


@dataclasses.dataclass
class Record:
    """An output that no library knows."""

    logits: Tensor
    extra: dict[str, Any]


def outputs(kind: str) -> dict[str, bool]:
    """Outputs in dicts, tuples and dataclasses, some of them not used by the loss."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.unused = mlp(), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Any:
            y = self.inner(x)
            extra = {"unused": [self.unused(y), "text", None]}
            return {"dict": {"logits": y, **extra}, "tuple": (y, extra), "dataclass": Record(y, extra)}[kind]

    def loop(side: Side) -> None:
        for step in range(STEPS):
            x, y = batch(step)
            side.optimizer.zero_grad()
            with side.no_sync():
                side.forward(x)
            found = side.forward(x)
            logits = found if isinstance(found, Tensor) else found[0] if kind == "tuple" else _logits(found)
            functional.cross_entropy(logits, y).backward()
            side.optimizer.step()

    if kind != "dataclass":
        return like_ddp(loop, Wrapped, find_unused_parameters=True)
    # DDP looks for unused outputs in dicts and lists only: it is given the tensor alone, with that layer left aside.
    reference, planned = with_ddp(mlp()), with_plan(Wrapped())
    for side in (reference, planned):
        loop(side)
    planned.close()
    inner = outcome(dataclasses.replace(planned, model=planned.model.inner))
    return compare(outcome(reference) | {"optimizer": None}, inner | {"optimizer": None})


def _logits(found: Any) -> Tensor:
    return found["logits"] if isinstance(found, dict) else found.logits


def fast_weights() -> dict[str, bool]:
    """MAML: an inner update of every weight with create_graph, then the outer loss through `functional_call`."""

    def loop(side: Side) -> None:
        for step in range(STEPS):
            side.optimizer.zero_grad()
            names, weights = zip(*side.forward.named_parameters(), strict=True)
            with side.no_sync():
                inner = loss_of(side, 10 + step)
            slopes = torch.autograd.grad(inner, weights, create_graph=True)
            fast = {name: w - 0.1 * g for name, w, g in zip(names, weights, slopes, strict=True)}
            x, y = batch(step)
            functional.cross_entropy(torch.func.functional_call(side.forward, fast, (x,)), y).backward()
            side.optimizer.step()

    return like_ddp(loop)


def partial_backward() -> dict[str, bool]:
    """`backward(inputs=...)` of some of the parameters, against DDP with the others frozen: its own fails."""
    frozen = mlp()
    frozen[0].requires_grad_(False)
    found = []
    for side in (with_ddp(frozen), with_plan(mlp())):
        for step in range(STEPS):
            side.optimizer.zero_grad()
            loss_of(side, step).backward(inputs=list(side.model[2:].parameters()))
            side.optimizer.step()
        found.append(outcome(side) | {"optimizer": None})
        side.close()
    return compare(*found)


class Odd(nn.Module):
    """Complex parameters, and buffers and frozen parameters of dtypes that backends do not know."""

    def __init__(self, strange: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = mlp()
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.cdouble))
        rank = dist.get_rank()
        if strange:
            self.table = nn.Parameter(torch.arange(5, dtype=torch.int16) + rank, requires_grad=False)
            self.register_buffer("small", (torch.ones(3) + rank).to(torch.float8_e4m3fn))
            self.register_buffer("mask", torch.tensor([True, rank == 0]))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("scalar", torch.tensor(rank))
        self.register_buffer("hidden", torch.ones(2) * rank, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) → (batch, 3)."""
        return self.inner(x) * (self.phase * self.phase.conj()).real.to(x.dtype)


def odd_dtypes() -> dict[str, Any]:
    """DDP broadcasts neither int16 nor float8; what it does broadcast is compared, the rest has to be rank 0's."""
    results: dict[str, Any] = like_ddp(lambda side: steps(side, range(3)), lambda: Odd(False))
    side = with_plan(Odd(True))
    results["begins as rank 0"] = ranks_agree([side.model.table, side.model.small, side.model.mask])
    steps(side, range(3))
    results["rank 0's values"] = side.model.table.tolist() == [0, 1, 2, 3, 4] and float(side.model.small[0]) == 1.0
    side.close()
    return results


def evaluation_alone() -> dict[str, bool]:
    """Between steps one rank alone evaluates, in either of two ways; with the buffers of all ranks' evaluation."""

    def loop(side: Side) -> list[Any]:
        found = []
        for step in range(4):
            steps(side, [step])
            if side.session is None:
                follow_rank_0(side.model)
            if dist.get_rank() == step % 2:
                side.model.eval()
                with torch.no_grad():
                    found.append(clone(side.model(torch.ones(2, 6))))
                with torch.inference_mode():
                    found.append(clone(side.model(torch.ones(2, 6))).numpy().tolist())
                side.model.train()
        return found

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    return like_ddp(loop, make)


def sync_batchnorm() -> dict[str, bool]:
    """What can be shown without a GPU: conversion, attach, names, buffers that follow rank 0, evaluation, detach."""
    torch.manual_seed(dist.get_rank())
    plain = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    plan = plan_of(model, 2)
    model[1].running_mean += dist.get_rank()
    made = SGD(model.parameters())
    session = runtime.attach(model, made, plan, timeout_s=20)
    results = {"in the plan": {"1.weight", "1.bias"} <= set(plan.gradients)}
    results["starts equal"] = ranks_agree([*model.parameters(), *model.buffers()])
    model.train()
    model[1].eval()  # its training forward is written for GPUs only
    with torch.no_grad():
        model[1].running_mean += dist.get_rank()
        model[1].num_batches_tracked += 5 * dist.get_rank()
    x, y = batch(0)
    functional.cross_entropy(model(x), y).backward()
    results["statistics follow rank 0"] = ranks_agree(list(model.buffers()))
    results["tracked as on rank 0"] = int(model[1].num_batches_tracked) == 0
    results["gradients averaged"] = ranks_agree([p.grad for p in model.parameters()])
    made.step()
    results["weights equal"] = ranks_agree(list(model.parameters()))
    session.detach()
    copied = copy.deepcopy(model)
    results["copy"] = same(clone(list(copied.parameters())), clone(list(model.parameters())))
    return results


MODEL_CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"batchnorm-{momentum}": partial(batchnorm, momentum) for momentum in (0.1, None)},
    "tied": tied,
    "shared_layer": shared_layer,
    "frozen_before": frozen_before,
    "frozen_after": frozen_after,
    "mixed_dtypes": mixed_dtypes,
    **{
        f"checkpointing-{'' if reentrant else 'not '}reentrant{'-autocast' * cast}{'-accumulated' * more}": partial(
            checkpointing, reentrant, cast, more
        )
        for reentrant in (True, False)
        for cast, more in ((False, False), (True, False), (False, True))
    },
    **{
        f"whole_model_checkpointed-{'' if reentrant else 'not '}reentrant": partial(whole_model_checkpointed, reentrant)
        for reentrant in (True, False)
    },
    **{f"outputs-{kind}": partial(outputs, kind) for kind in ("dict", "tuple", "dataclass")},
    "fast_weights": fast_weights,
    "partial_backward": partial_backward,
    "odd_dtypes": odd_dtypes,
    "evaluation_alone": evaluation_alone,
    "SyncBatchNorm": sync_batchnorm,
}
