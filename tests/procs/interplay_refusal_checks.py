"""What is refused, with the reason, on all ranks alike and before the step sends anything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from interplay_harness import (
    batch,
    like_ddp,
    loss_of,
    mlp,
    ranks_agree,
    steps,
    told,
    with_ddp,
    with_plan,
)
from session_checks import plan_of
from step_checks import raised
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.nn.parallel import DataParallel, DistributedDataParallel

import runtime
from runtime.checks.plan import model_fingerprint
from runtime.plan import ModelReference, Plan, PlanBucket


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


def _other_grad_dtype() -> nn.Module:
    model = mlp()
    model[0].weight.grad_dtype = torch.bfloat16
    return model


def _lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LazyLinear(3))


def _replicated() -> nn.Module:
    model: nn.Module = replicate(mlp())
    return model


def _updated_in_backward() -> nn.Module:
    model = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return model


def _buffered(buffer: torch.Tensor) -> nn.Module:
    model = mlp()
    model.register_buffer("mask", buffer)
    return model


@torch.inference_mode()
def _made_in_inference() -> torch.Tensor:
    return torch.zeros(3)


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
    "grad_dtype": (_other_grad_dtype, ["0.weight has the grad_dtype torch.bfloat16", "leave grad_dtype"]),
    "replicate": (_replicated, ["wrapped in DDPSequential"]),
    "optimizer in backward": (_updated_in_backward, ["0.weight has an optimizer that steps in backward"]),
    "expanded buffer": (
        lambda: _buffered(torch.zeros(1).expand(3)),
        ["mask has several elements in one place", "clone()"],
    ),
    "inference buffer": (lambda: _buffered(_made_in_inference()), ["mask was made in torch.inference_mode", "clone()"]),
    "lazy": (_lazy, ["1.weight has no shape yet", "one forward before attach"]),
}


def at_attach(case: str, *, plan: Plan | None = None) -> dict[str, Any]:
    """The message of a model that cannot be attached."""
    make, words = AT_ATTACH[case]
    model = make()
    return told(raised(lambda: runtime.attach(model, None, plan or plan_of(mlp(), 2), timeout_s=20)), words)


def unplanned() -> dict[str, Any]:
    """A head that the plan leaves out, since it was idle when the model was profiled."""
    model = mlp()
    names = plan_of(model, 2).gradients
    idle = PlanBucket(gradients=tuple(name for name in names if not name.startswith("4.")))
    reference = ModelReference(name="mlp", fingerprint=model_fingerprint(model))
    session = runtime.attach(model, None, plan_of(model, 2, buckets=(idle,), model=reference), timeout_s=20)
    message = raised(lambda: model(batch(0)[0]).sum().backward())
    session.detach()
    return told(message, ["4.", "the plan does not hold it", "profile again"])


def other_optimizer() -> dict[str, Any]:
    """One whose parameters are another model's; nothing has been changed then."""
    model = mlp()
    with torch.no_grad():
        model[0].weight += dist.get_rank()
    made = torch.optim.SGD(mlp().parameters(), lr=0.1)
    message = raised(lambda: runtime.attach(model, made, plan_of(model, 2), timeout_s=20))
    results = told(message, ["SGD of 6 parameters, none of which is the model's", "master weights"])
    return results | {"not broadcast": not ranks_agree(model[0].weight)}


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
    return told(message, ["bucket 0", "table", "a gradient is sparse"])


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
        results |= {f"{name}: {key}": good for key, good in told(message, words).items()}
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
    results = told(message, ["layer.", "ready twice", "use_reentrant=False"])
    try:
        loss_of(with_ddp(Shared(True)), 0).backward()
    except RuntimeError as error:
        results["DDP"] = "ready only once" in str(error)
    return results | like_ddp(lambda one: steps(one, range(3)), lambda: Shared(False))


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
    results = {f"told: {message!r}": ("has to reach a parameter on every rank" in message) == (dist.get_rank() != 1)}
    dist.barrier()
    session.detach()
    return results


REFUSAL_CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    "other optimizer": other_optimizer,
    **{f"attach-{case}": partial(at_attach, case) for case in AT_ATTACH},
    "functional sparse": functional_sparse,
    "unplanned": unplanned,
    "attached twice": attached_twice,
    "ready twice": ready_twice,
    "rank without gradient": rank_without_gradient,
}
