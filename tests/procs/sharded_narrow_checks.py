"""What the ranks of the tests of shared steps do where gradients travel in fewer bytes, or weights do."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from lossy_reference import TOPK, lossy
from session_checks import plan_of
from sharded_checks import MAKERS, SHARED, agreed, flat_state, same
from step_checks import raised
from torch import Tensor, nn

import runtime
from runtime.plan import NO_COMPRESSION, CompressorSpec, Plan, StepPlan, UpdatePlan
from runtime.session.session import Session
from runtime.sparse.compressors.wire import EIGHT_BITS, WIRE_DTYPES

ROUNDED = UpdatePlan(step=StepPlan(sharded=True, weights="bfloat16"))
ROUNDED_LATE = UpdatePlan(step=StepPlan(sharded=True, weights="bfloat16", gather="forward"))
INTERFACE = ("late-gather", "bfloat16-weights")
RATE = 2.0**-6

Optimizer = torch.optim.Optimizer


class Taught(nn.Module):
    """Parameters whose gradients are given, whole numbers, so that sums are exact in any order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        shapes: dict[str, tuple[int, ...]] = {"a": (7, 20), "b": (3,), "none": (0, 2), "c": (), "d": (9, 30)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randint(-99, 99, shape).float()))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        """A loss whose gradients these are."""
        products = [(p * gradients[name]).sum() for name, p in self.named_parameters() if name in gradients]
        return torch.stack(products).sum()


def lesson(step: int, rank: int, scale: int = 900) -> dict[str, Tensor]:
    """One rank's gradients, multiples of the number of ranks; now and then one that it does not use, or nobody does."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    found = {}
    for name, parameter in Taught().named_parameters():
        whole = torch.randint(-scale, scale, parameter.shape, generator=generator).float() * dist.get_world_size()
        if not (step % 3 == 1 and name == "a" and rank) and not (step % 3 == 2 and name in "bd"):
            found[name] = whole
    return found


def average(step: int) -> dict[str, Tensor]:
    """Of all ranks."""
    total = {name: torch.zeros_like(p) for name, p in Taught().named_parameters()}
    for rank in range(dist.get_world_size()):
        for name, gradient in lesson(step, rank).items():
            total[name] += gradient / dist.get_world_size()
    return total


def plan_in(model: nn.Module, group: int, spec: CompressorSpec | None, updates: UpdatePlan | None) -> Plan:
    """Buckets of so many gradients, in turn narrow and whole where there are several."""
    plan = lossy(plan_of(model, group), [spec, None] if group == 2 else [spec])
    return replace(plan, updates=updates, interface=None if updates is None else INTERFACE)


def attached(
    spec: CompressorSpec | None, updates: UpdatePlan | None, make: Callable[[Any], Optimizer], group: int = 3
) -> tuple[Taught, Optimizer, Session]:
    """A model, its optimizer and a session."""
    model = Taught()
    optimizer = make(model.parameters())
    return model, optimizer, runtime.attach(model, optimizer, plan_in(model, group, spec, updates), timeout_s=60)


def sgd(parameters: Any) -> Optimizer:
    """Whose weights add up gradients exactly."""
    return torch.optim.SGD(parameters, lr=RATE)


def resumed(saved: Any, plan: Plan, every: bool) -> tuple[Taught, Optimizer, Session]:
    """Another process's run, as it were."""
    model = Taught()
    optimizer = sgd(model.parameters())
    session = runtime.attach(model, optimizer, plan, timeout_s=60)
    model.load_state_dict(saved[0])
    state: Any = saved[1]
    if every:
        state = [None] * dist.get_world_size()
        dist.all_gather_object(state, saved[1])
    session.load_state_dict(state)
    return model, optimizer, session


def fail(_gradient: Tensor) -> None:
    """A hook."""
    raise ArithmeticError("on purpose")


def life(spec: CompressorSpec, updates: UpdatePlan, seed: int) -> bool:
    """Whether a run of many fates ends with weights that have seen every gradient: bit for bit where codes are exact.

    Steps accumulate, in `no_sync` or on averages, are not finite on one rank, fail on all, and go on from checkpoints;
    plans change to other buckets, whole or selected from, shared or not.
    """
    fates = random.Random(seed)
    model, optimizer, session = attached(spec, updates, sgd)
    first = [p.detach().clone() for p in model.parameters()]
    due = [torch.zeros_like(p) for p in model.parameters()]
    rank, numbers = dist.get_rank(), count()

    def backward(fails: bool = False) -> None:
        """Of one batch, whose average is due."""
        step = next(numbers)
        if fails:
            handle = model.c.register_hook(fail)  # type: ignore[operator,union-attr]
            with suppress(ArithmeticError):
                model({name: torch.ones_like(p) for name, p in model.named_parameters()}).backward()
            handle.remove()
        else:
            model(lesson(step, rank)).backward()
            for total, gradient in zip(due, average(step).values(), strict=True):
                total += gradient

    fate = ""
    for _ in range(14):
        # After a failure views may still be on their way, until the next forward.
        optimizer.zero_grad(set_to_none=fates.random() < 0.5 or fate == "fail")
        fate = fates.choice(("step", "step", "accumulate", "again", "infinite", "fail", "switch", "save"))
        match fate:
            case "accumulate":
                with session.no_sync():
                    backward()
                backward()
                optimizer.step()
            case "again" if session.plan.sharded:
                backward()
                backward()
                optimizer.step()
            case "infinite":
                odd = {name: torch.ones_like(p) for name, p in model.named_parameters()}
                odd["a"][0, 0] = torch.inf if rank else 1.0  # of which one rank owns the sum
                model(odd).backward()
                norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
                assert not norm.isfinite(), "all ranks have to skip the step"
            case "fail":
                backward(fails=True)
            case "switch":
                shared = fates.choice((updates, updates, SHARED, None))
                chosen = fates.choice((spec, spec, None, TOPK if shared is None else spec))
                session.switch(plan_in(model, fates.choice((1, 2, 3, 5)), chosen, shared))
            case "save":
                saved = copy.deepcopy((model.state_dict(), session.state_dict()))
                plan = session.plan
                session.detach()
                model, optimizer, session = resumed(saved, plan, every=fates.random() < 0.5)
            case _:
                backward()
                optimizer.step()
    left = ended(model, optimizer, session)
    exact = spec.dtype not in EIGHT_BITS or spec.dtype == "float8_e4m3fn"
    expected = [weight - RATE * total for weight, total in zip(first, due, strict=True)]
    pairs = list(zip(expected, model.parameters(), strict=True))
    near = all(torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-6, atol=1e-3) for a, b in pairs)
    return near and not left and agreed(model)


def ended(model: nn.Module, optimizer: Optimizer, session: Session) -> bool:
    """Make a step of gradients that are 0 by a plan that sends everything; return whether anything is left then."""
    session.switch(plan_of(model, 2))
    optimizer.zero_grad()
    model({name: torch.zeros_like(p) for name, p in model.named_parameters()}).backward()
    optimizer.step()
    left = session.state_dict().keys() != {"plan", "ranks"}
    session.detach()
    return left


def lives() -> dict[str, bool]:
    """Of every format, with weights whole and rounded."""
    specs = [CompressorSpec(name="wire", dtype=dtype) for dtype in WIRE_DTYPES]
    specs += [CompressorSpec(name="wire", dtype="bfloat16", rounding="stochastic")]
    return {
        f"{spec.dtype} {spec.rounding}, {updates.step}, life {seed}": life(spec, updates, seed)
        for number, spec in enumerate(specs)
        for updates in (SHARED, ROUNDED, ROUNDED_LATE)
        for seed in range(5 * number, 5 * number + 2)
    }


def taught(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """Ordinary steps."""
    for step in steps:
        optimizer.zero_grad()
        model(lesson(step, dist.get_rank())).backward()
        optimizer.step()


def rounded(session: Session, model: nn.Module) -> bool:
    """Whether the model has the float32 weights of all ranks, rounded, on all of them."""
    shown = [p.detach().clone() for p in model.parameters()]
    with session.global_weights():
        whole = [p.detach().clone() for p in model.parameters()]
    put_back = all(map(torch.equal, shown, model.parameters()))
    return put_back and agreed(model) and all(map(torch.equal, shown, [w.bfloat16().float() for w in whole]))


def weights() -> dict[str, bool]:
    """Optimizers update weights as if nobody rounded them; everybody sees them rounded."""
    results = {}
    for name in ("SGD with momentum", "AdamW", "AdamW, fused", "Adam, foreach"):
        ends = []
        for updates in (ROUNDED, ROUNDED_LATE, None):
            model, optimizer, session = attached(None, updates, MAKERS[name])
            taught(model, optimizer, range(4))
            if updates is not None:
                results[f"{name}, {updates.step}: rounded"] = rounded(session, model)
                with session.global_weights():
                    inside = copy.deepcopy(model.state_dict())
                session.switch(plan_in(model, 2, None, updates))
                results[f"{name}, {updates.step}: rounded after a switch"] = rounded(session, model)
            taught(model, optimizer, range(4, 7))
            state = session.optimizer_state_dict()
            session.detach()
            ends.append([*(p.detach() for p in model.parameters()), *flat_state(state)])
        exact = dist.get_world_size() == 2 and "fused" not in name
        late = all(map(torch.equal, ends[0], ends[1]))
        results[f"{name}: whole at the end"] = late and all(
            torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-5, atol=1e-6)
            for a, b in zip(ends[0], ends[2], strict=True)
        )
        results[f"{name}: something is rounded"] = any(
            not torch.equal(w, w.bfloat16().float()) for w in inside.values()
        )
    return results


def changed() -> dict[str, bool]:
    """What a script makes of rounded weights counts, element by element; what it leaves keeps its last bits. A step
    that raises undoes nothing.
    """

    def in_groups(parameters: Any) -> Optimizer:
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=RATE)

    model, optimizer, session = attached(None, ROUNDED, in_groups)
    taught(model, optimizer, range(3))
    with session.global_weights():
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        model.a[2:] = 1.001  # type: ignore[index,operator]
        model.d.data = model.d.data.clone()  # type: ignore[union-attr,operator]
        before["a"][2:] = 1.001
    group = optimizer.param_groups[1]
    group["lr"] = "high"
    results = {"raised": False}
    try:
        taught(model, optimizer, range(3, 4))
    except TypeError:
        results["raised"] = True
    group["lr"] = RATE
    taught(model, optimizer, range(3, 4))
    session.detach()
    gradients = average(3)
    before["a"] -= RATE * gradients["a"]  # the step that raised had come so far
    expected = [(before[name] - RATE * gradients[name]) for name, _ in model.named_parameters()]
    return results | {"counts": same(expected, model.parameters())}


def checkpoints() -> dict[str, bool]:
    """A run goes on bit for bit from model, optimizer and session; what would lose the last bits is refused."""
    spec = CompressorSpec(name="wire", dtype="int8")
    straight, optimizer, session = attached(spec, ROUNDED, MAKERS["AdamW"])
    taught(straight, optimizer, range(8))
    session.detach()
    results = {}
    for what in ("own", "all ranks'", "none"):
        model, optimizer, session = attached(spec, ROUNDED, MAKERS["AdamW"])
        taught(model, optimizer, range(4))
        saved = copy.deepcopy((model.state_dict(), session.optimizer_state_dict(), session.state_dict()))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, saved[2])
        session.detach()
        model, optimizer, session = attached(spec, ROUNDED, MAKERS["AdamW"])
        if what != "none":
            session.load_state_dict(everyone if what != "own" else saved[2])
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        taught(model, optimizer, range(4, 8))
        session.detach()
        results[what] = bool(same(model.parameters(), straight.parameters())) is (what != "none")
    other = everyone[dist.get_rank() - 1] | {"rank": dist.get_rank(), "carried": {}}
    for what, plan, state, words in (
        ("another rank's", plan_in(model, 3, spec, ROUNDED), other, "weights in float32 that this rank has of"),
        ("other buckets", plan_in(model, 1, spec, ROUNDED), saved[2], "pass a list of them on every rank"),
        ("weights as they are", plan_in(model, 3, spec, SHARED), saved[2], "expected a plan that gathers them so"),
        ("not shared", plan_of(model, 3), saved[2], "save the model inside session.global_weights() there"),
    ):
        model = Taught()
        session = runtime.attach(model, sgd(model.parameters()), plan, timeout_s=60)
        said = raised(lambda s=session, given=state: s.load_state_dict(given))
        refused = said.startswith("InputError") and words in said
        if what == "other buckets":  # of which the last of many ranks may have no more than it had
            refused = refused or (not said and dist.get_rank() > 1)
            session.load_state_dict(everyone)
        results[f"{what}: refused"] = refused
        session.detach()
    return results


def alone() -> dict[str, bool]:
    """A backward that fails on one rank is no step of any: others are told, and no residual moves. What a script has
    put in the place of a gradient that nobody uses is added to what a residual brings.
    """
    model, optimizer, session = attached(CompressorSpec(name="wire", dtype="bfloat16"), SHARED, sgd)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    taught(model, optimizer, range(1))
    before = copy.deepcopy(session.state_dict()["carried"]["residuals"])
    results = {"something is held back": all(bool(before[name].any()) for name in "ad")}
    failing = dist.get_rank() == 1
    handle = model.c.register_hook(fail) if failing else None  # type: ignore[operator,union-attr]
    said = "CommunicationError: an exception ended"
    with suppress(ArithmeticError):
        said = raised(lambda: model(lesson(1, dist.get_rank())).backward())
    if handle is not None:
        handle.remove()
    results["told"] = said.startswith("CommunicationError") and "an exception ended" in said
    held = session.state_dict()["carried"]["residuals"]
    results["residuals are what they were"] = all(torch.equal(held[name], before[name]) for name in before)
    taught(model, optimizer, range(3, 4))
    optimizer.zero_grad()
    model.b.grad = torch.full_like(model.b, 4.0)  # type: ignore[assignment,arg-type]
    model({"c": torch.zeros(())}).backward()
    optimizer.step()
    results["nothing is left"] = not ended(model, optimizer, session)
    due = {name: gradient + average(3)[name] for name, gradient in average(0).items()}
    due["b"] += 4.0
    results["nothing is lost"] = all(torch.equal(first[n] - RATE * due[n], p) for n, p in model.named_parameters())
    return results


def norms() -> dict[str, bool]:
    """Clipping by global norm and a GradScaler see the sums that came; residuals follow the scale."""
    results = {}
    spec, bits = CompressorSpec(name="wire", dtype="float8_e4m3fn"), []
    for scaled in (False, True):
        scales = [2.0**10, 2.0**10, 2.0**8, 2.0**12]
        scale = scales[0]
        model = Taught()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        plan = plan_in(model, 2, spec, SHARED)
        given = (lambda: scale) if scaled else None  # noqa: B023
        session = runtime.attach(model, optimizer, plan, loss_scale=given, timeout_s=60)
        for step, scale in enumerate(scales):
            optimizer.zero_grad()
            (model(lesson(step, dist.get_rank())) * (scale if scaled else 1.0)).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            torch._foreach_div_(gradients, scale if scaled else 1.0)
            parts = session._exchange.launcher.parts  # type: ignore[attr-defined]
            own = torch.cat([part.total for part in parts]).double().square().sum()
            dist.all_reduce(own)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1000.0)
            results[f"norm, {scaled}, step {step}"] = torch.allclose(norm.double(), own.sqrt()) and float(norm) > 1000
            optimizer.step()
        session.detach()
        bits.append([p.detach() for p in model.parameters()])
    results["scales change nothing"] = all(map(torch.equal, *bits))
    return results


def refusals() -> Iterator[tuple[str, Plan, nn.Module, str]]:
    """What is refused at attach, with its words."""
    model, spec = Taught(), CompressorSpec(name="wire", dtype="int8")
    good = plan_in(model, 3, spec, ROUNDED)
    other = replace(good, updates=UpdatePlan(step=StepPlan(sharded=True, weights="int8")))
    exact = replace(good, accuracy="exact", buckets=tuple(replace(b, compressor=NO_COMPRESSION) for b in good.buckets))
    half = CompressorSpec(name="wire", dtype="bfloat16")
    native = replace(good, buckets=tuple(replace(b, algorithm="native", compressor=half) for b in good.buckets))
    sparse = replace(lossy(plan_of(model, 3), [TOPK]), updates=SHARED, interface=INTERFACE)
    unshared = replace(good, updates=UpdatePlan(step=StepPlan(sharded=False, weights="bfloat16")))
    mixed = nn.ParameterDict({"a": torch.zeros(3), "b": torch.zeros(3, dtype=torch.bfloat16)})
    wide = Taught().double()
    yield "another dtype", other, model, "updates.step.weights: found 'int8', expected 'bfloat16', or none"
    yield "exact", exact, model, "updates.step.weights: found bfloat16 in a plan whose accuracy is exact"
    yield "interface", replace(good, interface=("sharded-step",)), model, "found none of bfloat16-weights"
    yield "not shared", unshared, model, "in a plan whose ranks do not share the step"
    yield "native", native, model, "is sent by all_reduce/native with the compressor 'wire', but a sharded step"
    yield "selected", sparse, model, "expected all_reduce/library without a compressor or with wire"
    yield "two dtypes", plan_in(mixed, 3, spec, SHARED), mixed, "several dtypes, and its ranks share the optimizer's"
    yield "float64", plan_in(wide, 3, None, ROUNDED), wide, "is float64; expected parameters of at most 32 bits"


def refused() -> dict[str, bool]:
    """In words."""
    results = {}
    for what, plan, model, words in refusals():
        optimizer = sgd(model.parameters())
        said = raised(lambda m=model, o=optimizer, p=plan: runtime.attach(m, o, p))
        results[what] = said.startswith("PlanMismatch") and words in said and "; expected" in said.replace(", ", "; ")
    return results


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    "narrow lives": lives, "rounded weights": weights, "rounded weights changed": changed,
    "narrow checkpoints": checkpoints, "narrow failures": alone, "narrow norms": norms, "narrow refusals": refused,
}  # fmt: skip
