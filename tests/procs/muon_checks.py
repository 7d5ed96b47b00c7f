"""What the ranks of the tests of shared operators do: steps with owners, against DDP and against every rank."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from session_checks import plan_of
from step_checks import raised
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

import planner
import runtime
from runtime.optimizers.pto import Pending
from runtime.optimizers.units import orthogonalize
from runtime.plan import OperatorPlan, Plan, PlanWorld, UpdatePlan

Optimizer = torch.optim.Optimizer
STEPS = 6


class Mixer(nn.Module):
    """Matrices of several shapes, one of them used by rank 0 alone and one frozen, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 12)
        self.up, self.down = nn.Linear(12, 40), nn.Linear(40, 12)
        self.side, self.frozen = nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False)
        self.never = nn.Linear(12, 7, bias=False)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)
        self.frozen.weight.requires_grad_(False)

    def forward(self, tokens: Tensor, side: bool) -> Tensor:
        """Logits, shape (batch, 5)."""
        hidden: Tensor = self.frozen(self.embed(tokens).mean(1))
        hidden = hidden + self.down(torch.tanh(self.up(self.norm(hidden))))
        logits: Tensor = self.head(hidden + self.side(hidden) if side else hidden)
        return logits


class WithExpert(Mixer):
    """Has a matrix that ranks do not average, which rank 1 uses from the third forward on only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.expert, self.calls = nn.Linear(12, 5, bias=False), 0
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["expert.weight"])

    def forward(self, tokens: Tensor, side: bool) -> Tensor:
        """Logits, shape (batch, 5)."""
        self.calls += 1
        logits = super().forward(tokens, side)
        return logits + self.expert(self.embed(tokens).mean(1)) if self.calls > 2 or dist.get_rank() != 1 else logits


MATRICES = ("up.weight", "down.weight", "side.weight", "never.weight")


class Whitened(Optimizer):
    """A user's own matrix optimizer: momentum whose update is whitened; it decays first and writes to gradients."""

    unit = "matrix"

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.9, decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay, "steps": 3})
        self.calls = 0

    def operator(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the matrix with singular values near 1, by the cubic Newton–Schulz iteration."""
        result = matrix / matrix.norm().clamp(min=1e-7)
        for _ in range(group["steps"]):
            result = 1.5 * result - 0.5 * result @ result.mT @ result
        return result

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update once."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.calls += 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in (p for p in group["params"] if p.grad is not None):
                buffer = self.state[parameter].setdefault("buffer", torch.zeros_like(parameter))
                parameter.mul_(1.0 - group["lr"] * group["decay"])
                buffer.mul_(group["momentum"]).add_(parameter.grad)
                update = parameter.grad.add_(buffer, alpha=group["momentum"])
                parameter.add_(self.whitened(update, group), alpha=-group["lr"])

    def whitened(self, update: Tensor, group: Mapping[str, Any]) -> Tensor:
        return self.operator(update, group)


class Transposed(Whitened):
    """Gives its operator matrices of another shape than the parameters'."""

    def whitened(self, update: Tensor, group: Mapping[str, Any]) -> Tensor:
        return self.operator(update.mT, group).mT


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "Muon": lambda p: torch.optim.Muon(p, lr=0.02),
    "Muon, plain momentum": lambda p: torch.optim.Muon(p, lr=0.02, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    "own": Whitened,
}


def optimizers(model: nn.Module, make: Callable[[Any], Optimizer]) -> list[Optimizer]:
    """Return the matrix optimizer of the matrices, and AdamW of the rest."""
    named = dict(model.named_parameters())
    matrices = [*[name for name in named if name.startswith("expert")], *MATRICES]
    rest = [p for name, p in named.items() if name not in matrices and p.requires_grad]
    return [make([named[name] for name in matrices]), torch.optim.AdamW(rest, lr=1e-2)]


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(0, 11, (6, 4), generator=generator)


def shared(
    plan: Plan, owners: Mapping[str, int], gathers: Iterable[Iterable[str]] | None = None,
    inside: tuple[int, ...] | None = None, **options: Any,
) -> Plan:  # fmt: skip
    """Return a plan whose operators have these owners; `inside`: messages of every node by itself."""
    messages = None if gathers is None else tuple(map(tuple, gathers))
    operator = OperatorPlan(owners=dict(owners), gathers=messages, inside=inside, **options)
    return replace(plan, updates=UpdatePlan(operator=operator))


def owners_of(ranks: int) -> dict[str, int]:
    return {name: index % ranks for index, name in enumerate(MATRICES)}


def train(
    model: nn.Module, forward: nn.Module, made: list[Optimizer], first: int = 0, steps: int = STEPS,
    scaler: torch.amp.GradScaler | None = None, every: int = 1,
    no_sync: Callable[[], Any] | None = None, closures: bool = False, clip: float | None = 0.05,
) -> None:  # fmt: skip
    """Train: clipped, with schedulers, accumulating over `every` micro-batches; `closures`: in the first's step."""
    schedules = [lr_scheduler.StepLR(one, 2, 0.7) for one in made]
    averaged = [p for name, p in model.named_parameters() if not name.startswith("expert")]

    def gradients(step: int) -> None:
        for one in made:
            one.zero_grad()
        for micro in range(every):
            last = micro == every - 1
            context = torch.enable_grad() if last or no_sync is None else no_sync()
            with context:
                loss = forward(batch(every * step + micro), dist.get_rank() == 0).square().mean()
                (loss if scaler is None else scaler.scale(loss)).backward()
        for one in made if scaler is not None else ():
            scaler.unscale_(one)
        if clip is not None:
            nn.utils.clip_grad_norm_(averaged, clip)

    for step in range(first, first + steps):
        if closures:
            made[0].step(partial(gradients, step))
            made[1].step()
            continue
        gradients(step)
        order = made if step % 2 else made[::-1]
        for one in order if step % 4 != 3 else order[:1]:
            one.step() if scaler is None else scaler.step(one)
        if scaler is not None:
            scaler.update()
        for schedule in schedules:
            schedule.step()


def equal(one: nn.Module, other: nn.Module) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def by_ddp(
    make: Callable[[Any], Optimizer], dtype: torch.dtype = torch.float32, kind: type[Mixer] = Mixer, **options: Any
) -> nn.Module:
    model = kind().to(dtype)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    no_sync = wrapped.no_sync if options.get("every", 1) > 1 else None
    train(model, wrapped, optimizers(model, make), no_sync=no_sync, **options)
    return model


def as_ddp(
    make: Callable[[Any], Optimizer], gathers: Iterable[Iterable[str]] | None = None, kind: type[Mixer] = Mixer,
    **options: Any,
) -> bool:  # fmt: skip
    """Tell whether a shared run has the bits of DDP, and the state of an optimizer that computes all."""
    model = kind()
    made = optimizers(model, make)
    plan = shared(plan_of(model, dist.get_world_size()), owners_of(dist.get_world_size()), gathers)
    session = planner.attach(model, made, plan)
    no_sync = session.no_sync if options.get("every", 1) > 1 else None
    train(model, model, made, no_sync=no_sync, **options)
    report = session.report().operators
    session.detach()
    assert report is not None
    assert report.parameters == len(MATRICES)
    return equal(model, by_ddp(make, kind=kind, **options))


def in_another_order() -> dict[str, float]:
    """Return how far weights are from those of DDP, by optimizer; infinite where owners do not give the bits of every
    rank repeating.

    In float64: there the order of the sums of gradients does not decide how Newton–Schulz rounds to bfloat16.
    """
    ranks, found = dist.get_world_size(), dict[str, float]()
    for name, make in MAKERS.items():
        ends = []
        for owners in ({}, owners_of(ranks), dict.fromkeys(MATRICES, ranks - 1)):
            model = Mixer().double()
            made, plain = optimizers(model, make), plan_of(model, 4)
            session = planner.attach(model, made, shared(plain, owners) if owners else plain)
            train(model, model, made)
            session.detach()
            ends.append(list(model.parameters()))
        same = all(torch.equal(a, b) for end in ends[1:] for a, b in zip(ends[0], end, strict=True))
        pairs = zip(ends[0], by_ddp(make, torch.float64).parameters(), strict=True)
        found[name] = max(float((a - b).abs().max()) for a, b in pairs) if same else float("inf")
    return found


def everything() -> dict[str, Any]:
    """Return what the tests look at."""
    ranks = dist.get_world_size()
    with warnings.catch_warnings():
        warnings.simplefilter("error", runtime.FallbackWarning)
        found: dict[str, Any] = {"as ddp": {name: as_ddp(make) for name, make in MAKERS.items()}}
        muon = MAKERS["Muon"]
        single = [[name] for name in reversed(MATRICES)]
        found["as ddp"] |= {
            "a message for each": as_ddp(muon, single),
            "closures": as_ddp(muon, closures=True),
            "closures, own": as_ddp(MAKERS["own"], closures=True),
            "own matrix": as_ddp(muon, kind=WithExpert),
            "transposed": as_ddp(Transposed),
            "accumulated": as_ddp(muon, every=2),
            "scaled": as_ddp(muon, scaler=torch.amp.GradScaler("cpu", init_scale=128.0)),
            "50 steps": as_ddp(muon, steps=50),
        }
        found["switched"] = switched(ranks)
        found["resumed"] = resumed(ranks)
    found["stacked"] = stacked()
    found["newton_schulz"] = newton_schulz()
    found["raised"] = raised_within(ranks)
    found["taken once"] = taken_once(ranks)
    found["replanned"] = replanned(ranks)
    found["refused"] = refusals(ranks)
    found["fallback"] = fallbacks(ranks)
    return found


def switched(ranks: int) -> bool:
    """From every rank repeating to owners, to other owners, and back."""
    plain = plan_of(Mixer(), ranks)
    plans = [shared(plain, owners_of(ranks)), shared(plain, {"up.weight": ranks - 1}), plain]
    return _switched(plain, plans)[0]


def inside_nodes() -> bool:
    """From messages inside of two nodes to one of them between nodes at the same time, and to both between them."""
    mesh, halves = init_device_mesh("cpu", (2, 2)), (MATRICES[:2], MATRICES[2:])
    plain = plan_of(Mixer(), 4, world=PlanWorld(ranks=4, nodes=2))
    mixed = dict(zip(MATRICES, (0, 1, 3, 2), strict=True))
    plans = [
        shared(plain, owners_of(2), halves, (0, 1)), shared(plain, mixed, halves, (0,)),
        shared(plain, owners_of(4), halves),
    ]  # fmt: skip
    equal_bits, own = _switched(plain, plans, mesh)
    return equal_bits and own == ([2, 1, 1] if dist.get_rank() < 2 else [2, 2, 1])


def _switched(plain: Plan, plans: Iterable[Plan], mesh: DeviceMesh | None = None) -> tuple[bool, list[int]]:
    """Return whether a run through plans has the bits of every rank repeating, and what this rank has computed."""
    model, own = Mixer(), list[int]()
    made = optimizers(model, MAKERS["Muon"])
    session = planner.attach(model, made, plain, mesh=mesh)
    train(model, model, made, steps=2)
    for number, plan in enumerate(plans, 1):
        session.switch(plan)
        train(model, model, made, first=2 * number, steps=2)
        report = session.report().operators
        own.append(0 if report is None else report.own)
    session.detach()
    repeated = Mixer()
    again = optimizers(repeated, MAKERS["Muon"])
    session = planner.attach(repeated, again, plain, mesh=mesh)
    for number in range(4):
        train(repeated, repeated, again, first=2 * number, steps=2)
    session.detach()
    return equal(model, repeated), own


def resumed(ranks: int) -> bool:
    """A checkpoint of a shared run continues as it would have, where every rank computes all."""
    model = Mixer()
    made = optimizers(model, MAKERS["Muon"])
    plain = plan_of(model, ranks)
    session = planner.attach(model, made, shared(plain, owners_of(ranks)))
    train(model, model, made, steps=3)
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(session.optimizer_state_dict())
    train(model, model, made, first=3, steps=3)
    session.detach()
    other = Mixer()
    again = optimizers(other, MAKERS["Muon"])
    other.load_state_dict(saved[0])
    for position, one in enumerate(again):
        one.load_state_dict(saved[1][str(position)])
    session = planner.attach(other, again, plain)
    train(other, other, again, first=3, steps=3)
    session.detach()
    return equal(model, other)


def raised_within(ranks: int) -> bool:
    """After a step that raised, another Muon has torch's own operator."""
    model = Mixer()
    made = optimizers(model, MAKERS["Muon"])
    session = planner.attach(model, made, shared(plan_of(model, ranks), owners_of(ranks)))
    train(model, model, made, steps=2)
    made[0].param_groups[0]["weight_decay"] = None
    with suppress(TypeError):
        made[0].step()
    found = newton_schulz()
    session.detach()
    return found


def taken_once(ranks: int) -> bool:
    """A step waits for each message once, however many matrices it has."""
    model = Mixer()
    made = optimizers(model, MAKERS["Muon"])
    session = planner.attach(model, made, shared(plan_of(model, ranks), owners_of(ranks)))
    train(model, model, made, steps=2)
    with mock.patch.object(Pending, "wait_each", autospec=True, side_effect=Pending.wait_each) as waits:
        train(model, model, made, first=2, steps=1)
    session.detach()
    return waits.call_count == 1


def replanned(ranks: int) -> bool:
    """A new plan has the owners of the present one, where no profile says what operators take."""
    model = Mixer()
    made = optimizers(model, MAKERS["Muon"])
    session = planner.attach(model, made, shared(plan_of(model, ranks), owners_of(ranks)))
    train(model, model, made)
    plan = planner.replan(session)
    train(model, model, made, first=STEPS, steps=1)
    session.detach()
    return plan.updates == UpdatePlan(operator=OperatorPlan(owners=owners_of(ranks)))


class Signs(Whitened):
    """Takes stacks, with equal bits."""

    batched = True
    stacks = 0

    def operator(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        self.stacks += matrix.dim() == 3
        return matrix.sign()


class OtherBits(Signs):
    """Stacks have other bits on rank 1."""

    def operator(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        factor = 1.01 if matrix.dim() == 3 and dist.get_rank() == 1 else 1.0
        return super().operator(matrix, group) * factor


def stacked(nodes: int = 0) -> dict[str, Any]:
    """Return what stacks of one message, shape and owner do: whether weights are those of every rank repeating (2
    ranks: of DDP); what all ranks raise where one of them raises in comparing. `nodes`: the first message is inside.
    """
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (nodes, ranks // nodes)) if nodes else None
    found: dict[str, Any] = {"raised": []}

    def trained(make: Callable[[Any], Optimizer], owned: bool) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(12)))
        made, names = make(list(model.parameters())), tuple(dict(model.named_parameters()))
        plan = plan_of(model, ranks, world=PlanWorld(ranks=ranks, nodes=nodes)) if nodes else plan_of(model, ranks)
        if owned:
            sharing = [ranks // max(1, nodes)] * 4 + [ranks] * 8
            owners = {name: place % of for place, (name, of) in enumerate(zip(names, sharing, strict=True))}
            plan = shared(plan, owners, (names[:4], names[4:]), (0,) if nodes else None, batched=names)
        session = planner.attach(model, made, plan, mesh=mesh) if owned or ranks > 2 else None
        forward = model if session is not None else DistributedDataParallel(model)
        for step in range(4):
            made.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            forward(torch.randn(6, 12, generator=generator)).square().mean().backward()
            if owned and step < 2 and isinstance(made, Signs):  # ranks compare results in the first, stacks in the next
                (group,) = made.param_groups
                decay, group["decay"] = group["decay"], None if dist.get_rank() == 1 else group["decay"]
                found["raised"].append(raised(made.step))
                group["decay"] = decay
            made.step()
        if session is not None:
            session.detach()
        return model, made

    for make in (MAKERS["Muon"], Signs, OtherBits):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            (one, made), (other, _) = trained(make, owned=True), trained(make, owned=False)
        said = [str(warning.message) for warning in seen if warning.category is runtime.FallbackWarning]
        found[type(made).__name__] = equal(one, other), getattr(made, "stacks", 0), said
    return found


def newton_schulz() -> bool:
    """The operator that planner computes has the bits of torch's step."""
    generator = torch.Generator().manual_seed(1)
    for shape in ((5, 9), (9, 5), (16, 16)):
        gradient = torch.randn(shape, generator=generator)
        parameter = nn.Parameter(torch.zeros(shape))
        optimizer = torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False)
        parameter.grad = gradient.clone()
        optimizer.step()
        group = optimizer.param_groups[0]
        result = orthogonalize(gradient, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rate = max(1.0, shape[0] / shape[1]) ** 0.5
        if not torch.equal(parameter.detach(), torch.zeros(shape).add_(result, alpha=-rate)):
            return False
    return True


def refusals(ranks: int) -> dict[str, str]:
    """Return the messages of what cannot be attached."""

    def attach(
        owners: Mapping[str, int], gathers: Any = None, of: Any = None, inside: Any = None, **options: Any
    ) -> str:
        model = Mixer()
        made = optimizers(model, MAKERS["Muon"]) if of is None else of(model)
        plan = plan_of(model, ranks, world=PlanWorld(ranks=ranks, nodes=ranks))
        return raised(lambda: planner.attach(model, made, shared(plan, owners, gathers, inside, **options)))

    return {
        "rank": attach({"up.weight": ranks}),
        "name": attach({"no.weight": 0}),
        "gathers": attach({"up.weight": 0}, [["up.weight"], ["up.weight"]]),
        "vector": attach({"up.bias": 0}),
        "local rank": attach({"up.weight": 1}, [["up.weight"]], inside=(0,)),
        "message": attach({"up.weight": 0}, [["up.weight"]], inside=(1,)),
        "unowned": attach({"up.weight": 0}, batched=("up.weight", "side.weight")),
        "inexact": attach({"up.weight": 0}, tolerance=0.01),
        "twice": attach(
            {}, of=lambda model: [kind(model.parameters()) for kind in (torch.optim.SGD, torch.optim.Adam)]
        ),
        "empty": attach({}, of=lambda model: []),
        "none inside": attach({}, of=lambda model: [torch.optim.SGD(model.parameters()), None]),
    }


class PerRank(Whitened):
    """Depends on the rank."""

    def operator(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        return super().operator(matrix, group) * (1.0 + dist.get_rank())


class Backwards(Whitened):
    """Calls its operator in another order than that of its groups."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in reversed([p for p in group["params"] if p.grad is not None]):
                parameter.sub_(self.operator(parameter.grad, group))


def fallbacks(ranks: int) -> dict[str, list[str]]:
    """Return the warnings of operators that stay on every rank, with whether training continued."""
    found = {}
    for kind in (PerRank, Backwards):
        model = Mixer()
        made = optimizers(model, kind)
        plain = plan_of(model, ranks)
        session = planner.attach(model, made, shared(plain, owners_of(ranks)))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            train(model, model, made, steps=3)
            session.switch(shared(plain, {"up.weight": 0}))  # as a trial does
            train(model, model, made, first=3, steps=1)
        session.detach()
        found[kind.__name__] = [str(one.message) for one in seen if one.category is runtime.FallbackWarning]
    return found
