"""What the ranks of the tests of plans with delay do."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from delay_reference import Reference, Sgd, Weights
from step_checks import raised
from torch import Tensor, nn

import runtime
from runtime import staleness
from runtime.plan import CompressorSpec, DelaySpec, ModelReference, Plan, PlanBucket, PlanWorld
from runtime.session import Session

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


def expected_of(make: Callable[[], nn.Module], loss: Loss, spec: DelaySpec, sgd: Sgd, steps: int) -> Reference:
    """What the reference comes to."""
    model = make()
    parameters = list(model.parameters())

    def gradient(weights: Weights, rank: int, step: int) -> Weights:
        with torch.no_grad():
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.copy_(weight)
        return list(torch.autograd.grad(loss(model, rank, step), parameters))

    first = [p.detach().clone() for p in parameters]
    return Reference(gradient, first, dist.get_world_size(), spec, sgd).run(steps)


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
    """Other optimizers' settings, rates that change, other local updates."""
    results = {}
    steep = {"nesterov": Sgd(lambda _: 0.02, 0.9, 0.0, True), "no momentum": Sgd(lambda _: 0.05),
             "rates change": Sgd(lambda step: 0.04 / (1 + step / 10), 0.8, 1e-2)}  # fmt: skip
    spec = DelaySpec(steps=3, warmup_steps=6, alpha=1.0, local_lr_scale=2.0)
    for what, sgd in steep.items():
        found = compared(Net, net_loss, spec, sgd, 30, 1e-6, group=4)
        results |= {f"{what}: {one}": good for one, good in found.items()}
    for update in ("sgd", "dc_asgd"):
        spec = DelaySpec(steps=3, warmup_steps=6, local_update=update, local_lr_scale=1.0)
        found = compared(Net, net_loss, spec, Sgd(lambda _: 0.02, 0.9, 1e-3), 30, 1e-6, group=2)
        results |= {f"{update}: {one}": good for one, good in found.items()}
    return results


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


def _started(spec: DelaySpec = FEW) -> tuple[nn.Module, torch.optim.Optimizer, Session]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    return model, optimizer, attach(model, optimizer, spec, 2)


def resumed() -> dict[str, bool]:
    """A checkpoint in the warm-up, at a pull and between two changes nothing, bit for bit."""
    results = {}
    for k, at in ((1, 9), (2, 3), (2, 10), (2, 11), (3, 11), (3, 13)):
        spec = DelaySpec(steps=k, warmup_steps=6)
        straight, optimizer, session = _started(spec)
        train(straight, optimizer, net_loss, range(20))
        session.detach()
        model, optimizer, session = _started(spec)
        train(model, optimizer, net_loss, range(at))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), session.state_dict()))
        session.detach()
        model, optimizer, session = _started(spec)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        session.load_state_dict(saved[2])
        train(model, optimizer, net_loss, range(at, 20))
        results[f"k={k} at {at}"] = session.step == 20 and close(model.parameters(), list(straight.parameters()), 0.0)
        session.detach()
    return results


def resharded() -> dict[str, bool]:
    """Another number of ranks goes on with the same global weights and momenta."""
    model, optimizer, session = _started()
    train(model, optimizer, net_loss, range(11))
    with session.global_weights():
        weights = [p.detach().clone() for p in model.parameters()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, session.state_dict())
    assert session.delay is not None
    momenta = session.delay._momenta()
    session.detach()
    alone = copy.deepcopy(everyone[0]) | {"ranks": 1}
    shapes = {name: p for name, p in model.named_parameters()}
    from runtime.shards import joined

    whole, buffers = joined([one["delay"]["pieces"] for one in everyone], shapes)
    alone["delay"]["pieces"] = {
        name: {"start": 0, "weights": whole[name].flatten(), "momentum": buffers[name].flatten()} for name in whole
    }
    model, optimizer, session = _started()
    session.load_state_dict([alone])
    results = {"own": close(model.parameters(), weights, 0.0), "step": session.step == 11}
    with session.global_weights():
        results["global"] = close(model.parameters(), weights, 0.0)
    assert session.delay is not None
    results["momenta"] = close(session.delay._momenta().values(), list(momenta.values()), 0.0)
    train(model, optimizer, net_loss, range(11, 14))
    session.detach()
    wrong: Mapping[str, Any] = {
        "an exact plan's": {"plan": "x", "ranks": dist.get_world_size()},
        "another delay's": everyone[dist.get_rank()] | {"delay": everyone[0]["delay"] | {"spec": {"steps": 9}}},
        "another rank's": everyone[dist.get_rank() - 1],
        "some ranks'": everyone[1:],
        "nothing": {},
    }
    model, optimizer, session = _started()
    for what, state in wrong.items():
        results[f"{what} is refused"] = raised(lambda state=state: session.load_state_dict(state)).startswith("InputE")
    session.detach()
    return results


def not_finite() -> dict[str, bool]:
    """A gradient that is not finite on one rank is no step of the global weights, on all ranks alike."""
    model, optimizer, session = _started()
    train(model, optimizer, net_loss, range(9))
    with session.global_weights():
        before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    factor = float("nan") if dist.get_rank() == 0 else 1.0
    (net_loss(model, dist.get_rank(), 9) * factor).backward()
    with session.global_weights():
        same = close(model.parameters(), before, 0.0)
    session.detach()
    return {"skipped": same}


def left() -> dict[str, bool]:
    """A change of plans ends the delay: weights and momenta are the global ones everywhere, and no update is lost."""
    model, optimizer, session = _started()
    train(model, optimizer, net_loss, range(10))
    session.switch(plan_of(model, None, 4), at_step=11)
    train(model, optimizer, net_loss, range(10, 11))
    reference = expected_of(Net, net_loss, FEW, Sgd(lambda _: 0.02, 0.9, 1e-3), 11)
    results = {"global at once": close(model.parameters(), reference.weights, 1e-9)}
    plain = replace(FEW, warmup_steps=1000)
    reference.spec, reference.local = plain, [[w.clone() for w in reference.weights] for _ in reference.local]
    for step in range(11, 15):
        reference.step(step)
    train(model, optimizer, net_loss, range(11, 15))
    results["goes on with its momentum"] = close(model.parameters(), reference.weights, 1e-9)
    results["delays cannot begin late"] = "whose warm-up begins with a run" in raised(
        lambda: session.switch(plan_of(model, FEW))
    )
    session.detach()
    return results


def guarded() -> dict[str, bool]:
    """Ranks that are too far from each other shorten the delay, then go on without, all at one step."""
    model, optimizer, session = _started(DelaySpec(steps=4, warmup_steps=8))
    seen = []
    with warnings.catch_warnings(record=True) as caught, patch.multiple(staleness, BOUND=0.0, PULLS=2):
        warnings.simplefilter("always")
        for step in range(60):
            train(model, optimizer, net_loss, range(step, step + 1))
            assert session.delay is not None
            seen.append((session.delay.steps, session.delay.stage))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (seen, [p.detach() for p in model.parameters()]))
    texts = [str(one.message) for one in caught if one.category is runtime.AccuracyWarning]
    session.detach()
    return {
        "alike": all(one[0] == seen for one in everyone),
        "shortened, then synchronous": list(dict.fromkeys(k for k, _ in seen)) == [4, 2, 1, 0],
        "said": len(texts) == 3 and "every 2 steps" in texts[0] and "steps are synchronous" in texts[2],
        "same weights at the end": all(close(one[1], everyone[0][1], 0.0) for one in everyone),
        "stage": seen[-1][1] == "synchronous",
    }


@patch.multiple(staleness, BOUND=1e9)
def habits() -> dict[str, bool]:
    """Steps that are left out, accumulated gradients, unused parameters, closures."""
    model, optimizer, session = _started(DelaySpec(steps=1, warmup_steps=2))
    train(model, optimizer, net_loss, range(5))
    for step in range(5, 9):  # no optimizer's step, on one rank alone
        optimizer.zero_grad()
        net_loss(model, dist.get_rank(), step).backward()
        if dist.get_rank() != 0:
            optimizer.step()
    with session.no_sync():
        net_loss(model, dist.get_rank(), 9).backward()
    results = {"accumulating is no step": session.step == 9}
    train(model, optimizer, net_loss, range(10, 12))
    model.two.requires_grad_(True)
    optimizer.zero_grad()
    model.one(batch(0, 0)[0]).sum().backward()
    results["unused stay none"] = model.two.weight.grad is None
    optimizer.step()
    results["closures are refused"] = "found a closure" in raised(lambda: optimizer.step(lambda: 0.0))
    with session.global_weights():
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [p.detach() for p in model.parameters()])
    results["global weights are the same"] = all(close(one, everyone[0], 0.0) for one in everyone)
    session.detach()
    return results


def without_warm_up() -> dict[str, bool]:
    """It is said, on one rank, unless nothing is to be guarded."""
    said = []
    for guard in (True, False):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan = plan_of(model, DelaySpec(steps=1, warmup_steps=0))
            runtime.attach(model, optimizer, plan, drift=False, guard=guard).detach()
        said.append([one.category is runtime.AccuracyWarning and "500" in str(one.message) for one in caught])
    return {"said": said == [[True] if dist.get_rank() == 0 else [], []]}


def refused() -> dict[str, bool]:
    """What a plan with delay cannot be, in words."""
    model = Net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    topk = CompressorSpec(name="topk", density=0.5)
    bucket = PlanBucket(
        gradients=tuple(n for n, _ in model.named_parameters()), collective="sparse", algorithm="flat", compressor=topk
    )
    ranks = dist.get_world_size()
    cases: dict[str, tuple[DelaySpec, Any, dict[str, Any]]] = {
        "AdamW": (FEW, torch.optim.AdamW(model.parameters()), {}),
        "no optimizer": (FEW, None, {}),
        "SGD with dampening": (FEW, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, dampening=0.1), {}),
        "SGD with maximize": (FEW, torch.optim.SGD(model.parameters(), lr=0.1, maximize=True), {}),
        'expected "relaxed"': (FEW, sgd, {"accuracy": "exact"}),
        "expected a multiple of its 3 steps, such as 6": (DelaySpec(steps=3, warmup_steps=4), sgd, {}),
        "which is unknown; known: glu, sgd, dc_asgd": (replace(FEW, local_update="lu"), sgd, {}),
        "is compressed": (FEW, sgd, {"buckets": (bucket,)}),
        "one rank a node": (FEW, sgd, {"world": PlanWorld(ranks=ranks, nodes=1)}),
    }
    results = {}
    for words, (spec, optimizer, changes) in cases.items():
        found = raised(lambda o=optimizer, s=spec, c=changes: attach(model, o, s, **c))
        results[words] = found.startswith("PlanMismatch") and words in found
    return results


CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    check.__name__: check
    for check in (
        against_reference, variants, warm_up_is_synchronous, two_groups, resumed, resharded, not_finite, left, guarded,
        habits, without_warm_up, refused,
    )
}  # fmt: skip


def run() -> dict[str, dict[str, bool]]:
    """All checks, in one start of the ranks."""
    return {name: check() for name, check in CHECKS.items()}
