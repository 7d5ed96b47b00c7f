"""What the ranks of the tests of weights do: unlike numbers of samples, against one process that has all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from hierarchy_reference import on_grid
from session_checks import plan_of
from torch import Tensor, nn

import runtime
from runtime.checks.plan import check_plan
from runtime.plan import CompressorSpec, Plan, PlanBucket, StepPlan, UpdatePlan
from runtime.plan.transports import TRANSPORTS, Transport

STEPS = 3


class Net(nn.Module):
    """Two layers and one that is used where the inputs are positive on average."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.rare, self.last = nn.Linear(7, 130), nn.Linear(130, 130), nn.Linear(130, 3)
        self.to(dtype)

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        """Outputs of the last layer."""
        hidden = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.rare(hidden)) if rare else hidden)


def samples(rank: int, step: int, dtype: torch.dtype = torch.float64, equal: bool = False) -> tuple[Tensor, Tensor]:
    """Rank's samples and targets of a micro-batch; unlike numbers of them, by rank and step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    number = 4 if equal else 1 + (3 * rank + 5 * step) % 7
    x = torch.randn(number, 7, generator=generator, dtype=dtype)
    return x, torch.randn(number, 3, generator=generator, dtype=dtype)


def loss_of(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    """A mean over samples."""
    return (model(x, **options) - y).square().mean(dim=1).mean()


def concatenated(step: int, micro_batches: int = 1, skipped: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """All ranks' samples of a step."""
    given = [
        samples(rank, micro_batches * step + micro)
        for micro in range(micro_batches)
        for rank in range(dist.get_world_size())
        if rank not in skipped
    ]
    return torch.cat([x for x, _ in given]), torch.cat([y for _, y in given])


def difference(model: nn.Module, reference: nn.Module) -> float:
    """Largest difference of weights over the largest weight."""
    pairs = [(a.detach(), b.detach()) for a, b in zip(model.parameters(), reference.parameters(), strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def alone(micro_batches: int = 1, **options: Any) -> nn.Module:
    """The reference: one process with all samples."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *concatenated(step, micro_batches), **options).backward()
        optimizer.step()
    return model


def trained(plan: Callable[[nn.Module], Plan], micro_batches: int = 1, *, asks: bool = False, **options: Any) -> nn.Module:
    """Ranks with unlike numbers of samples, each of which gives its own; `asks`: where the session asks for it."""
    model, number = Net(), [0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if asks:
        options["weight"] = lambda: number[0]
    session = runtime.attach(model, optimizer, plan(model), guard=False, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            x, y = samples(dist.get_rank(), micro_batches * step + micro)
            number[0] = len(x)
            if not asks:
                session.weight(len(x))
            with session.no_sync() if micro + 1 < micro_batches else nullcontext():
                (loss_of(model, x, y) / micro_batches).backward()
        optimizer.step()
    session.wait_for_weights()
    session.detach()
    return model


def sent_by(transport: Transport, spec: CompressorSpec, model: nn.Module) -> Plan:
    """All buckets are sent so."""
    accuracy = "exact" if spec.name == "none" else "bounded"
    buckets = tuple(PlanBucket(gradients=one.gradients).sent_by(transport, spec) for one in plan_of(model, 2).buckets)
    return plan_of(model, 2, accuracy=accuracy, buckets=buckets)


def sharded(model: nn.Module, **step: Any) -> Plan:
    """Ranks share the optimizer's step."""
    return plan_of(model, 2, updates=UpdatePlan(step=StepPlan(sharded=True, **step)))


def like_one_process() -> dict[str, float]:
    """Largest relative difference of weights from one process with all samples, by way of sending."""
    torch.set_num_threads(1)
    expected, accumulated = alone(), alone(3)
    results = {}
    nodes, ranks_per_node = (2, 2) if dist.get_world_size() == 4 else (1, dist.get_world_size())
    with on_grid(nodes, ranks_per_node) as group:
        for transport in TRANSPORTS.values():
            for spec in (CompressorSpec(name="none"), CompressorSpec(name="topk", density=1.0)):
                plan = partial(sent_by, transport, spec)
                if check_plan(dict(Net().named_parameters()), plan(Net()), dist.get_world_size()) is None:
                    model = trained(plan, process_group=group)
                    results[f"{transport} {spec.name}"] = difference(model, expected)
        results["sharded"] = difference(trained(sharded, process_group=group), expected)
        results["late gather"] = difference(trained(partial(sharded, gather="forward"), process_group=group), expected)
    results["asked"] = difference(trained(lambda model: plan_of(model, 2), asks=True), expected)
    results["accumulated"] = difference(trained(lambda model: plan_of(model, 2), 3), accumulated)
    results["sharded, accumulated"] = difference(trained(sharded, 3), accumulated)
    return results
