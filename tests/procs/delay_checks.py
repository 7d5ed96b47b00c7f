"""What the ranks of the tests of plans with delay do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from delay_reference import Lossy, Reference, Sgd, Weights
from torch import Tensor, nn

import runtime
from runtime.plan import DelaySpec, ModelReference, Plan, PlanBucket, PlanWorld
from runtime.session.session import Session

WARMUP = 60
"""A multiple of 1 to 5."""
FEW = DelaySpec(steps=2, warmup_steps=4)


class Net(nn.Module):
    """Small, smooth, and in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one = nn.Linear(5, 7, dtype=torch.float64)
        self.two = nn.Linear(7, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5) → (batch, 3)."""
        scores: Tensor = self.two(torch.tanh(self.one(x)))
        return scores


class Whole(nn.Module):
    """Two vectors whose gradients are whole numbers, whatever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(7.0))
        self.b = nn.Parameter(torch.arange(4.0))

    def forward(self, factors: tuple[Tensor, Tensor]) -> Tensor:
        """Its gradient are the factors, more where a weight is positive."""
        a, b = factors
        loss: Tensor = (self.a * a).sum() + (self.b * b).sum() + self.a.relu().sum() * 2.0
        return loss


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one rank."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(6, 5, dtype=torch.float64, generator=generator)
    return x, torch.randn(6, 3, dtype=torch.float64, generator=generator)


def net_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """Of one rank."""
    x, y = batch(rank, step)
    loss: Tensor = ((model(x) - y) ** 2).mean()
    return loss


def whole_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """Of one rank; whole gradients, divisible by the number of ranks without rounding for 2 and 4."""
    generator = torch.Generator().manual_seed(77 * rank + step)
    a, b = (torch.randint(-8, 8, (n,), generator=generator).float() * 12.0 for n in (7, 4))
    loss: Tensor = model((a, b))
    return loss


Loss = Callable[[nn.Module, int, int], Tensor]


def plan_of(model: nn.Module, spec: DelaySpec | None, group: int = 1, **changes: Any) -> Plan:
    """Buckets of `group` gradients."""
    names = [name for name, _ in model.named_parameters()][::-1]
    buckets = tuple(PlanBucket(gradients=tuple(names[i : i + group])) for i in range(0, len(names), group))
    ranks = dist.get_world_size()
    values: dict[str, Any] = {
        "model": ModelReference(name="test"), "world": PlanWorld(ranks=ranks, nodes=ranks),
        "accuracy": "exact" if spec is None else "relaxed", "buckets": buckets, "delay": spec,
    }  # fmt: skip
    return Plan(**(values | changes))


def attach(model: nn.Module, optimizer: Any, spec: DelaySpec | None, group: int = 1, **changes: Any) -> Session:
    """A session with a plan, without judging steps."""
    return runtime.attach(model, optimizer, plan_of(model, spec, group, **changes), drift=False, timeout_s=60.0)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, steps: range, lr: Any = None) -> None:
    """Some steps of this rank."""
    for step in steps:
        for group in optimizer.param_groups if lr is not None else ():
            group["lr"] = lr(step)
        optimizer.zero_grad()
        loss(model, dist.get_rank(), step).backward()
        optimizer.step()


def expected_of(
    make: Callable[[], nn.Module], loss: Loss, spec: DelaySpec, sgd: Sgd, steps: int, ranks_per_node: int = 1,
    lossy: Lossy | None = None,
) -> Reference:  # fmt: skip
    """What the reference comes to."""
    model = make()
    parameters = list(model.parameters())

    def gradient(weights: Weights, rank: int, step: int) -> Weights:
        with torch.no_grad():
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.copy_(weight)
        return list(torch.autograd.grad(loss(model, rank, step), parameters))

    first = [p.detach().clone() for p in parameters]
    return Reference(gradient, first, dist.get_world_size(), spec, sgd, ranks_per_node, lossy).run(steps)


def close(found: Any, expected: Any, tolerance: float) -> bool:
    """Relative to the largest of each tensor; 0: bit for bit."""
    pairs = list(zip(found, expected, strict=True))
    if tolerance == 0.0:
        return all(torch.equal(one.detach(), other) for one, other in pairs)
    return all(
        float((one.detach() - other).abs().max()) <= tolerance * float(other.abs().max()) for one, other in pairs
    )


def compared(
    make: Callable[[], nn.Module], loss: Loss, spec: DelaySpec, sgd: Sgd, steps: int, tolerance: float, group: int = 1
) -> dict[str, bool]:
    """Own and global weights against the reference."""
    model = make()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=sgd.lr(0), momentum=sgd.momentum, weight_decay=sgd.weight_decay, nesterov=sgd.nesterov
    )
    session = attach(model, optimizer, spec, group)
    train(model, optimizer, loss, range(steps), sgd.lr)
    reference = expected_of(make, loss, spec, sgd, steps)
    results = {"own": close(model.parameters(), reference.local[dist.get_rank()], tolerance)}
    with session.global_weights():
        results["global"] = close(model.parameters(), reference.weights, tolerance)
    results["own again"] = close(model.parameters(), reference.local[dist.get_rank()], tolerance)
    session.detach()
    return results


def against_reference() -> dict[str, bool]:
    """k = 1 … 5, 50 delayed steps, also with whole numbers."""
    results = {}
    sgd = Sgd(lr=lambda step: 0.02, momentum=0.9, weight_decay=1e-3)
    for k in range(1, 6):
        spec = DelaySpec(steps=k, warmup_steps=WARMUP)
        found = compared(Net, net_loss, spec, sgd, WARMUP + 50, 1e-6, group=1 + k % 2)
        whole = compared(Whole, whole_loss, DelaySpec(steps=k, warmup_steps=0), Sgd(lambda _: 2**-6, 0.5), 50, 0.0)
        results |= {f"k={k}: {what}": good for what, good in found.items()}
        results |= {f"k={k}, whole numbers: {what}": good for what, good in whole.items()}
    return results


def variants() -> dict[str, bool]:
    """Other optimizers' settings, rates that change, a local update that is plain SGD."""
    results = {}
    steep = {"nesterov": Sgd(lambda _: 0.02, 0.9, 0.0, True), "no momentum": Sgd(lambda _: 0.05),
             "rates change": Sgd(lambda step: 0.04 / (1 + step / 10), 0.8, 1e-2)}  # fmt: skip
    spec = DelaySpec(steps=3, warmup_steps=6, alpha=1.0, local_lr_scale=2.0)
    for what, sgd in steep.items():
        found = compared(Net, net_loss, spec, sgd, 30, 1e-6, group=4)
        results |= {f"{what}: {one}": good for one, good in found.items()}
    spec = DelaySpec(steps=3, warmup_steps=6, alpha=1.0, beta=0.0, local_lr_scale=1.0)
    found = compared(Net, net_loss, spec, Sgd(lambda _: 0.02, 0.9, 1e-3), 30, 1e-6, group=2)
    return results | {f"plain SGD: {one}": good for one, good in found.items()}


def warm_up_is_synchronous() -> dict[str, bool]:
    """Until the warm-up ends, training is that of a plan without delay, bit for bit."""
    found = []
    for spec in (None, DelaySpec(steps=2, warmup_steps=20)):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        session = attach(model, optimizer, spec, 2)
        train(model, optimizer, net_loss, range(20))
        found.append([p.detach().clone() for p in model.parameters()])
        session.detach()
    return {"same": close(found[0], found[1], 0.0)}


def two_groups() -> dict[str, bool]:
    """Each group has its own rate, also at the owners'."""
    model = Net()
    groups = [{"params": model.one.parameters(), "lr": 0.01}, {"params": model.two.parameters(), "lr": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    session = attach(model, optimizer, FEW, 3)
    still = [p.detach().clone() for p in model.two.parameters()]
    train(model, optimizer, net_loss, range(15))
    results = {"own stay": close(model.two.parameters(), still, 0.0)}
    with session.global_weights():
        results["global stay"] = close(model.two.parameters(), still, 0.0)
        results["others do not"] = not torch.equal(model.one.weight, Net().one.weight)
    session.detach()
    return results


CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    check.__name__: check for check in (against_reference, variants, warm_up_is_synchronous, two_groups)
}
