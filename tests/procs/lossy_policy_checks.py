"""What the ranks of the tests of lossy plans do: plans that are tried against exact ones, buckets that do harm."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from drift_checks import linked
from lossy_checks import CHECKS as LOSSY_CHECKS
from lossy_checks import carried
from lossy_reference import RANDOM, TOPK, WIRE, loss_of, lossy
from session_checks import convnet, plan_of
from sharded_checks import SHARED
from torch import Tensor, nn

import runtime
from runtime.monitor import trial
from runtime.monitor.verdict import Verdict
from runtime.plan import CompressorSpec, Plan
from runtime.session.session import Session
from runtime.sparse import guard, samples
from runtime.sparse.compressors.wire import WIRE_DTYPES


def tried_plan(spec: CompressorSpec = TOPK) -> Plan:
    """A lossy plan with an exact one beside it."""
    model = convnet()
    return replace(lossy(plan_of(model, 100), [spec]), fallback=plan_of(model, 2))


def tried(delay_s: float, first: int = 0) -> tuple[Session, list[str], list[str]]:
    """A lossy plan with an exact one beside it, on a link that is late for dense messages, after so many steps of the
    exact one: (session, the plan's accuracy in each step of both, warnings).
    """
    model = convnet()
    accuracies = []
    with warnings.catch_warnings(record=True) as caught, linked() as link:
        warnings.simplefilter("always")
        link.delay_s = delay_s
        plan = tried_plan()
        if first:
            assert plan.fallback is not None
            session = runtime.attach(model, None, plan.fallback)
            session.switch(plan, at_step=first)
        else:
            session = runtime.attach(model, None, plan)
        for step in range(first + 60):
            if step >= first:
                accuracies.append(session.plan.accuracy)
            model.zero_grad()
            loss_of(model, step % 4).backward()
    return session, accuracies, [str(one.message) for one in caught if one.category is runtime.FallbackWarning]


def fallback() -> dict[str, bool]:
    """The faster plan of the two is what the run goes on with, on all ranks from the same step."""
    results = {}
    for what, faster, first in (
        ("faster", True, 0), ("not faster", False, 0), ("later, faster", True, 5), ("later, not faster", False, 5),
    ):  # fmt: skip
        accuracy = "bounded" if faster else "exact"
        with nullcontext() if faster else patch.object(trial, "judge", turned(trial.judge)):
            session, accuracies, said = tried(0.003, first)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, accuracies)
        results[f"{what}: alike"] = all(one == everyone[0] for one in everyone)
        results[f"{what}: both were tried"] = set(accuracies[:40]) == {"bounded", "exact"}
        results[f"{what}: chosen"] = session.plan.accuracy == accuracy and set(accuracies[-10:]) == {accuracy}
        results[f"{what}: said"] = (
            ["they are not faster, and the run goes on with the exact plan"]
            if accuracy == "exact" and dist.get_rank() == 0
            else []
        ) == [text.partition("): ")[2] for text in said]
        assert session._monitor.trial is not None
        results[f"{what}: verdict"] = session._monitor.trial.verdict is not None
        session.detach()
    return results


def tried_once() -> dict[str, bool]:
    """A trial that was over is not repeated by a run that goes on, nor by one that goes on from that; with another plan
    it says nothing.
    """
    with patch.object(trial, "judge", turned(trial.judge)):
        first, _, _ = tried(0.003)
    saved = first.state_dict()
    first.detach()
    results = {}
    for what in ("resumed", "resumed again"):
        session = runtime.attach(convnet(), None, tried_plan())
        session.load_state_dict(saved)
        results[what] = session._monitor.trial is None and session.plan.accuracy == "exact"
        saved = session.state_dict()
        session.detach()
    session = runtime.attach(convnet(), None, tried_plan(WIRE))
    session.load_state_dict(saved)
    results["another plan"] = session._monitor.trial is not None and session.plan.accuracy == "bounded"
    session.detach()
    return results


def turned(judge: Callable[[Any], Verdict | None]) -> Callable[[Any], Verdict | None]:
    """As if the plans had been as fast as the other one."""
    return lambda rounds: judge([(exact, lossy) for lossy, exact in rounds])


class Opposed(nn.Module):
    """A weight whose largest gradients cancel over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100))
        self.other = nn.Parameter(torch.zeros(100))


def guarded() -> dict[str, bool]:
    """A bucket whose choice does harm sends everything soon, and what it held back is not lost; another one stays."""
    model = Opposed()
    plan = lossy(plan_of(model, 1), [CompressorSpec(name="topk", selector="exact", density=0.1)])
    sign = 1.0 if dist.get_rank() % 2 == 0 else -1.0
    large = torch.cat([torch.full((50,), 100.0 * sign), torch.ones(50)])
    ramp = torch.arange(100.0)
    pairs = dist.get_world_size() % 2 == 0
    total = torch.zeros(100)
    with warnings.catch_warnings(record=True) as caught, patch.multiple(guard, FIRST_STEP=1, FEWEST_STEPS=1, COST=1e9):
        warnings.simplefilter("always")
        session = runtime.attach(model, None, plan)
        for _ in range(24):
            model.zero_grad()
            ((model.weight * large).sum() + (model.other * ramp).sum()).backward()
            assert model.weight.grad is not None
            total += model.weight.grad
    names = {bucket.gradients[0]: bucket.compressor.name for bucket in session.plan.buckets}
    said = [str(one.message) for one in caught if one.category is runtime.AccuracyWarning]
    expected = large.clone()
    dist.all_reduce(expected)
    sampled = [sample for samples in session.samples.values() for sample in samples]
    session.detach()
    if not pairs:  # an odd rank's gradients are not cancelled: top-k is right there
        return {"stays": names == {"other": "topk", "weight": "topk"}, "says nothing": not said}
    return {
        "goes dense": names == {"other": "topk", "weight": "none"},
        "sampled": bool(sampled) and all(0.0 < sample.energy <= 1.0 and sample.figure <= 1.0 for sample in sampled),
        "says so on rank 0": len(said) == (dist.get_rank() == 0)
        and all("(weight … weight) leaves more behind" in text for text in said),
        "nothing is lost": torch.allclose(total, expected / dist.get_world_size() * 24, rtol=1e-5),
    }


def healthy() -> dict[str, bool]:
    """Narrow buckets of a model that trains stay what they are, far from what would be too much; so do those that
    choose at random, which nothing is known of. That they are looked at changes no bit.
    """
    return stay(shared=False) | {f"shared step, {what}": good for what, good in stay(shared=True).items()}


def stay(*, shared: bool) -> dict[str, bool]:
    """`healthy`, also where ranks share the optimizer's step."""
    results, trained = {}, {}
    specs = [
        CompressorSpec(name="wire", dtype=dtype, error_feedback=feedback, rounding=rounding)
        for dtype in WIRE_DTYPES
        for feedback, rounding in ((None, None), (False, None), (None, "stochastic"))
    ]
    plan = lossy(plan_of(convnet(), 1), specs if shared else [RANDOM, *specs])
    plan = replace(plan, updates=SHARED, interface=("sharded-step",)) if shared else plan
    for watched in (True, False):
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with (
            warnings.catch_warnings(record=True) as caught,
            patch.multiple(guard, FIRST_STEP=1, FEWEST_STEPS=1, COST=1e9),
        ):
            warnings.simplefilter("always")
            session = runtime.attach(model, optimizer, plan, guard=watched)
            for step in range(4 * len(plan.buckets)):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
        trained[watched] = nn.utils.parameters_to_vector(model.parameters()).detach()
        if watched:
            expected = (runtime.AccuracyCostWarning, runtime.StragglerWarning)
            others = [one for one in caught if one.category not in expected]
            results["stay"] = session.plan.buckets == plan.buckets and not others
            found = session.samples
            results["each is sampled"] = len(found) == sum(b.compressor.name == "wire" for b in plan.buckets) and all(
                len(of) >= 4 for of in found.values()
            )
            results["far from harm"] = all(s.figure < 0.25 * s.limit for of in found.values() for s in of)
            results["but something is lost"] = all(any(s.figure > 0.0 for s in of) for of in found.values())
            results["in the report"] = str(session.report()).count("relative error of the sum") == len(found)
        session.detach()
    results["the same bits"] = torch.equal(trained[True], trained[False])
    return results


def outliers() -> Tensor:
    """A gradient in each of whose blocks one element leaves no code to the others."""
    gradient = torch.ones(512)
    gradient[::64] = 2.0**40
    return gradient


def opposed() -> Tensor:
    """Gradients that cancel over two ranks but for one 1e-5 of them, which no narrow format keeps."""
    odd = dist.get_rank() % 2
    gradient = torch.randint(50_000, 100_000, (512,), generator=torch.Generator().manual_seed(3)).float()
    gradient[::64] *= 1 + odd  # so that scales are others, and roundings do not cancel, too
    return gradient * (1 - 2 * odd) + 1.0


def widened() -> dict[str, bool]:
    """A narrow bucket that does harm goes one step wider on all ranks, and again where it still does; with error
    feedback nothing is lost thereby.
    """
    results = {}
    cases: dict[str, tuple[dict[str, Any], str, Callable[[], Tensor], list[str]]] = {
        "float8, shared": ({"dtype": "float8_e4m3fn"}, "library", outliers, ["bfloat16"]),
        "opposed, shared": ({"dtype": "int8"}, "two_shot", opposed, ["bfloat16", "none"]),
        "int8, forgotten": ({"dtype": "int8", "block": 64, "error_feedback": False}, "library", outliers, ["bfloat16"]),
        "float8": ({"dtype": "float8_e4m3fn", "rounding": "stochastic"}, "two_shot", outliers, ["bfloat16"]),
        "opposed": ({"dtype": "int8"}, "two_shot", opposed, ["bfloat16", "none"]),
        "native": ({"dtype": "bfloat16", "error_feedback": False}, "native", opposed, ["none"]),
    }
    for what, (options, algorithm, make, expected) in cases.items():
        if dist.get_world_size() % 2 and make is opposed:
            continue  # an odd rank's gradients are not cancelled
        model = nn.ParameterDict({"weight": torch.zeros(512)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        plan = lossy(plan_of(model, 1), [CompressorSpec(name="wire", **options)])
        plan = replace(plan, buckets=(replace(plan.buckets[0], algorithm=algorithm),))
        if "shared" in what:
            plan = replace(plan, updates=SHARED, interface=("sharded-step",))
        gradient, ways = make(), []
        with (
            warnings.catch_warnings(record=True) as caught,
            patch.multiple(guard, FIRST_STEP=1, FEWEST_STEPS=1, COST=1e9),
            patch.object(samples, "DRAWN", 100),
        ):
            warnings.simplefilter("always")
            session = runtime.attach(model, optimizer, plan)
            for _ in range(30):
                optimizer.zero_grad()
                (model["weight"] * gradient).sum().backward()
                optimizer.step()
                bucket = session.plan.buckets[0]
                ways.append((bucket.algorithm, bucket.compressor.dtype or bucket.compressor.name))
        said = [str(one.message) for one in caught if one.category is runtime.AccuracyWarning]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (ways, said, model["weight"].detach()))
        passed = list(dict.fromkeys(ways))
        wide = [(algorithm if dtype != "none" else "library", dtype) for dtype in expected]
        results[f"{what}: wider"] = passed == [(algorithm, options["dtype"]), *wide]
        results[f"{what}: alike"] = all(one[0] == ways for one in everyone)
        to_say = expected if dist.get_rank() == 0 else []
        results[f"{what}: said"] = len(said) == len(to_say) and all(
            "(weight … weight) rounds too coarsely" in text
            and ("it sends everything" if dtype == "none" else f"it is sent as {dtype}") in text
            for dtype, text in zip(to_say, said, strict=False)
        )
        results[f"{what}: weights are equal"] = all(torch.equal(one[2], model["weight"]) for one in everyone)
        held = carried(session).get("weight", torch.zeros(512)).clone()
        dist.all_reduce(held)
        due = gradient.clone()
        dist.all_reduce(due)
        total = model["weight"].detach() / -0.5
        kept = torch.allclose(total + held, due / dist.get_world_size() * 30, rtol=1e-5, atol=0.01)
        results[f"{what}: nothing is lost"] = kept is (options.get("error_feedback") is None)
        session.detach()
    return results


def without_elements() -> dict[str, bool]:
    """A bucket whose only parameter has no elements sends nothing, in any dtype."""
    results = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model = nn.ParameterDict({"some": torch.ones(5, dtype=dtype), "none": torch.ones(0, dtype=dtype)})
        session = runtime.attach(model, None, lossy(plan_of(model, 1), [TOPK]))
        (model["some"].sum() + model["none"].sum()).backward()
        grad = model["none"].grad
        results[str(dtype)] = grad is not None and grad.shape == (0,) and bool(model["some"].grad.any())
        session.detach()
    return results


def adaptive_optimizers() -> dict[str, bool]:
    """Rank 0 says that selected elements do not suit them, at attach and when a run changes over; nothing else does."""

    def told(optimizer: type[torch.optim.Optimizer], specs: list[CompressorSpec]) -> int:
        model = convnet()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan = lossy(plan_of(model, 3), specs)
            session = runtime.attach(model, optimizer(model.parameters(), lr=0.1), plan, guard=False)
            session.switch(plan)
            session.detach()
        return sum(one.category is runtime.AccuracyWarning for one in caught)

    said = 2 if dist.get_rank() == 0 else 0
    return {
        "Adam": told(torch.optim.AdamW, [TOPK]) == said,
        "SGD": told(torch.optim.SGD, [TOPK]) == 0,
        "rounded": told(torch.optim.AdamW, [WIRE]) == 0,
    }


CHECKS: dict[str, Callable[[], dict[str, bool]]] = LOSSY_CHECKS | {
    check.__name__: check
    for check in (fallback, tried_once, guarded, healthy, widened, adaptive_optimizers, without_elements)
}


def run() -> dict[str, dict[str, bool]]:
    """All checks, in one start of the ranks."""
    return {name: check() for name, check in CHECKS.items()}
