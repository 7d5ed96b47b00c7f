"""What the ranks of the tests of owned steps do: matrices on one rank each, against DDP and against sums by hand."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from muon_checks import MAKERS, MATRICES, Mixer, Optimizer, Whitened, batch, by_ddp, equal, optimizers, train
from session_checks import plan_of
from step_checks import raised
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import planner
from runtime.checks.plan import trainable_parameters
from runtime.comm.collectives.exchange import all_gather
from runtime.errors import FallbackWarning
from runtime.plan import Plan, StepPlan, UpdatePlan
from runtime.sharded.part import OwnPart
from runtime.sharded.state import state_bytes


class Preconditioned(Optimizer):
    """A user's own matrix optimizer with state: sums of squares of rows and columns, in a list and alone."""

    unit = "matrix"

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update once."""
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                gradient, state = parameter.grad, self.state[parameter]
                rows, columns = gradient.shape
                if not state:
                    state["sides"] = [torch.eye(rows), torch.eye(columns)]
                    state["count"], state["mean"] = 0, torch.zeros_like(parameter)
                left, right = state["sides"]
                left.add_(gradient @ gradient.mT)
                right.add_(gradient.mT @ gradient)
                state["count"] += 1
                state["mean"].lerp_(gradient, 0.1)
                scaled = torch.linalg.solve(left, state["mean"]) @ torch.linalg.inv(right)
                parameter.add_(scaled, alpha=-group["lr"] * state["count"] ** 0.5)


class Narrow(Whitened):
    """A user's own matrix optimizer whose updates are in bfloat16, and applied without gradient and state."""

    update_dtype = torch.bfloat16

    def operator(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        return super().operator(matrix, group).bfloat16()

    def apply(self, parameter: Tensor, update: Tensor, group: Mapping[str, Any]) -> None:
        """Decay and update a parameter."""
        parameter.mul_(1.0 - group["lr"] * group["decay"])
        parameter.add_(update, alpha=-group["lr"])


class Forgetful(Narrow):
    """Applies updates otherwise than its step does."""

    def apply(self, parameter: Tensor, update: Tensor, group: Mapping[str, Any]) -> None:
        parameter.add_(update, alpha=-group["lr"])


class Skipping(Narrow):
    """Leaves out its operator for square matrices from its third step on."""

    def whitened(self, update: Tensor, group: Mapping[str, Any]) -> Tensor:
        if self.calls > 2 and update.shape == (12, 12):
            return update
        return super().whitened(update, group)


class Unapplied(Whitened):
    """Does not say how updates are applied."""

    update_dtype = torch.bfloat16


OWNED: dict[str, Callable[[Any], Optimizer]] = MAKERS | {"with state": Preconditioned}


def owned(model: nn.Module, ranks: int, *, everything: bool, gather: Any = None, group: int = 4) -> Plan:
    """Return a plan with owners of the matrices, or of all parameters; rank 1 has none of the first bucket."""
    plan = plan_of(model, group)
    names = [name for name in plan.gradients if everything or name in MATRICES]
    first = set(plan.buckets[0].gradients)
    owners = {name: 0 if name in first else place % ranks for place, name in enumerate(names)}
    updates = UpdatePlan(step=StepPlan(sharded=True, owners=owners, gather=gather))
    return replace(plan, updates=updates, interface=("sharded-step" if gather is None else "late-gather",))


def run(
    make: Callable[[Any], Optimizer], *, everything: bool, gather: Any = None, **options: Any
) -> tuple[nn.Module, list[Optimizer], Any, Any]:
    """Train with owners; return model, optimizers, whole state and report."""
    model = Mixer()
    made = optimizers(model, make)
    session = planner.attach(model, made, owned(model, dist.get_world_size(), everything=everything, gather=gather))
    no_sync = session.no_sync if options.get("every", 1) > 1 else None
    train(model, model, made, no_sync=no_sync, **options)
    state, report = copy.deepcopy(session.optimizer_state_dict()), session.report().step
    session.detach()
    return model, made, state, report


def by_hand(make: Callable[[Any], Optimizer]) -> nn.Module:
    """Train with gradients that are added up in order of rank."""
    model, ranks = Mixer(), dist.get_world_size()
    made = optimizers(model, make)

    def averaged(_: Any = None) -> None:
        for parameter in model.parameters():
            mine = [parameter.grad] if parameter.grad is None else [parameter.grad * (1.0 / ranks)]
            everyone: list[Any] = [None] * ranks
            dist.all_gather_object(everyone, mine[0])
            if any(one is not None for one in everyone):
                whole = [torch.zeros_like(parameter) if one is None else one for one in everyone]
                total = whole[0] + whole[1]
                for one in whole[2:]:
                    total += one
                parameter.grad = total

    clipped = nn.utils.clip_grad_norm_
    try:
        nn.utils.clip_grad_norm_ = lambda *given: (averaged(), clipped(*given))  # type: ignore[assignment]
        train(model, model, made)
    finally:
        nn.utils.clip_grad_norm_ = clipped
    return model


def everything() -> dict[str, Any]:
    """Return what the tests look at, of any number of ranks."""
    ranks = dist.get_world_size()
    reference = by_ddp if ranks == 2 else by_hand
    found: dict[str, Any] = {"equal": {}}
    for name, make in OWNED.items():
        found["equal"][name] = equal(run(make, everything=True)[0], reference(make))
    if ranks == 2:
        muon = MAKERS["Muon"]
        found["equal"] |= {
            "50 steps, the rest in equal parts": equal(
                run(muon, everything=False, steps=50, clip=None)[0], by_ddp(muon, steps=50, clip=None)
            ),
            "accumulated": equal(run(muon, everything=True, every=2)[0], by_ddp(muon, every=2)),
            "scaled": equal(
                run(muon, everything=True, scaler=torch.amp.GradScaler("cpu", init_scale=128.0))[0],
                by_ddp(muon, scaler=torch.amp.GradScaler("cpu", init_scale=128.0)),
            ),
        }
        found["equal"] |= {"one rank has all": one_has_all(), "switched": switched()}
        found["sent"] = {kind.__name__: gathered_bytes(kind) for kind in (torch.optim.Muon, Narrow, Forgetful)}
        several = run(muon, everything=False, gather="forward", clip=None)
        assert several[3].late
        found["equal"] |= {"several optimizers, gathered late": equal(several[0], by_ddp(muon, clip=None))}
        found["late"] = late()
        found["refused"] = refusals()
    found["resumed"] = {name: resumed(OWNED[name]) for name in ("Muon", "with state")}
    found["bytes"] = memory()
    return found


def resumed(make: Callable[[Any], Optimizer]) -> bool:
    """A checkpoint of owners continues on ranks that all have everything, and back again with other owners."""
    model, made, saved, _ = run(make, everything=True, steps=3)
    weights = copy.deepcopy(model.state_dict())
    ends = []
    for plan in (None, owned(model, dist.get_world_size(), everything=False, group=3)):
        model = Mixer()
        made = optimizers(model, make)
        model.load_state_dict(weights)
        session = planner.attach(model, made, plan or plan_of(model, 4))
        for position, one in enumerate(made):  # after attach: whole states are cut
            one.load_state_dict(copy.deepcopy(saved[str(position)]))
        train(model, model, made, first=3, steps=3, clip=None)
        session.detach()
        ends.append(model)
    if dist.get_world_size() > 2:  # all-reduces have another order of sums
        return all(torch.allclose(a, b, atol=1e-2) for a, b in zip(*(one.parameters() for one in ends), strict=True))
    return equal(*ends)


def gathered_bytes(kind: Any) -> tuple[bool, list[int], list[str]]:
    """Return whether weights are DDP's, this rank's bytes of its matrices in each step's gathers, and warnings."""
    sizes: list[int] = []
    gathered = OwnPart.gathered

    def counted(self: OwnPart, world: Any, own: Tensor, doing: str, out: Tensor | None = None) -> Tensor:
        if self.by_parameter and "updated" in doing:
            sizes.append(own.numel() * own.itemsize)
        return gathered(self, world, own, doing, out)

    def make(params: Any) -> Optimizer:
        made: Optimizer = kind(params, lr=0.02)
        return made

    with warnings.catch_warnings(record=True) as seen, patch.object(OwnPart, "gathered", counted):
        warnings.simplefilter("always")
        model = run(make, everything=False, clip=None)[0]
    said = [str(one.message) for one in seen if one.category is FallbackWarning]
    return equal(model, by_ddp(make, clip=None)), sizes, said


def one_has_all() -> bool:
    """The other rank has no part of any gradient, also where a GradScaler looks at them."""
    ends = []
    for has_all in (True, False):
        model = Mixer()
        made = optimizers(model, MAKERS["Muon"])
        plan = plan_of(model, 4)
        if has_all:
            step = StepPlan(sharded=True, owners=dict.fromkeys(plan.gradients, 1))
            plan = replace(plan, updates=UpdatePlan(step=step), interface=("sharded-step",))
        session = planner.attach(model, made, plan)
        train(model, model, made, steps=3, scaler=torch.amp.GradScaler("cpu", init_scale=128.0))
        session.detach()
        ends.append(model)
    return equal(*ends)


def switched() -> bool:
    """From every rank repeating to owners, to other owners, to equal parts of what has none, and back."""
    ends = []
    for owners in (True, False):
        model = Mixer()
        made = optimizers(model, MAKERS["Muon"])
        plain = plan_of(model, 3)
        plans = [
            owned(model, 2, everything=True), owned(model, 2, everything=True, group=2),
            owned(model, 2, everything=False), plain,
        ]  # fmt: skip
        session = planner.attach(model, made, plain)
        for number, plan in enumerate(plans):
            train(model, model, made, first=2 * number, steps=2, clip=None)
            if owners:
                session.switch(plan)
        session.detach()
        ends.append(model)
    return equal(*ends)


def planned() -> bool:
    """A user's own optimizer with state, from its profile to a plan with owners and to the bits of DDP."""
    ends = []
    for by_plan in (True, False):
        model = Stack()
        optimizer = Preconditioned(model.parameters())
        session = None
        forward: nn.Module = model

        def step(model: nn.Module = model, forward: nn.Module = model, at: int = 0) -> None:
            forward(batch(at).float().repeat(1, 3)).square().mean().backward()

        if by_plan:
            profile = planner.profile_step(model, step, optimizer=optimizer, budget_s=5.0)
            optimizer = Preconditioned(model.parameters())
            model.zero_grad()
            plan = planner.optimize(profile, allow="sharded-step", passes="merge,shard_updates{step=always}")
            assert len(plan.owners) == 3
            session = planner.attach(model, optimizer, plan)
        else:
            forward = nn.parallel.DistributedDataParallel(model)
        for number in range(3):
            optimizer.zero_grad()
            step(model, forward, number)
            optimizer.step()
        if session is not None:
            session.detach()
        ends.append(model)
    return equal(*ends)


def of_package() -> dict[str, bool]:
    """Return whether owners give the bits of DDP for the optimizers of `pytorch_optimizer`, also after a checkpoint."""
    package: Any = importlib.import_module("pytorch_optimizer")
    makers: dict[str, Callable[[Any], Optimizer]] = {
        "SOAP": lambda p: package.SOAP(p, lr=0.02, precondition_frequency=2),
        "Shampoo": lambda p: package.Shampoo(p, lr=0.02, momentum=0.9),
        "ScalableShampoo": lambda p: package.ScalableShampoo(
            p, lr=0.02, start_preconditioning_step=2, preconditioning_compute_steps=2
        ),
    }
    found = {name: equal(run(make, everything=False, clip=None)[0], by_ddp(make, clip=None))
             for name, make in makers.items()}  # fmt: skip
    return found | {f"{name}, resumed": resumed(make) for name, make in makers.items()}


def memory() -> tuple[int, int]:
    """Return the bytes of this rank's state with owners of everything, as reported, and those of the whole state."""
    _, made, _, report = run(MAKERS["Muon"], everything=True)
    return report.state_bytes, sum(state_bytes(one.state) for one in made)


class Stack(nn.Module):
    """Matrices alone, as torch.optim.Muon holds them all; the largest are sent in pieces of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in ((12, 300), (300, 300), (300, 7)))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of shape (batch, 7)."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def late() -> bool:
    """Weights of owners are gathered during the next forward, with the bits of DDP."""
    ends = []
    for gather in ("forward", None):
        model = Stack()
        forward: nn.Module = model
        optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
        session = None
        if gather is None:
            forward = nn.parallel.DistributedDataParallel(model)
        else:
            plan = owned(model, 2, everything=True, gather=gather, group=2)
            session = planner.attach(model, optimizer, plan)
        for step in range(5):
            optimizer.zero_grad()
            forward(batch(step).float().repeat(1, 3)).square().mean().backward()
            optimizer.step()
        if session is not None:
            assert session.report().step.late
            session.detach()
        ends.append(model)
    return equal(*ends)


def refusals() -> dict[str, str]:
    """Return the messages of what cannot be attached."""

    def attach(change: Mapping[str, Any], of: Callable[[nn.Module], Any] | None = None, **more: Any) -> str:
        model = Mixer()
        plan = owned(model, 2, everything=True)
        assert plan.updates is not None
        assert plan.updates.step is not None
        step = replace(plan.updates.step, **change)
        made = optimizers(model, MAKERS["Muon"]) if of is None else of(model)
        return raised(lambda: planner.attach(model, made, replace(plan, updates=UpdatePlan(step=step), **more)))

    def grouped(model: nn.Module) -> list[Optimizer]:
        made = optimizers(model, MAKERS["Muon"])
        if dist.get_rank() == 1:
            made[1].add_param_group({"params": [made[0].param_groups[0]["params"].pop()]})
        return made

    some = dict.fromkeys(trainable_parameters(Mixer()), 0)
    without = {name: owner for name, owner in some.items() if name != "down.weight"}
    return {
        "rank": attach({"owners": some | {"up.weight": 2}}),
        "grouped": attach({}, grouped),
        "name": attach({"owners": some | {"no.weight": 0}}),
        "cut": attach({"owners": without}),
        "unknown": attach({}, lambda model: torch.optim.Adafactor(model.parameters())),
        "unapplied": attach({}, lambda model: optimizers(model, Unapplied)),
        "rounded": attach({"weights": "bfloat16"}, accuracy="bounded"),
        "skipped": skipped(),
    }


def skipped() -> str:
    """Return what each rank says where the step of one owner leaves out its operator."""
    model = Mixer()
    made = optimizers(model, Skipping)
    session = planner.attach(model, made, owned(model, 2, everything=False))
    said = raised(lambda: train(model, model, made, steps=4, clip=None))
    session.detach()
    return said


def in_nodes() -> list[bool]:
    """Return whether on two nodes, where gathers are padded, weights have the bits that they have on one."""
    mesh, owners, found = init_device_mesh("cpu", (2, 2)), dict(zip(MATRICES, range(4), strict=True)), []
    for make, gather in ((MAKERS["Muon"], None), (Preconditioned, None), (Preconditioned, "forward")):
        ends = []
        for nodes in (None, mesh):
            model = Mixer()
            made, plan = optimizers(model, make), owned(model, 4, everything=False, gather=gather, group=100)
            step = StepPlan(sharded=True, owners=owners, gather=gather)
            with patch("runtime.sharded.part.all_gather", wraps=all_gather) as padded:
                session = planner.attach(model, made, replace(plan, updates=UpdatePlan(step=step)), mesh=nodes)
                train(model, model, made)
                session.detach()
            ends.append((model, padded.called))
        (alone, first), (on_nodes, second) = ends
        found.append(equal(alone, on_nodes) and (first, second) == (False, True))
    return found
