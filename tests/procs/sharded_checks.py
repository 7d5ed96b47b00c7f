"""What the ranks of the tests of shared steps do: each step shared, against the same plan where every rank does all."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from findings import alike
from interplay_interface_checks import profile_of
from session_checks import plan_of
from step_checks import Branches, raised
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

import planner
import runtime
from runtime.optimizers.units import ELEMENTWISE
from runtime.plan import StepPlan, UpdatePlan
from runtime.plan.measured import MeasuredStep
from runtime.sharded.state import state_bytes

SHARED = UpdatePlan(step=StepPlan(sharded=True))
LATE = UpdatePlan(step=StepPlan(sharded=True, gather="forward"))
Optimizer = torch.optim.Optimizer

MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    **{kind.__name__: lambda parameters, kind=kind: kind(parameters, lr=1e-2) for kind in ELEMENTWISE},
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "Adam, foreach": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


class Net(nn.Module):
    """Parameters of several shapes: a scalar, none at all, channels last, and more than one part holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.out = nn.Linear(8 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape (batch, 5)."""
        hidden = torch.tanh(self.conv(x)).flatten(1) * self.scale
        logits: Tensor = self.out(hidden) + self.empty.sum()
        return logits


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This rank's, float64."""
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if dist.is_initialized() else 0))
    x = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 5, (4,), generator=generator)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return functional.cross_entropy(model(x), y)


def made(
    shared: bool, make: Callable[[Any], Optimizer], group: int = 3, updates: UpdatePlan = SHARED
) -> tuple[nn.Module, Optimizer, Any]:
    """A model, its optimizer and a session."""
    model = Net().double()
    optimizer = make(model.parameters())
    plan = plan_of(model, group, updates=updates if shared else None)
    return model, optimizer, runtime.attach(model, optimizer, plan, timeout_s=60)


def same(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool | str:
    """Bit for bit with two ranks, whose sums have one order; else as near as another order brings float64."""
    exact = not dist.is_initialized() or dist.get_world_size() <= 2
    return alike(one, other) if exact else alike(one, other, rtol=1e-9, atol=1e-11)


def both(
    step: Callable[[nn.Module, Optimizer, Any, int], None], make: Any = None, steps: int = 3, **of: Any
) -> bool | str:
    """Whether a run with this step ends with the same weights, shared and not; and whether ranks agree on them."""
    models = []
    for shared in (True, False):
        model, optimizer, session = made(shared, make or MAKERS["AdamW"], **of)
        for number in range(steps):
            step(model, optimizer, session, number)
        session.detach()
        models.append(model)
    return same(models[0].parameters(), models[1].parameters()) and agreed(models[0])


def agreed(model: nn.Module) -> bool:
    """Whether all ranks have the same weights, bit for bit."""
    if not dist.is_initialized():
        return True
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [p.detach().clone() for p in model.parameters()])
    return all(torch.equal(a, b) for other in everyone for a, b in zip(everyone[0], other, strict=True))


def plain(model: nn.Module, optimizer: Optimizer, _: Any, number: int) -> None:
    """An ordinary step."""
    optimizer.zero_grad()
    loss_of(model, number).backward()
    optimizer.step()


def optimizers() -> dict[str, bool]:
    """Every elementwise optimizer, and sizes of buckets; a fused step rounds by where elements lie in memory."""
    several = dist.get_world_size() > 2
    makers = {name: make for name, make in MAKERS.items() if not several or " " in name}
    results = {name: (near(plain, make) if "fused" in name else both(plain, make)) for name, make in makers.items()}
    return results | {f"{group} a bucket": both(plain, group=group) for group in (1, 100)}


def clipped(model: nn.Module, optimizer: Optimizer, _: Any, number: int) -> None:
    """Clips to a norm that it always reaches."""
    optimizer.zero_grad(set_to_none=number == 0)
    (10 * loss_of(model, number)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=bool(number % 2))
    again = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert norm > 0.5
    assert torch.allclose(again, torch.tensor(0.5, dtype=torch.float64), rtol=1e-5)
    optimizer.step()


def other_norms(model: nn.Module, optimizer: Optimizer, session: Any, number: int) -> None:
    """Clips by other norms, then by value."""
    optimizer.zero_grad()
    loss_of(model, number).backward()
    given = [p for p in model.parameters() if p.numel()]  # of nothing, torch knows no largest
    torch.nn.utils.clip_grad_norm_(given, 0.1, norm_type=(float("inf"), 1.0, 3.0)[number])
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    optimizer.step()


def accumulated(model: nn.Module, optimizer: Optimizer, session: Any, number: int) -> None:
    """Two backwards, of which the second exchanges."""
    optimizer.zero_grad(set_to_none=number != 1)
    with session.no_sync():
        loss_of(model, 2 * number).backward()
    loss_of(model, 2 * number + 1).backward()
    optimizer.step()


def closures(model: nn.Module, optimizer: Optimizer, _: Any, number: int) -> None:
    """The step calls backward."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None


def changed(model: nn.Module, optimizer: Optimizer, _: Any, number: int) -> None:
    """Weights are changed between steps, one by other memory."""
    plain(model, optimizer, _, number)
    with torch.no_grad():
        model.out.weight.data = model.out.weight.data * 0.5  # type: ignore[union-attr,operator]
        model.conv.bias.mul_(2.0)  # type: ignore[union-attr,operator]


def replaced(model: nn.Module, optimizer: Optimizer, _: Any, number: int) -> None:
    """Two gradients are not those that came."""
    optimizer.zero_grad()
    loss_of(model, number).backward()
    model.out.bias.grad = torch.arange(5.0, dtype=torch.float64)  # type: ignore[union-attr]
    model.scale.grad = None  # type: ignore[assignment]
    optimizer.step()


def scheduled(model: nn.Module, optimizer: Optimizer, session: Any, number: int) -> None:
    """Rates follow a schedule."""
    if number == 0:
        session.scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.01], total_steps=9)
    plain(model, optimizer, session, number)
    session.scheduler.step()


def in_groups(parameters: Any) -> Optimizer:
    """Two groups of other options."""
    first, *rest = parameters
    return torch.optim.AdamW([{"params": rest, "weight_decay": 0.3}, {"params": [first], "lr": 0.1}])


def habits() -> dict[str, bool]:
    """What scripts do between backward and step."""
    results = {}
    for name, updates in {"": SHARED, ", late": LATE}.items():
        results |= {
            f"clip_grad_norm_{name}": near(clipped, updates=updates),
            f"other norms{name}": near(other_norms, updates=updates),
            f"accumulated{name}": both(accumulated, updates=updates),
            f"accumulated without no_sync{name}": near(added_up, updates=updates),
            f"closure{name}": both(closures, updates=updates),
            f"weights changed in between{name}": both(changed, updates=updates),
            f"gradients replaced{name}": both(replaced, updates=updates),
            f"groups and schedulers{name}": both(scheduled, in_groups, steps=6, updates=updates),
        }
    return results


def added_up(model: nn.Module, optimizer: Optimizer, session: Any, number: int) -> None:
    """Two backwards that exchange before a step, of which the second may use fewer parameters."""
    optimizer.zero_grad(set_to_none=number != 1)
    loss_of(model, 2 * number).backward()
    if number == 2:
        with session.no_sync():
            loss_of(model, 7).backward()
    (model.scale * 2.0 if number == 0 else loss_of(model, 2 * number + 1)).backward()  # type: ignore[operator]
    optimizer.step()


def near(step: Callable[[nn.Module, Optimizer, Any, int], None], make: Any = None, **of: Any) -> bool:
    """As `both`, of what is added up in another order even with two ranks: SGD, whose steps follow gradients."""
    models = []
    for shared in (True, False):
        model, optimizer, session = made(shared, make or MAKERS["SGD with momentum"], **of)
        for number in range(3):
            step(model, optimizer, session, number)
        session.detach()
        models.append(model)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in pairs) and agreed(models[0])


def unused() -> dict[str, bool]:
    """Parameters that some ranks or none use: AdamW would decay those that get zeros in place of nothing."""
    rank = dist.get_rank()
    results = {}
    models, grads = [], []
    for shared in (True, False):
        model = Branches()
        for parameter in model.branches[2].parameters():
            parameter.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        session = runtime.attach(model, optimizer, plan_of(model, 2, updates=SHARED if shared else None))
        for step, branches in enumerate([[0], [0, 1] if rank == 0 else [0], [0], []]):
            optimizer.zero_grad(set_to_none=step != 2)
            model(torch.full((2, 4), float(rank + step + 1)), branches).backward()
            optimizer.step()
        session.detach()
        models.append(model)
        grads.append([p.grad is None for p in model.parameters()])
    exact = dist.get_world_size() == 2
    results["weights"] = all(
        torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-5, atol=1e-6)
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True)
    )
    results["gradients"] = grads[0] == grads[1]
    return results


def scaled() -> dict[str, bool]:
    """A GradScaler, with a step that is not finite on one rank: all skip it, and scales stay equal."""
    scales, models, norms = [], [], []
    for updates in (SHARED, LATE, None):
        model, optimizer, session = made(updates is not None, MAKERS["AdamW"], updates=updates or SHARED)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for number in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, number)
            if number == 1 and dist.get_rank() == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if number == 3:
                grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
                before = torch.nn.utils.get_total_norm(grads)
                scaler.unscale_(optimizer)
                after = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e3)
                norms.append(torch.allclose(before / scaler.get_scale(), after))
            scaler.step(optimizer)
            scaler.update()
        session.detach()
        models.append(model)
        scales.append(scaler.get_scale())
    return {
        "norms": norms == [True, True, True],
        "scale": scales == [32.0, 32.0, 32.0],
        "weights": all(same(model.parameters(), models[2].parameters()) for model in models[:2]),
    }


def flat_state(state: dict[str, Any]) -> list[Tensor]:
    """Every tensor of a state_dict, in order; other values as tensors."""
    values = [value for index in sorted(state["state"]) for _, value in sorted(state["state"][index].items())]
    return [torch.as_tensor(value) for value in values]


def states() -> dict[str, Any]:
    """The whole state is that of the run that shares nothing; it is taken up again anywhere."""
    model, optimizer, session = made(True, MAKERS["Adam, foreach"])
    other, reference, beside = made(False, MAKERS["Adam, foreach"])
    for number in range(3):
        plain(model, optimizer, session, number)
        plain(other, reference, beside, number)
    whole, expected = session.optimizer_state_dict(), reference.state_dict()
    results: dict[str, Any] = {
        "refused": "expected session.optimizer_state_dict()" in raised(optimizer.state_dict),
        "no copies": all(
            "expected session.optimizer_state_dict()" in raised(lambda copied=copied: copied(optimizer))
            for copied in (copy.copy, copy.deepcopy, pickle.dumps)
        ),
        "whole": same(flat_state(whole), flat_state(expected)),
        "form": whole["param_groups"] == expected["param_groups"],
        "as before": beside.optimizer_state_dict().keys() == expected.keys(),
        "part": session.report().step.state_bytes <= state_bytes(reference.state) / dist.get_world_size() + 8 * 3 * 6,
    }
    weights = copy.deepcopy(model.state_dict())
    plain(model, optimizer, session, 3)
    session.detach()
    copied = pickle.loads(pickle.dumps(optimizer)).state_dict()
    results["copies when it is plain again"] = same(flat_state(copied), flat_state(optimizer.state_dict()))
    for name, before in {"loaded before attach": True, "loaded after attach": False}.items():
        again = Net().double()
        again.load_state_dict(weights)
        resumed = MAKERS["Adam, foreach"](again.parameters())
        if before:
            resumed.load_state_dict(whole)
        session = runtime.attach(again, resumed, plan_of(again, 2, updates=SHARED))
        if not before:
            resumed.load_state_dict(whole)
        gathered = session.optimizer_state_dict()
        results[f"{name}, the same bits"] = all(map(torch.equal, flat_state(gathered), flat_state(whole)))
        plain(again, resumed, session, 3)
        session.detach()
        results[name] = same(again.parameters(), model.parameters())
    results["taken"] = (whole, weights, [p.detach().clone() for p in model.parameters()])
    return results


def switched() -> dict[str, bool]:
    """From a shared step to one that is not, and back, also between backward and step; then nothing is left of it."""

    def switching(model: nn.Module, optimizer: Optimizer, session: Any, number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, number).backward()
        updates = (SHARED, None, LATE, LATE, None)[number]
        session.switch(plan_of(model, 2 + number % 3, updates=updates))
        assert (session.report().step is None) or updates is not None
        optimizer.step()

    def later(model: nn.Module, optimizer: Optimizer, session: Any, number: int) -> None:
        if number == 0:
            session.switch(plan_of(model, 4), at_step=2)
        plain(model, optimizer, session, number)

    reference, optimizer, session = made(False, MAKERS["AdamW"])
    for number in range(5):
        plain(reference, optimizer, session, number)
    session.detach()
    results = {}
    for name, step in {"now": switching, "later": later, "never": plain}.items():
        model, optimizer, session = made(True, MAKERS["AdamW"])
        for number in range(5):
            step(model, optimizer, session, number)
        if name == "never":
            optimizer.zero_grad()
            loss_of(model, 9).backward()
        session.detach()
        results[name] = same(model.parameters(), reference.parameters())
        results[f"{name}: plain again"] = len(optimizer.state_dict()["state"]) >= 5 and all(
            type(p.grad) is Tensor and p.untyped_storage().nbytes() == p.numel() * p.element_size() + 0
            for p in model.parameters()
            if p.grad is not None
        )
    return results


def failing() -> dict[str, bool]:
    """A step that raises leaves the groups with parameters, whatever schedulers make of it, and the run goes on."""
    results = {}
    for when in ("never", "before attach", "after attach"):
        model = Net().double()
        optimizer = MAKERS["AdamW"](model.parameters())
        group = optimizer.param_groups[0]
        own = group["params"]
        schedulers = [lr_scheduler.ConstantLR(optimizer)] if when == "before attach" else []
        before = vars(optimizer).get("step")
        session = runtime.attach(model, optimizer, plan_of(model, 3, updates=SHARED), timeout_s=60)
        schedulers += [lr_scheduler.ConstantLR(optimizer)] if when == "after attach" else []
        plain(model, optimizer, session, 0)
        rate, group["lr"] = group["lr"], "high"
        results[f"scheduler {when}: raised"] = True
        with suppress(TypeError):
            plain(model, optimizer, session, 1)
            results[f"scheduler {when}: raised"] = False
        results[f"scheduler {when}: parameters"] = group["params"] is own
        group["lr"] = rate
        plain(model, optimizer, session, 2)
        with warnings.catch_warnings(action="error"):  # of a step that schedulers do not know
            for scheduler in schedulers:
                scheduler.step()
        results[f"scheduler {when}: agreed"] = agreed(model)
        session.detach()
        results[f"scheduler {when}: plain"] = when == "after attach" or vars(optimizer).get("step") is before
    return results


def reported() -> dict[str, bool]:
    """What a measured step is made of: both halves of each bucket, the second at the end of the step."""
    model, optimizer, session = made(True, MAKERS["AdamW"])
    for number in range(3):
        plain(model, optimizer, session, number)
    report = session.report()
    session.detach()
    count = len(report.buckets)
    spans = [span for span in report.timeline.spans if span.resource == "network"]
    step = MeasuredStep.of(report.timeline, model=report.model, rank=0, ranks=dist.get_world_size(), steps=3)
    update = next(span for span in report.timeline.spans if span.task == "update")
    return {
        "pushed": [span.task for span in spans[:count]] == [f"bucket {i} reduce_scatter" for i in range(count)],
        "gathered": [span.task for span in spans[count:]] == [f"bucket {i} all_gather" for i in range(count)],
        "after the update": update.end_us <= spans[count].start_us < spans[-1].end_us <= report.iteration_us,
        "not exposed": abs(step.exposed_us - report.wait_us) < 1.0,
        "interface": "; interface sharded-step" in str(report),
    }


def replanned() -> dict[str, bool]:
    """A new plan may ask of the script what the present one does, and no more unless that is allowed."""
    results = {}
    for shared in (True, False):
        model, optimizer, session = made(shared, MAKERS["AdamW"])
        for number in range(6):
            plain(model, optimizer, session, number)
        profile = profile_of(model)
        again = partial(planner.replan, session, profile, passes="merge,shard_updates{step=always}", switch=False)
        results[f"allowed, {shared}"] = again(allow=["sharded-step"]).sharded
        if shared:
            results["kept"] = again().interfaces == ("sharded-step",)
        else:
            results["refused"] = "expected --allow sharded-step with it" in raised(again)
            results["drop-in"] = not planner.replan(session, profile).sharded
        session.detach()
    return results


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    "optimizers": optimizers, "habits": habits, "unused": unused, "scaled": scaled, "states": states,
    "switched": switched, "failing": failing,
    "reported": reported, "replanned": replanned,
}  # fmt: skip
