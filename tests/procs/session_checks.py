"""What the ranks of the session tests do. Every function runs on each rank and returns something picklable."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import runtime
from runtime.checks.plan import trainable_parameters
from runtime.plan import ModelReference, Plan, PlanBucket, PlanWorld

STEPS = 20

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


def convnet(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Convolutions with BatchNorm and two linear layers, the same on every rank."""
    torch.manual_seed(0)
    layers = [
        *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(16 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    ]
    return nn.Sequential(*layers).to(dtype)


def images(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """This rank's images and labels."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(8, 3, 8, 8, generator=generator, dtype=dtype)
    return x, torch.randint(0, 10, (8,), generator=generator)


def plan_of(model: nn.Module, group: int, /, **changes: Any) -> Plan:
    """Buckets of `group` gradients in reverse order of registration."""
    names = list(reversed(trainable_parameters(model)))
    buckets = tuple(PlanBucket(gradients=tuple(names[i : i + group])) for i in range(0, len(names), group))
    values: dict[str, Any] = {
        "model": ModelReference(name="test"),
        "world": PlanWorld(ranks=dist.get_world_size()),
        "accuracy": "exact",
        "buckets": buckets,
    }
    plan = Plan(**(values | changes))
    if not plan.sharded or "interface" in changes:
        return plan
    return replace(plan, interface=("sharded-step" if plan.gathers is None else "late-gather",))


def digest(model: nn.Module) -> str:
    """Hash of all parameters and buffers."""
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward: nn.Module,
    *,
    steps: int = STEPS,
    set_to_none: bool = True,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Ordinary steps; DDP's buffers are then what its next forward would begin with."""
    for step in range(steps):
        x, y = images(step, dtype)
        optimizer.zero_grad(set_to_none=set_to_none)
        functional.cross_entropy(forward(x), y).backward()
        optimizer.step()
    if isinstance(forward, DistributedDataParallel):
        follow_rank_0(model)


@torch.no_grad()
def follow_rank_0(model: nn.Module) -> None:
    """Overwrites buffers of any dtype and layout with rank 0's, as DDP's forward after a step does."""
    followers = [buffer for buffer in model.buffers() if not hasattr(buffer, "_ddp_ignored")]
    given = [[buffer.clone() for buffer in followers]]
    dist.broadcast_object_list(given, 0)
    for buffer, values in zip(followers, given[0], strict=True):
        buffer.data = values


def with_ddp(name: str, **options: Any) -> nn.Module:
    """A model trained by DDP."""
    model = convnet(options.get("dtype", torch.float32))
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, DistributedDataParallel(model), **options)
    return model


def with_plan(name: str, group: int, **options: Any) -> nn.Module:
    """A model trained by a plan."""
    model = convnet(options.get("dtype", torch.float32))
    optimizer = OPTIMIZERS[name](model.parameters())
    session = runtime.attach(model, optimizer, plan_of(model, group))
    train(model, optimizer, model, **options)
    session.detach()
    return model


def weights_like_ddp() -> dict[str, bool]:
    """Equality, bit for bit, of parameters and buffers after training, by case."""
    results = {}
    for name in OPTIMIZERS:
        expected = digest(with_ddp(name))
        for group in (1, 3, 100):
            results[f"{name}, {group} gradients a bucket"] = digest(with_plan(name, group)) == expected
    expected = digest(with_ddp("sgd", set_to_none=False))
    results["zeroed in place"] = digest(with_plan("sgd", 3, set_to_none=False)) == expected
    expected = digest(with_ddp("sgd", dtype=torch.float64, steps=5))
    results["float64"] = digest(with_plan("sgd", 3, dtype=torch.float64, steps=5)) == expected
    return results


def largest_difference(dtype: torch.dtype) -> float:
    """max |Δ| / max |w| between DDP and a plan of small buckets after 20 steps."""
    reference, model = with_ddp("sgd", dtype=dtype), with_plan("sgd", 3, dtype=dtype)
    pairs = [(a.detach(), b.detach()) for a, b in zip(reference.parameters(), model.parameters(), strict=True)]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


class Weighted(nn.Module):
    """A loss that is linear in the weights, so that gradients are the inputs: integers stay integers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in (5, 1, 33, 7)])

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Sum of products."""
        return torch.stack([(w * x).sum() for w, x in zip(self.weights, inputs, strict=True)]).sum()


def integers_like_ddp() -> list[bool]:
    """Equality of weights with DDP's on gradients that are multiples of the number of ranks, by bucket size."""
    ranks, rank = dist.get_world_size(), dist.get_rank()

    def run(group: int | None) -> Weighted:
        model = Weighted()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        forward = DistributedDataParallel(model) if group is None else model
        session = None if group is None else runtime.attach(model, optimizer, plan_of(model, group))
        for step in range(6):
            generator = torch.Generator().manual_seed(100 * step + rank)
            inputs = [ranks * torch.randint(-8, 9, w.shape, generator=generator).float() for w in model.weights]
            optimizer.zero_grad()
            forward(inputs).backward()
            optimizer.step()
        if session is not None:
            session.detach()
        return model

    expected = digest(run(None))
    return [digest(run(group)) == expected for group in (1, 2, 4)]


def different_starts() -> tuple[bool, bool]:
    """Ranks that start apart: (equal after attach and training, apart with sync=False)."""

    def attached(sync: bool) -> list[str]:
        model = convnet()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(dist.get_rank())
        session = runtime.attach(model, None, plan_of(model, 3), sync=sync)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        train(model, optimizer, model, steps=3 if sync else 0)
        session.detach()
        digests: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(digests, digest(nn.ParameterList(model.parameters())))
        return digests

    return len(set(attached(True))) == 1, len(set(attached(False))) == dist.get_world_size()


def gradients_are_final() -> bool:
    """`.grad` after `backward()` is the average of what every rank has alone."""
    model = convnet().eval()
    alone = copy.deepcopy(model)
    session = runtime.attach(model, None, plan_of(model, 2))
    x, y = images(0)
    functional.cross_entropy(alone(x), y).backward()
    functional.cross_entropy(model(x), y).backward()
    for parameter in alone.parameters():
        parameter.grad = parameter.grad / dist.get_world_size()
        dist.all_reduce(parameter.grad)
    session.detach()
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    return all(torch.allclose(a.grad, b.grad, rtol=1e-6, atol=1e-7) for a, b in pairs)


def accumulation_like_ddp() -> bool:
    """Two backwards in `no_sync`, then one outside, as with DDP."""

    def run(model: nn.Module, forward: nn.Module, no_sync: Callable[[], Any]) -> str:
        for step in range(3):
            model.zero_grad()
            for micro in range(3):
                x, y = images(10 * step + micro)
                if micro < 2:
                    with no_sync():
                        functional.cross_entropy(forward(x), y).backward()
                else:
                    functional.cross_entropy(forward(x), y).backward()
        return digest(nn.ParameterList([p.grad for p in model.parameters()]))

    reference = convnet()
    ddp = DistributedDataParallel(reference)
    expected = run(reference, ddp, ddp.no_sync)
    model = convnet()
    session = runtime.attach(model, None, plan_of(model, 3))
    found = run(model, model, session.no_sync)
    session.detach()
    return found == expected
