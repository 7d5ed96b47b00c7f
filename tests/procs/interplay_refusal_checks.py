"""What is refused, with the reason, on all ranks alike and before the step sends anything; and what is close to it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from interplay_harness import (
    SGD,
    Side,
    batch,
    clone,
    like_ddp,
    loss_of,
    mlp,
    ranks_agree,
    same,
    steps,
    with_ddp,
    with_plan,
)
from session_checks import plan_of
from step_checks import raised
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrizations

import runtime
from runtime.fit import model_fingerprint
from runtime.plan import ModelReference, Plan, PlanBucket

CURE = "session.detach(), profile the model again"


def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _inside(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = mlp()
    model[2] = wrap(model[2])
    return model


def _fully_sharded() -> nn.Module:
    model = mlp()
    fully_shard(model, mesh=_mesh())
    return model


def _tensor_parallel() -> nn.Module:
    model = mlp()
    weight = DTensor.from_local(model[0].weight.detach(), _mesh(), [Replicate()])
    model[0].weight = nn.Parameter(weight)
    return model


def _two_devices() -> nn.Module:
    model = mlp()
    model[2] = nn.Linear(8, 8, device="meta")
    return model


def _sparse_parameter() -> nn.Module:
    model = mlp()
    model[0].weight = nn.Parameter(model[0].weight.detach().to_sparse())
    return model


def _lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LazyLinear(3))


AT_ATTACH: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "sparse embedding": (lambda: nn.Sequential(nn.Embedding(4, 4, sparse=True)), ["0 is an embedding", "sparse=False"]),
    "sparse embedding bag": (lambda: nn.Sequential(nn.EmbeddingBag(4, 4, sparse=True, mode="sum")), ["sparse=False"]),
    "sparse parameter": (_sparse_parameter, ["0.weight is sparse", "to_dense"]),
    "DDP": (lambda: DistributedDataParallel(mlp()), ["DistributedDataParallel", "model.module"]),
    "DDP inside": (lambda: _inside(DistributedDataParallel), ["DistributedDataParallel"]),
    "DataParallel": (lambda: DataParallel(mlp()), ["wrapped in DataParallel"]),
    "FSDP inside": (
        lambda: _inside(partial(FullyShardedDataParallel, device_id=torch.device("cpu"))),
        ["FullySharded"],
    ),
    "fully_shard": (_fully_sharded, ["FSDP"]),
    "tensor parallel": (_tensor_parallel, ["0.weight is a DTensor"]),
    "several devices": (_two_devices, ["cpu, meta", "one device per rank"]),
    "no data": (lambda: mlp().to("meta"), ["meta", "no data"]),
    "lazy": (_lazy, ["1.weight has no shape yet", "one forward before attach"]),
}


def at_attach(case: str, *, plan: Plan | None = None) -> dict[str, Any]:
    """The message of a model that cannot be attached."""
    make, words = AT_ATTACH[case]
    model = make()
    return _told(raised(lambda: runtime.attach(model, None, plan or plan_of(mlp(), 2), timeout_s=20)), words)


def _told(message: str, words: list[str]) -> dict[str, Any]:
    results = {f"{word!r} in {message!r}": word in message for word in words}
    return results | {f"alike: {message!r}": ranks_agree(message)}


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
    fully_shard(side.model, mesh=_mesh())


AFTER_ATTACH: dict[str, tuple[Callable[[Side], None], list[str]]] = {
    "unfrozen": (_unfreeze, ["0.weight (frozen then, requires_grad now)", CURE]),
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
    launch, broadcast = side.session._communicator.launch, dist.broadcast
    side.session._communicator.launch = lambda *_: sent.append("bucket")  # type: ignore[method-assign]
    dist.broadcast = lambda *_, **__: sent.append("buffers")
    try:
        message = raised(lambda: loss_of(side, 2).backward())
    finally:
        side.session._communicator.launch, dist.broadcast = launch, broadcast  # type: ignore[method-assign]
    results = _told(message, words) | {"nothing sent": not sent}
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
    results |= _told(raised(lambda: model.loss(1).backward()), ["inner.5.weight (new)"])
    session.detach()
    return results


def unplanned() -> dict[str, Any]:
    """A head that the plan leaves out, since it was idle when the model was profiled."""
    model = mlp()
    names = plan_of(model, 2).gradients
    idle = PlanBucket(gradients=tuple(name for name in names if not name.startswith("4.")))
    reference = ModelReference(name="mlp", fingerprint=model_fingerprint(model))
    session = runtime.attach(model, None, plan_of(model, 2, buckets=(idle,), model=reference), timeout_s=20)
    message = raised(lambda: model(batch(0)[0]).sum().backward())
    session.detach()
    return _told(message, ["4.", "the plan does not hold it", "profile again"])


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

    results = _told(raised(step), [name, "now and was", "convert the model before attach"])
    side.close()
    return results


def functional_sparse() -> dict[str, Any]:
    """`functional.embedding(sparse=True)` is seen only when its gradient comes."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Parameter(torch.randn(9, 4))

        def forward(self, tokens: Tensor) -> Tensor:
            return functional.embedding(tokens, self.table, sparse=True)

    model = Sparse()
    session = runtime.attach(model, None, plan_of(model, 1), timeout_s=20)
    message = raised(lambda: model(torch.tensor([1, 2])).sum().backward())
    session.detach()
    return _told(message, ["bucket 0", "table", "a gradient is sparse"])


def wrapped_later() -> dict[str, Any]:
    """DDP around an attached model, or around a module that holds it."""
    results: dict[str, Any] = {}
    for name, wrap in (("itself", lambda m: m), ("inside", lambda m: nn.Sequential(m, nn.Linear(3, 3)))):
        side = with_plan(mlp())
        outer = DistributedDataParallel(wrap(side.model))
        message = raised(lambda outer=outer: outer(batch(0)[0]))  # type: ignore[misc]
        found = _told(message, ["called inside a DistributedDataParallel", "session.detach()"])
        results |= {f"{name}: {key}": good for key, good in found.items()}
        side.close()
    return results


def attached_twice() -> dict[str, Any]:
    """A submodule of an attached model, a model around one, its compiled form, and two that share a layer."""
    side = with_plan(mlp())
    shared = nn.Sequential(side.model[2], nn.Linear(8, 2))
    results: dict[str, Any] = {}
    for name, other, words in (
        ("same", side.model, ["attached already"]),
        ("part", side.model[0], ["weight belongs to another attached model"]),
        ("around", nn.Sequential(side.model), ["0.0.weight belongs to another attached model too (Sequential)"]),
        ("compiled", torch.compile(side.model, backend="eager"), ["belongs to another attached model"]),
        ("shared layer", shared, ["0.weight belongs to another", "attach one module that holds both"]),
    ):
        plan = plan_of(other, 2)
        message = raised(lambda other=other, plan=plan: runtime.attach(other, None, plan, timeout_s=20))  # type: ignore[misc]
        results |= {f"{name}: {key}": good for key, good in _told(message, words).items()}
    side.close()
    return results


def ready_twice() -> dict[str, Any]:
    """Reentrant checkpoints that share a parameter: refused by name, as DDP refuses it; without reentrance it works."""

    class Shared(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.last, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 3), reentrant

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=self.reentrant)
            return self.last(x)

    side = with_plan(Shared(True))
    message = raised(lambda: loss_of(side, 0).backward())
    side.close()
    results = _told(message, ["layer.", "ready twice", "use_reentrant=False"])
    try:
        loss_of(with_ddp(Shared(True)), 0).backward()
    except RuntimeError as error:
        results["DDP"] = "ready only once" in str(error)
    return results | like_ddp(lambda one: steps(one, range(3)), lambda: Shared(False))


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
    results = _told(raised(lambda: loss_of(side, 0).backward()), ["0.parametrizations.weight.original", "(new)"])
    side.close()

    def make() -> nn.Module:
        model = mlp()
        parametrizations.weight_norm(model[0])
        return model

    return results | like_ddp(lambda one: steps(one, range(3)), make)


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


def rank_without_gradient() -> dict[str, Any]:
    """One rank's loss reaches the output but no parameter: the others wait until the deadline, and are told."""
    model = mlp()
    session = runtime.attach(model, None, plan_of(model, 2), timeout_s=3)
    x, y = batch(0)
    x.requires_grad_()
    if dist.get_rank() == 1:
        copied = copy.deepcopy(model)
        copied.requires_grad_(False)
        model.requires_grad_(False)
    message = raised(lambda: functional.cross_entropy(model(x), y).backward())
    results = {f"told: {message!r}": ("did not complete" in message) == (dist.get_rank() != 1)}
    dist.barrier()
    session.detach()
    return results


def evaluation_alone() -> dict[str, bool]:
    """Between steps rank 0 alone evaluates, with and without gradients."""

    def loop(side: Side) -> list[Any]:
        found = []
        for step in range(3):
            steps(side, [step])
            if dist.get_rank() == 0:
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


REFUSAL_CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"attach-{case}": partial(at_attach, case) for case in AT_ATTACH},
    **{f"later-{case}": partial(after_attach, case) for case in AFTER_ATTACH},
    "later-without forward": without_forward,
    **{
        f"converted-{case}{'' if none else ' with gradients'}": partial(converted, case, none)
        for case in CONVERSIONS
        for none in (True, False)
    },
    "functional sparse": functional_sparse,
    "unplanned": unplanned,
    "wrapped later": wrapped_later,
    "attached twice": attached_twice,
    "ready twice": ready_twice,
    "benign changes": benign_changes,
    "parametrized": parametrized_later,
    "odd dtypes": odd_dtypes,
    "evaluation alone": evaluation_alone,
    "SyncBatchNorm": sync_batchnorm,
    "rank without gradient": rank_without_gradient,
}
