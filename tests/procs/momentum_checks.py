"""What the ranks of the tests of momentum correction and density warm-up do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lossy_checks import train
from lossy_reference import LAYERS, TOPK, WIRE, Reference, equal, everyones_gradients, gradients, loss_of, lossy
from session_checks import convnet, plan_of
from step_checks import raised
from torch import Tensor, nn

import runtime
from runtime.checks.plan import trainable_parameters
from runtime.plan import CompressorSpec, MomentumSpec, Plan
from runtime.session.session import Session

HEAVY = MomentumSpec(momentum=0.75, masking=False)
DGC = MomentumSpec(momentum=0.75)
WARMED = replace(TOPK, warmup_steps=8)


def corrected(model: nn.Module, compressors: Sequence[CompressorSpec | None], spec: MomentumSpec) -> Plan:
    """A plan with momentum correction."""
    return replace(lossy(plan_of(model, 5), compressors), momentum_correction=spec)


def start(compressors: Sequence[CompressorSpec | None], spec: MomentumSpec) -> tuple[nn.Module, Any, Session]:
    """A model that trains by one."""
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, optimizer, runtime.attach(model, optimizer, corrected(model, compressors, spec))


def against_reference() -> dict[str, bool]:
    """Each rank's velocities are what is selected from, bit for bit, and what was sent loses its velocity."""
    results = {}
    for what, spec in {"masked": DGC, "not masked": HEAVY}.items():
        model, optimizer, session = start([TOPK], spec)
        reference, good = Reference(model, session.plan), True
        ranks = range(dist.get_world_size())
        names = trainable_parameters(model)
        velocities = [{name: torch.zeros_like(p.detach()) for name, p in names.items()} for _ in ranks]
        for step in range(8):
            for rank, own in enumerate(everyones_gradients(model, step)):
                for name, gradient in own.items():
                    velocities[rank][name] = velocities[rank][name] * spec.momentum + gradient * (1.0 / len(ranks))
            before = copy.deepcopy(reference.residuals)
            expected = reference.step(velocities, scale=1.0)  # they are of averages already
            if spec.masking:
                for rank, own in enumerate(velocities):
                    for name, velocity in own.items():
                        sent = before[rank][name] + velocity != reference.residuals[rank][name]
                        velocity[sent] = 0.0
            optimizer.zero_grad()
            loss_of(model, step).backward()
            good &= all(
                torch.allclose(found, expected[n], rtol=1e-5, atol=1e-8) for n, found in gradients(model).items()
            )
            optimizer.step()
        session.detach()
        results[what] = good
    return results


def as_momentum() -> dict[str, bool]:
    """Where everything travels, training is that of SGD with momentum."""
    plain = convnet()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.75)
    session = runtime.attach(plain, optimizer, plan_of(plain, 5))
    train(plain, optimizer, range(8))
    session.detach()
    results = {}
    whole = CompressorSpec(name="topk", density=1.0)
    for what, compressors, same in (
        ("exact", [None], torch.equal),
        ("all selected", [whole], torch.allclose),
        ("mixed", [whole, None], torch.allclose),
    ):
        model, optimizer, session = start(compressors, HEAVY)
        train(model, optimizer, range(8))
        session.detach()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        results[what] = all(same(one, other) for one, other in pairs)
    return results


def resumed() -> dict[str, bool]:
    """A checkpoint in the middle changes nothing, bit for bit."""
    compressors = [TOPK, None, LAYERS, WIRE]
    straight, optimizer, session = start(compressors, DGC)
    train(straight, optimizer, range(8))
    session.detach()
    model, optimizer, session = start(compressors, DGC)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(session.state_dict())
    session.detach()
    session = runtime.attach(model, optimizer, corrected(model, compressors, DGC))
    session.load_state_dict(saved)
    train(model, optimizer, range(3, 8))
    wrong = copy.deepcopy(saved)
    wrong["carried"]["momenta"] = {"x": torch.zeros(1)}
    results = {
        "same": equal(dict(model.named_parameters()), dict(straight.named_parameters())),
        "another model's is refused": raised(lambda: session.load_state_dict(wrong)).startswith("InputE"),
    }
    session.detach()
    return results


def _owed(session: Session) -> dict[str, Tensor]:
    """What all ranks' residuals and velocities come to if all gradients that follow are zero, by the formula."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, session.state_dict()["carried"])
    total = {}
    for name in session.parameters:
        for carried in everyone:
            later = carried["momentum"] / (1.0 - carried["momentum"])
            owed = carried["residuals"].get(name, torch.zeros(()))
            if name in carried["velocities"]:
                owed = owed + later * carried["velocities"][name]
            else:
                owed = owed * (1.0 + later) + later * carried["momenta"][name] / len(everyone)
            total[name] = total.get(name, 0.0) + owed
    return total


def _given(model: nn.Module) -> dict[str, Tensor]:
    """What the session adds up to for each parameter while all gradients are zero."""
    total = {name: torch.zeros_like(p.detach()) for name, p in trainable_parameters(model).items()}
    for _ in range(100):
        model.zero_grad()
        (loss_of(model, 0) * 0.0).backward()
        for name, gradient in gradients(model).items():
            total[name] += gradient
    return total


def conserved() -> dict[str, bool]:
    """What residuals and velocities owe is given, also after a change of plans, whatever the new one adds up."""
    whole = CompressorSpec(name="topk", density=1.0)
    results = {}
    for before, after in (([TOPK], [None]), ([None], [whole]), ([WIRE, TOPK], [TOPK, WIRE]), ([TOPK, None], [TOPK])):
        for spec in (HEAVY, MomentumSpec(momentum=0.5, masking=False), None):
            model, optimizer, session = start(before, HEAVY)
            train(model, optimizer, range(4))
            owed = _owed(session)
            session.switch(replace(corrected(model, after, HEAVY), momentum_correction=spec))
            given = _given(model)
            session.detach()
            close = [torch.allclose(given[name], owed[name], rtol=1e-2, atol=1e-5) for name in owed]
            what = " to ".join(",".join(one.name if one else "none" for one in side) for side in (before, after))
            results[f"{what}, {spec}"] = all(close)
    return results


def warmed_up() -> dict[str, bool]:
    """More travels in the first steps: a quarter of them each at 25 %, 6.25 %, 1.56 % and what the plan says."""
    model, _, session = start([WARMED], MomentumSpec(momentum=0.0))
    buckets = session._exchange.buckets
    sizes = [sum(slot.parameter.numel() for slot in bucket.slots) for bucket in buckets]
    seen = []
    for step in range(10):
        model.zero_grad()
        loss_of(model, step % 4).backward()
        seen.append([bucket.lossy.k for bucket in buckets if bucket.lossy is not None])
    densities = [0.25, 0.25, 0.0625, 0.0625, *[0.05] * 6]
    expected = [[max(int(0.05 * size) or 1, int(density * size)) for size in sizes] for density in densities]
    session.switch(plan_of(model, 2))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
    session.switch(lossy(plan_of(model, 5), [WARMED]))
    model.zero_grad()
    loss_of(model, 0).backward()
    again = [bucket.lossy.k for bucket in session._exchange.buckets if bucket.lossy is not None]
    session.detach()
    return {"k": seen == expected, "once in a run": again == expected[-1]}


def refused() -> dict[str, bool]:
    """Two momenta, or an optimizer that has its own."""
    model = convnet()
    plan = corrected(model, [TOPK], DGC)
    said = {
        "SGD with momentum": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "AdamW": torch.optim.AdamW(model.parameters()),
        "no optimizer": None,
    }
    results = {}
    for words, optimizer in said.items():
        found = raised(lambda optimizer=optimizer: runtime.attach(model, optimizer, plan))
        results[words] = found.startswith("PlanMismatch") and words in found
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    fallen = replace(plan, fallback=plan_of(model, 2))
    found = raised(lambda: runtime.attach(model, plain, fallen))
    results["another fallback"] = "correct momentum differently" in found
    return results


CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    f"momentum: {check.__name__}": check
    for check in (against_reference, as_momentum, resumed, conserved, warmed_up, refused)
}
