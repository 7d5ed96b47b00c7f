"""What the ranks of the tests of exact first steps do, and of buckets that are compressed again after harm."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lossy_checks import carried, equal, train
from lossy_policy_checks import opposed
from lossy_reference import LOW_RANK, TOPK, lossy
from session_checks import convnet, plan_of
from sharded_checks import SHARED
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import runtime
from runtime.errors import PlanMismatch
from runtime.plan import CompressorSpec, DelaySpec, Plan
from runtime.plan.predicted import Prediction
from runtime.session.session import Session
from runtime.sparse import guard

FORMS = {"top-k": TOPK, "low rank": LOW_RANK, "int8": CompressorSpec(name="wire", dtype="int8", rounding="stochastic")}
FIRST, STEPS = 4, 8


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def compressed(spec: CompressorSpec, from_step: int | None = FIRST) -> Plan:
    """A plan of compressed buckets."""
    return replace(lossy(plan_of(convnet(), 4), [spec]), from_step=from_step)


def attached(plan: Plan) -> tuple[nn.Module, torch.optim.Optimizer, Session]:
    """A new model that trains by a plan."""
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, runtime.attach(model, optimizer, plan)


def ddp_first() -> dict[str, bool]:
    """Steps before `from_step` are DDP's, bit for bit; those after are the compressed plan's that starts there."""
    reference = convnet()
    ddp = DistributedDataParallel(reference)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    train(ddp, optimizer, range(FIRST))
    results = {}
    for what, spec in FORMS.items():
        model, own, session = attached(compressed(spec))
        for step in range(FIRST):
            results[f"{what}: nothing is held back in step {step}"] = not carried(session)
            train(model, own, range(step, step + 1))
        results[f"{what}: as DDP"] = equal(weights(model), weights(reference))
        twin = copy.deepcopy(reference)
        other = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        twin_session = runtime.attach(twin, other, compressed(spec, None))
        for step in range(FIRST, STEPS):
            train(model, own, range(step, step + 1))
            train(twin, other, range(step, step + 1))
        results[f"{what}: compressed from there"] = equal(weights(model), weights(twin)) and bool(carried(session))
        results[f"{what}: equal residuals"] = equal(carried(session), carried(twin_session))
        session.detach(), twin_session.detach()
    return results


def resumed_first() -> dict[str, bool]:
    """A checkpoint before or after `from_step` changes nothing, bit for bit: the number of the step survives."""
    straight, optimizer, session = attached(compressed(LOW_RANK))
    train(straight, optimizer, range(STEPS))
    session.detach()
    results = {}
    for at in (2, FIRST, 6):
        model, optimizer, session = attached(compressed(LOW_RANK))
        train(model, optimizer, range(at))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), session.state_dict()))
        session.detach()
        model, optimizer, session = attached(compressed(LOW_RANK))
        model.load_state_dict(saved[0]), optimizer.load_state_dict(saved[1]), session.load_state_dict(saved[2])
        results[f"step {at}"] = session.step == at
        train(model, optimizer, range(at, STEPS))
        results[f"from {at}"] = equal(weights(model), weights(straight))
        session.detach()
    return results


def switched_first() -> dict[str, bool]:
    """A run may switch to such a plan in its exact steps and behind them; with a switch that waits they end as well."""
    results = {}
    for at in (2, FIRST, 6):
        model, optimizer, session = attached(plan_of(convnet(), 4))
        session.switch(compressed(TOPK), at_step=at)
        held = []
        for step in range(STEPS):
            train(model, optimizer, range(step, step + 1))
            held.append(bool(carried(session)))
        results[f"at {at}"] = held == [step + 1 >= max(at, FIRST) for step in range(STEPS)]
        session.detach()
    model, optimizer, session = attached(compressed(TOPK))
    session.switch(plan_of(convnet(), 2), at_step=7)
    train(model, optimizer, range(6))
    results["a switch waits"] = bool(carried(session))
    session.detach()
    said = Prediction(iteration_us=1e3)
    tried = replace(compressed(TOPK), fallback=plan_of(convnet(), 2), predicted=said)
    model, optimizer, session = attached(tried)
    accuracies, predicted = [], []
    for step in range(FIRST + 20):
        predicted.append(session.report().predicted_us)
        train(model, optimizer, range(step, step + 1))
        accuracies.append(session.plan.accuracy)
    results["nothing is predicted of them"] = predicted[: FIRST + 1] == [None] * FIRST + [1e3]
    # Three steps of the plan are left out, then blocks of five steps alternate: lossy, exact, exact, lossy.
    begins = FIRST + trial_begins()
    results["tried behind them"] = accuracies[:begins] == ["bounded"] * begins and accuracies[begins] == "exact"
    session.detach()
    return results


def trial_begins() -> int:
    """Steps of a compressed plan before the first block of the exact one."""
    model, optimizer, session = attached(replace(compressed(TOPK, None), fallback=plan_of(convnet(), 2)))
    steps = 0
    while session.plan.accuracy != "exact":
        train(model, optimizer, range(steps, steps + 1))
        steps += 1
    session.detach()
    return steps - 1


def refused_first() -> dict[str, bool]:
    """Modes with first steps of their own, or without compression, refuse it; ranks have to agree on it."""
    wire = compressed(CompressorSpec(name="wire", dtype="int8"))
    cases = {
        "delay": (replace(compressed(TOPK), accuracy="relaxed", delay=DelaySpec(steps=1, warmup_steps=1)), "warmup_s"),
        "sharded step": (replace(wire, updates=SHARED, interface=("sharded-step",)), "reduce-scatters"),
        "another on each rank": (compressed(TOPK, FIRST + dist.get_rank()), "plan"),
    }
    results = {}
    for what, (plan, words) in cases.items():
        try:
            attached(plan)[2].detach()
            results[what] = False
        except PlanMismatch as error:
            results[what] = words in str(error) and ("from_step" in str(error) or "another" in what)
    return results


def restored() -> dict[str, bool]:
    """A bucket that did harm is compressed as planned again after a while, on all ranks at one step, and widened again
    where it still does harm, for twice as long; nothing is lost thereby.
    """
    model = nn.ParameterDict({"weight": torch.zeros(512)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    spec = CompressorSpec(name="topk", selector="exact", density=0.1)
    plan = lossy(plan_of(model, 1), [spec])
    gradient, forms = opposed(), []
    with (
        warnings.catch_warnings(record=True) as caught,
        patch.multiple(guard, FIRST_STEP=1, FEWEST_STEPS=1, COST=1e9, FIRST_WAIT_STEPS=8),
    ):
        warnings.simplefilter("always")
        session = runtime.attach(model, optimizer, plan)
        for _ in range(60):
            optimizer.zero_grad()
            (model["weight"] * gradient).sum().backward()
            optimizer.step()
            forms.append(session.plan.buckets[0].compressor.name)
    said = [str(one.message) for one in caught if one.category is runtime.AccuracyWarning]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (forms, model["weight"].detach()))
    runs = [len(run) for run in "".join("x" if form == "none" else " " for form in forms).split()]
    due, held = gradient.clone(), carried(session).get("weight", torch.zeros(512)).clone()
    dist.all_reduce(due), dist.all_reduce(held)
    session.detach()
    return {
        "alike": all(one[0] == forms and torch.equal(one[1], model["weight"]) for one in everyone),
        "for twice as long each time": runs[:2] == [8, 16] and len(runs) >= 3,
        "begins as planned": forms[0] == "topk",
        "said": [f"after {8 * 2**index} steps" in text for index, text in enumerate(said)] == [True] * len(said)
        and bool(said) == (dist.get_rank() == 0),
        "nothing is lost": torch.allclose(
            model["weight"].detach() / -0.5 + held, due / dist.get_world_size() * 60, rtol=1e-5, atol=0.01
        ),
    }


CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    check.__name__: check for check in (ddp_first, resumed_first, switched_first, refused_first, restored)
}


def run() -> dict[str, dict[str, bool]]:
    """All checks, in one start of the ranks."""
    return {name: check() for name, check in CHECKS.items()}
