"""What the ranks of the tests of lossy plans do, each against a reference that knows every rank's gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lossy_reference import (
    LAYERS,
    LOW_RANK,
    RANDOM,
    TOPK,
    WIRE,
    Reference,
    equal,
    everyones_gradients,
    gradients,
    loss_of,
    lossy,
)
from session_checks import convnet, plan_of
from step_checks import raised
from torch import Tensor, nn

import runtime
from runtime.checks.plan import trainable_parameters
from runtime.plan import CompressorSpec
from runtime.session.session import Session

CHANCE = CompressorSpec(name="wire", dtype="int8", rounding="stochastic")
MIXED = [TOPK, LOW_RANK, LAYERS, WIRE, CHANCE]


def carried(session: Session) -> dict[str, Tensor]:
    """What the session has yet to send, by gradient."""
    found: dict[str, Tensor] = session.state_dict().get("carried", {}).get("residuals", {})
    return found


def start(compressors: Sequence[CompressorSpec | None], group: int = 4) -> tuple[nn.Module, Any, Session]:
    """A model that trains by a lossy plan."""
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, optimizer, runtime.attach(model, optimizer, lossy(plan_of(model, group), compressors))


def against_reference() -> dict[str, bool]:
    """Gradients and residuals, ten steps, bit for bit; in the last bucket, too, which carries the usage flags."""
    results = {}
    for what, compressors in {
        "bucket": [TOPK],
        "layer": [LAYERS],
        "mixed": [TOPK, None],
        "last": [None, None, LAYERS],
    }.items():
        model, optimizer, session = start(compressors, group=5)
        reference, good, kept = Reference(model, session.plan), True, True
        for step in range(10):
            expected = reference.step(everyones_gradients(model, step))
            optimizer.zero_grad()
            loss_of(model, step).backward()
            exact = {n for b in session.plan.buckets if b.compressor.name == "none" for n in b.gradients}
            found = gradients(model)
            good &= all(torch.allclose(found[n], expected[n], rtol=1e-6, atol=1e-8) for n in exact)
            good &= equal(*({n: one[n] for n in found if n not in exact} for one in (found, expected)))
            mine = reference.residuals[dist.get_rank()]
            kept &= equal(carried(session), {name: mine[name] for name in found if name not in exact})
            optimizer.step()
        session.detach()
        results |= {f"{what}: gradients": good, f"{what}: residuals": kept}
    return results


def not_finite() -> dict[str, bool]:
    """A gradient that is not finite on one rank is seen by all, and no rank's residual changes, nor what a step
    of low rank starts from.
    """
    results = {}
    for what, compressors in {
        "sparse": [TOPK],
        "dense": [None, TOPK],
        "narrow": [WIRE, TOPK, WIRE],
        "int8": [CompressorSpec(name="wire", dtype="int8")],
        "float8": [CompressorSpec(name="wire", dtype="float8_e4m3fn")],
        "random": [RANDOM],
        "low rank": [LOW_RANK],
        "low rank, matrix": [LOW_RANK, TOPK],
    }.items():
        model, optimizer, session = start(compressors)
        loss_of(model, 0).backward()
        before, starts = carried(session), session.state_dict()["carried"].get("starts", {})
        optimizer.zero_grad()
        names = list(trainable_parameters(model))
        where = names[-2 if "matrix" in what else -1]  # in the first bucket
        handle = trainable_parameters(model)[where].register_hook(
            lambda g: torch.full_like(g, float("inf")) if dist.get_rank() == 1 else None
        )
        loss_of(model, 1).backward()
        handle.remove()
        found = gradients(model)[where]
        results[f"{what}: seen"] = not bool(torch.isfinite(found).all())
        results[f"{what}: residuals"] = equal(carried(session), before)
        results[f"{what}: starts"] = equal(session.state_dict()["carried"].get("starts", {}), starts)
        results[f"{what}: starts are kept"] = bool(starts) is ("low rank" in what)
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        results[f"{what}: goes on"] = bool(torch.isfinite(gradients(model)[where]).all())
        results[f"{what}: moves on"] = not equal(carried(session), before)
        session.detach()
    return results


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Some steps."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def resumed() -> dict[str, bool]:
    """A checkpoint in the middle changes nothing, bit for bit; without its residuals it would."""
    results = {}
    straight, optimizer, session = start(MIXED, group=2)
    train(straight, optimizer, range(10))
    session.detach()
    alike: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(alike, [p.detach().numpy().tobytes() for p in straight.parameters()])
    results["ranks agree"] = all(one == alike[0] for one in alike)
    for what, whole in (("with residuals", True), ("without", False)):
        model, optimizer, session = start(MIXED, group=2)
        train(model, optimizer, range(4))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), session.state_dict()))
        session.detach()
        model, optimizer, session = start(MIXED, group=2)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        if whole:
            session.load_state_dict(saved[2])
        train(model, optimizer, range(4, 10))
        same = equal(dict(model.named_parameters()), dict(straight.named_parameters()))
        results[what] = same is whole
        session.detach()
    return results


def steps_after(
    model: nn.Module, optimizer: torch.optim.Optimizer, held: list[Any]
) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Steps 3 and 4, each with the gradients found and those expected: what all ranks held back comes in the first."""
    for step, late in ((3, True), (4, False)):
        own = everyones_gradients(model, step)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        expected = {name: sum(g[name] for g in own) / len(own) for name in own[0]}
        if late:
            expected = {name: value + sum(part[name] for part in held) for name, value in expected.items()}
        yield step, gradients(model), expected


def switched() -> dict[str, bool]:
    """What lossy buckets held back travels with the first step of a plan that sends everything, and only then."""
    results = {}
    model, optimizer, session = start([TOPK, LOW_RANK])
    train(model, optimizer, range(3))
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, carried(session))
    session.switch(lossy(plan_of(model, 3), [LAYERS, LOW_RANK]))
    results["from lossy to lossy"] = equal(carried(session), held[dist.get_rank()])
    session.switch(plan_of(model, 2))
    for step, found, expected in steps_after(model, optimizer, held):
        results[f"step {step}"] = all(torch.allclose(found[n], expected[n], rtol=1e-5, atol=1e-7) for n in found)
    results["nothing is left"] = session.state_dict().keys() == {"plan", "ranks"}
    session.detach()
    return results


def other_ranks() -> dict[str, bool]:
    """The residuals of five ranks, and of one, taken over by another number, have the sum that they had."""
    model, _, session = start([TOPK, LOW_RANK])
    generator = torch.Generator().manual_seed(5)
    shapes = {name: p.shape for name, p in trainable_parameters(model).items()}
    results = {}
    for count in (1, 5):
        states = [
            {
                "plan": "another",
                "ranks": count,
                "rank": rank,
                "carried": {
                    "residuals": {n: torch.randint(-9, 9, s, generator=generator).float() for n, s in shapes.items()},
                    "steps": 7,
                    "loss_scale": 4.0 / 2.0**rank,
                },
            }
            for rank in range(count)
        ]
        session.load_state_dict(states)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, carried(session))
        total = {name: sum(one[name] for one in everyone) for name in shapes}
        held = [s["carried"] for s in states]
        expected = {n: sum(h["residuals"][n] * (4.0 / h["loss_scale"]) for h in held) for n in shapes}
        results[f"from {count}"] = equal(total, expected)
        refusal = raised(lambda states=states: session.load_state_dict(states[0]))
        results[f"one of {count} alone is refused"] = "pass a list of them on every rank" in refusal
    mine = session.state_dict()
    wrong: dict[str, Any] = {
        "another rank's": mine | {"rank": mine["rank"] + 1},
        "nothing": [],
        "some ranks": [mine],
        "no residuals": mine | {"carried": {"steps": 1}},
        "a number": 5,
        "no scale": mine | {"carried": mine["carried"] | {"loss_scale": 0.0}},
        "another model": mine | {"carried": mine["carried"] | {"residuals": {"x": torch.zeros(1)}}},
    }
    for what, state in wrong.items():
        results[f"{what} is refused"] = raised(lambda state=state: session.load_state_dict(state)).startswith("InputE")
    results["nothing has changed"] = equal(carried(session), mine["carried"]["residuals"])
    session.load_state_dict({"plan": "an exact one", "ranks": dist.get_world_size()})
    results["an exact plan held nothing back"] = not any(bool(part.any()) for part in carried(session).values())
    session.detach()
    return results


def narrowed() -> dict[str, bool]:
    """Sums of what travels in fewer bytes: gradients are near the averages (those of low rank need not be), and over
    some steps what is missing is what is held back, where anything is.
    """
    results = {}
    for what, options, tolerance in (
        ("bfloat16", {"dtype": "bfloat16"}, 0.02), ("float16", {"dtype": "float16"}, 0.02),
        ("int8", {"dtype": "int8"}, 0.02), ("float8", {"dtype": "float8_e4m3fn", "block": 64}, 0.1),
        ("int8 by chance", {"dtype": "int8", "rounding": "stochastic"}, 0.04),
        ("int8, forgotten", {"dtype": "int8", "error_feedback": False}, 0.02),
        ("native", {"dtype": "bfloat16"}, 0.03), ("low rank", {"name": "powersgd", "rank": 2}, math.inf),
    ):  # fmt: skip
        spec = CompressorSpec(**{"name": "wire"} | options)
        model = convnet()
        plan = lossy(plan_of(model, 5), [spec])
        if what == "native":
            plan = replace(plan, buckets=tuple(replace(bucket, algorithm="native") for bucket in plan.buckets))
        session = runtime.attach(model, None, plan)
        total: dict[str, Any] = {}
        near = True
        for step in range(4):
            own = everyones_gradients(model, step)
            model.zero_grad()
            loss_of(model, step).backward()
            found = gradients(model)
            averages = {name: torch.stack([one[name].double() for one in own]).mean(dim=0) for name in found}
            for name, value in found.items():
                # What int8 loses follows the largest element of the block, which may be another gradient's.
                beside = next(b.gradients for b in plan.buckets if name in b.gradients) if "int8" in what else [name]
                largest = max(float(averages[n].abs().max()) for n in beside)
                allowed = 1e-6 + tolerance * largest
                near &= torch.allclose(value.double(), averages[name], rtol=min(tolerance, 1.0), atol=allowed)
                total[name] = total.get(name, 0) + averages[name] - value.double()
        held = carried(session)
        for part in held.values():
            dist.all_reduce(part)
        results[f"{what}: near"] = near
        alike: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(alike, {name: value.numpy().tobytes() for name, value in gradients(model).items()})
        results[f"{what}: the same bits"] = all(one == alike[0] for one in alike)
        if options.get("error_feedback") is False:
            results[f"{what}: nothing is held back"] = not held
        else:
            results[f"{what}: something is held back"] = any(bool(part.any()) for part in held.values())
            # What the backend's own sums lose is lost.
            close = [torch.allclose(part.double(), total[n], rtol=1e-3, atol=1e-7) for n, part in held.items()]
            results[f"{what}: nothing is lost"] = all(close) or what == "native"
        session.detach()
    return results


def forgetful() -> dict[str, bool]:
    """What was held back before is sent by buckets that keep nothing themselves, once."""
    model, optimizer, session = start([TOPK])
    train(model, optimizer, range(3))
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, carried(session))
    session.switch(lossy(plan_of(model, 4), [CompressorSpec(name="wire", dtype="float16", error_feedback=False)]))
    results = {"from lossy to lossy": equal(carried(session), held[dist.get_rank()])}
    for step, found, expected in steps_after(model, optimizer, held):
        results[f"step {step}"] = all(
            torch.allclose(found[n], expected[n], rtol=2e-3, atol=1e-3 * float(expected[n].abs().max())) for n in found
        )
    results["nothing is left"] = not carried(session)
    session.detach()
    return results


def loss_scales() -> dict[str, bool]:
    """What is held back follows the scale of the loss: training is as without one, for powers of two bit for bit."""
    scales = [2.0**10, 2.0**10, 2.0**9, 2.0**12, 2.0**12, 2.0**3]
    plain, optimizer, session = start([TOPK, LOW_RANK])
    train(plain, optimizer, range(len(scales)))
    session.detach()
    model = convnet()
    optimizer, scale = torch.optim.SGD(model.parameters(), lr=0.05), scales[0]
    session = runtime.attach(model, optimizer, lossy(plan_of(model, 4), [TOPK, LOW_RANK]), loss_scale=lambda: scale)
    for step, scale in enumerate(scales):
        optimizer.zero_grad()
        (loss_of(model, step) * scale).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(scale)
        optimizer.step()
    session.detach()
    return {"weights": equal(dict(model.named_parameters()), dict(plain.named_parameters()))}


def updates_held_back() -> dict[str, bool]:
    """Residuals in units of updates, as Algorithm 1 of LAGS-SGD: v = ε + α·g, ε = v − TopK(v), w −= mean of TopK(v);
    powers of two, bit for bit; from a warm-up of 0 to a decay, saved after every step.
    """
    model, rates, results = convnet(), [0.0, 2.0**-6, 2.0**-5, 2.0**-5, 2.0**-7, 2.0**-8], {}
    optimizer = torch.optim.SGD(model.parameters(), lr=rates[0])
    session = runtime.attach(model, optimizer, lossy(plan_of(model, 5), [TOPK]), residual_unit="update")
    reference = Reference(model, session.plan)
    for step, (rate, following) in enumerate(zip(rates, [*rates[1:], 2.0**-9], strict=True)):
        updates = reference.step([{n: g * rate for n, g in of.items()} for of in everyones_gradients(model, step)])
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        train(model, optimizer, range(step, step + 1))
        optimizer.param_groups[0]["lr"] = following
        results[f"weights {step}"] = equal(dict(model.named_parameters()), {n: before[n] - updates[n] for n in before})
        held = {name: part / following for name, part in reference.residuals[dist.get_rank()].items()}
        results[f"residuals {step}"] = equal(carried(session), held)
        saved = session.state_dict()
        if step == 3:  # another session goes on
            session.detach()
            session = runtime.attach(model, optimizer, session.plan, residual_unit="update")
            session.load_state_dict(saved)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.5})
    train(model, optimizer, range(1))
    optimizer.param_groups[1]["lr"] = 0.25
    found = raised(lambda: loss_of(model, 0).backward())
    results["unlike groups"] = "expected all groups to change theirs by one factor" in found
    optimizer.zero_grad()
    session.detach()
    found = raised(lambda: runtime.attach(model, None, session.plan, residual_unit="update"))
    results["no optimizer"] = 'found "update" without an optimizer that has a learning rate' in found
    return results


def accumulated() -> dict[str, bool]:
    """Backwards in `no_sync` send nothing; the next one sends their sum."""
    model, optimizer, session = start([TOPK])
    reference = Reference(model, session.plan)
    first, second = everyones_gradients(model, 0), everyones_gradients(model, 1)
    expected = reference.step([{n: a[n] + b[n] for n in a} for a, b in zip(first, second, strict=True)])
    optimizer.zero_grad()
    with session.no_sync():
        loss_of(model, 0).backward()
    loss_of(model, 1).backward()
    found = gradients(model)
    close = all(torch.allclose(found[name], expected[name], rtol=1e-5, atol=1e-8) for name in found)
    session.detach()
    return {"gradients": close}


class Branches(nn.Module):
    """Two layers of which a step uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor, use: str) -> Tensor:
        """(batch, 6) → (batch, 5)."""
        both = {"left": self.left, "right": self.right}
        result: Tensor = sum(layer(x) for name, layer in both.items() if name in use)  # type: ignore[assignment]
        return result


def unused() -> dict[str, bool]:
    """What is held back of a layer comes in steps that do not use it; what nobody uses and holds back stays None."""
    torch.manual_seed(1)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spec = CompressorSpec(name="topk", selector="exact", density=0.4)
    session = runtime.attach(model, optimizer, lossy(plan_of(model, 4), [spec]))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x, "left").square().sum().backward()
    results = {"never used": model.right.weight.grad is None}
    sums = torch.zeros_like(model.left.weight)
    assert model.left.weight.grad is not None
    sums += model.left.weight.grad
    own = copy.deepcopy(model)
    own.zero_grad()
    own(x, "left").square().sum().backward()
    assert own.left.weight.grad is not None
    total = own.left.weight.grad / dist.get_world_size()
    dist.all_reduce(total)
    for _ in range(8):
        optimizer.zero_grad()
        (model(x, "right") * 0.0).sum().backward()
        if model.left.weight.grad is not None:
            sums += model.left.weight.grad
    results["nothing is lost"] = torch.allclose(sums, total, rtol=1e-5, atol=1e-7)
    results["nothing is left"] = not any(bool(part.any()) for part in carried(session).values())
    session.detach()
    return results


def branches(density: float) -> tuple[Branches, Session, Tensor]:
    """A model of which a backward uses one half, attached so that largest elements are sent, and this rank's batch."""
    torch.manual_seed(1)
    model = Branches()
    spec = CompressorSpec(name="topk", selector="exact", density=density)
    session = runtime.attach(model, None, lossy(plan_of(model, 4), [spec]))
    return model, session, torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))


def accumulated_elsewhere() -> dict[str, bool]:
    """What a backward in `no_sync` has brought is sent, also where the last backward does not use the parameter."""
    model, session, x = branches(density=1.0)
    with session.no_sync():
        model(x, "left").square().sum().backward()
    assert model.left.weight.grad is not None
    expected = model.left.weight.grad / dist.get_world_size()
    dist.all_reduce(expected)
    model(x, "right").square().sum().backward()
    session.detach()
    return {"comes": torch.allclose(model.left.weight.grad, expected, rtol=1e-5, atol=1e-7)}


def stale() -> dict[str, bool]:
    """What `.grad` still holds from a step before is not held back again where a step does not use the parameter: it
    stays, and what was held back is added to it.
    """
    model, session, x = branches(density=0.2)
    model(x, "left").square().sum().backward()
    assert model.left.weight.grad is not None
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, carried(session))
    expected = model.left.weight.grad + sum(one["left.weight"] for one in held)
    for _ in range(12):
        model.right.zero_grad()
        (model(x, "right") * 0.0).sum().backward()
    results = {"added": torch.allclose(model.left.weight.grad, expected, rtol=1e-5, atol=1e-7)}
    results["nothing is left"] = not any(bool(part.any()) for part in carried(session).values())
    session.detach()
    return results


def late_and_unused() -> dict[str, bool]:
    """After a change to a plan that sends everything, what was held back comes also where nobody uses the parameter."""
    model, session, x = branches(density=0.2)
    model(x, "left").square().sum().backward()
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, carried(session))
    session.switch(plan_of(model, 4))
    model.zero_grad()
    model(x, "right").square().sum().backward()
    found, expected = model.left.weight.grad, sum(one["left.weight"] for one in held)
    results = {"comes": found is not None and torch.allclose(found, expected, rtol=1e-5, atol=1e-7)}
    model.zero_grad()
    model(x, "right").square().sum().backward()
    results["and only once"] = model.left.weight.grad is None
    session.detach()
    return results


def other_dtypes() -> dict[str, bool]:
    """bfloat16 and float64 gradients, alone and together, in memory of another order: sums are conserved, up to the
    rounding of each step's sum to bfloat16.
    """
    results = {}
    for what, change in {
        "bfloat16": lambda m: m.bfloat16(),
        "float64": lambda m: m.double(),
        "both": lambda m: nn.Sequential(m[:6].bfloat16(), m[6:].double()),
        "channels last": lambda m: m.to(memory_format=torch.channels_last),
    }.items():
        model = change(convnet())
        session = runtime.attach(model, None, lossy(plan_of(model, 4), [LAYERS]))
        named, total, sent = trainable_parameters(model), {}, {}
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            # Multiples of the number of ranks, so that averages are integers.
            own = {
                n: (torch.randint(-20, 20, p.shape, generator=generator) * dist.get_world_size()).to(p.dtype)
                for n, p in named.items()
            }
            for name, mine in own.items():
                summed = mine.double().clone()  # of float64 no copy by itself
                dist.all_reduce(summed)
                total[name] = total.get(name, 0) + summed / dist.get_world_size()
            model.zero_grad()
            sum((p * own[n]).sum().double() for n, p in named.items()).backward()
            for name, parameter in named.items():
                assert parameter.grad is not None
                sent[name] = sent.get(name, 0) + parameter.grad.double()
        for name, part in carried(session).items():
            rest = part.double()
            dist.all_reduce(rest)
            sent[name] = sent[name] + rest
        rough = {name for name, parameter in named.items() if parameter.dtype == torch.bfloat16}
        close = all(torch.allclose(sent[name], total[name], rtol=0.0, atol=3 * 0.5) for name in rough)
        results[what] = close and equal(*({n: one[n] for n in named if n not in rough} for one in (sent, total)))
        session.detach()
    return results


CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    check.__name__: check
    for check in (
        against_reference, not_finite, resumed, switched, other_ranks, narrowed, forgetful, loss_scales,
        updates_held_back, accumulated, unused, accumulated_elsewhere, other_dtypes, stale, late_and_unused,
    )
}  # fmt: skip
