"""What the ranks of the tests of plans with outer steps do."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from delay_checks import Net, batch, net_loss
from delay_workers_checks import nodes_of
from findings import Difference
from outer_reference import Reference
from torch import Tensor, nn

import runtime
from runtime.comm.collectives.direct import Narrowed
from runtime.errors import CommunicationError, InputError
from runtime.modes import distance_guard
from runtime.modes.distance_guard import NO_DISTANCE
from runtime.outer.local_steps import Outer
from runtime.outer.rounds import BufferRound, CompressedRound
from runtime.plan import CompressorSpec, ModelReference, OuterOptimizer, OuterSpec, Plan, PlanBucket, PlanWorld
from runtime.session.session import Session
from runtime.sparse.compressors import wire

NAMES = ("two.bias", "two.weight", "one.bias", "one.weight")
HALVES = (NAMES[:2], NAMES[2:])
LOCAL_SGD = OuterOptimizer(lr=1.0, momentum=0.0)
DILOCO = OuterSpec(every=4, warmup_steps=3)
STREAMING = OuterSpec(every=4, fragments=HALVES, delay_steps=2, mix=0.5, warmup_steps=2)
SHARED = replace(STREAMING, sharded_step=True)
INT8 = CompressorSpec(name="wire", dtype="int8", block=64)
COMPRESSORS = {
    "dense": None,
    "int8": INT8,
    "topk": CompressorSpec(name="topk", density=0.3),
    "low rank": CompressorSpec(name="powersgd", rank=1),
}
TOLERANCE = 1e-12


def plan_of(spec: OuterSpec | None, compressor: CompressorSpec | None = None, **changes: Any) -> Plan:
    """Two buckets, which may be the two fragments."""
    bucket = PlanBucket(gradients=NAMES)
    if compressor is not None:
        sparse = compressor.name in ("topk", "randomk")
        bucket = replace(bucket, compressor=compressor)
        bucket = replace(bucket, collective="sparse", algorithm="flat") if sparse else bucket
    values: dict[str, Any] = {
        "model": ModelReference(name="test"), "world": PlanWorld(ranks=dist.get_world_size()),
        "accuracy": "exact" if spec is None else "relaxed",
        "interface": ("sharded-step",) if spec is not None and spec.sharded_step else None,
        "buckets": tuple(replace(bucket, gradients=half) for half in HALVES), "outer": spec,
    }  # fmt: skip
    return Plan(**(values | changes))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Of all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Of all parameters."""
    return torch.optim.SGD(model.parameters(), lr=0.05)


def single() -> nn.Module:
    """The model in float32, which 8 bits can send."""
    return Net().float()


def single_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """Of one rank, in float32."""
    x, y = batch(rank, step)
    loss: Tensor = ((model(x.float()) - y.float()) ** 2).mean()
    return loss


Make = Callable[[nn.Module], torch.optim.Optimizer]


def started(
    plan: Plan, make: Make = adamw, model: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, Any, Session]:  # fmt: skip
    """A model that trains by a plan."""
    model = model or Net()
    optimizer = make(model)
    return model, optimizer, runtime.attach(model, optimizer, plan, drift=False, timeout_s=15.0, **options)


def restarted(plan: Plan, saved: Sequence[Any], model: nn.Module | None = None) -> tuple[nn.Module, Any, Session]:
    """A model that continues by a plan from the states of another one, its optimizer and its session."""
    model, optimizer, session = started(plan, adamw, model)
    for part, state in zip((model, optimizer, session), saved, strict=True):
        part.load_state_dict(copy.deepcopy(state))
    return model, optimizer, session


def train(model: nn.Module, optimizer: Any, steps: range, loss: Any = net_loss) -> None:
    """Some steps of this rank."""
    for step in steps:
        optimizer.zero_grad()
        loss(model, dist.get_rank(), step).backward()
        optimizer.step()


def near(found: Any, expected: Any, tolerance: float = TOLERANCE) -> bool | str:
    """Relative to the largest of each tensor."""
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        apart = float((one.detach() - other.detach()).abs().max()) / max(1e-300, float(other.detach().abs().max()))
        if not apart <= tolerance:
            return Difference(f"tensor {index}: {apart:.3g} apart, expected {tolerance:g}")
    return True


def against_reference() -> dict[str, Any]:
    """Dense rounds come to what one process makes of the recurrence, with and without delay, fragments and momentum."""
    found: dict[str, Any] = {}
    cases = {
        "diloco": (DILOCO, adamw),
        "streaming": (STREAMING, adamw),
        "three steps late": (replace(STREAMING, every=5, delay_steps=3), sgd),
        "no warm-up": (replace(STREAMING, warmup_steps=0, delay_steps=0), adamw),
        "every step": (OuterSpec(every=1, optimizer=LOCAL_SGD), sgd),
        "post-local SGD": (OuterSpec(every=3, optimizer=LOCAL_SGD, warmup_steps=4), sgd),
        "drops t steps": (replace(STREAMING, mix=0.0), sgd),
    }
    for name, (spec, make) in cases.items():
        expected = Reference(Net, make, net_loss, dist.get_world_size(), spec).begin().run(14)
        model, optimizer, session = started(plan_of(spec), make)
        train(model, optimizer, range(14))
        found[name] = near(model.parameters(), expected.models[dist.get_rank()].parameters())
        session.detach()
    return found


class Several(list[torch.optim.Optimizer]):
    """Several optimizers that step together."""

    def zero_grad(self) -> None:
        """Clear the gradients of all."""
        for one in self:
            one.zero_grad()

    def step(self) -> None:
        """Step all, in order."""
        for one in self:
            one.step()


def several_optimizers() -> dict[str, Any]:
    """Two optimizers with a part of the parameters each come to what the reference makes; a switch averages both."""

    def make(model: nn.Module) -> Any:
        one, *others = model.parameters()
        return Several([torch.optim.SGD([one], lr=0.05, momentum=0.9), torch.optim.AdamW(others, lr=0.02)])

    expected = Reference(Net, make, net_loss, dist.get_world_size(), STREAMING).begin().run(14)
    model, optimizers, session = started(plan_of(STREAMING), make)
    train(model, optimizers, range(7))
    saved = copy.deepcopy((model.state_dict(), session.state_dict()))
    session.detach()
    model, optimizers, session = started(plan_of(STREAMING), make)
    model.load_state_dict(saved[0])
    session.load_state_dict(saved[1])
    train(model, optimizers, range(7, 14))
    found = {"weights": near(model.parameters(), expected.models[dist.get_rank()].parameters())}
    session.switch(plan_of(None))
    found["weights after"] = same_everywhere(list(model.parameters()))
    states = [value for one in optimizers for state in one.state.values() for value in state.values()]
    found["states after"] = same_everywhere(states)
    session.detach()
    return found


class Skipping(torch.optim.AdamW):
    """Leaves out the steps that a GradScaler leaves out."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step where all gradients are finite."""
        if all(bool(p.grad.isfinite().all()) for group in self.param_groups for p in group["params"]):
            super().step(closure)


def scaled() -> dict[str, Any]:
    """Workers whose GradScalers leave out steps, others on each of them, come to what the reference makes of it: in the
    warm-up all leave out a step, and H counts all steps.
    """

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return net_loss(model, rank, step) * (float("inf") if (step + rank) % 3 == 0 else 1.0)

    def skipping(model: nn.Module) -> torch.optim.Optimizer:
        return Skipping(model.parameters(), lr=0.02)

    found: dict[str, Any] = {}
    for name, spec in (("diloco", DILOCO), ("streaming", STREAMING)):
        expected = Reference(Net, skipping, loss, dist.get_world_size(), spec).begin().run(14)
        scaler = torch.amp.GradScaler("cpu")
        model, optimizer, session = started(plan_of(spec), loss_scale=scaler.get_scale)
        for step in range(14):
            optimizer.zero_grad()
            scaler.scale(loss(model, dist.get_rank(), step)).backward()
            scaler.step(optimizer)
            scaler.update()
        session.wait_for_weights()
        found[name] = near(model.parameters(), expected.models[dist.get_rank()].parameters())
        found[f"{name}, steps"] = session.step == 14 and scaler.get_scale() < 2.0**16
        session.detach()
    return found


def live_bytes() -> int:
    """Bytes of all tensors that this process has."""
    gc.collect()
    storages = [one.untyped_storage() for one in gc.get_objects() if issubclass(type(one), Tensor)]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def memory() -> dict[str, Any]:
    """Between rounds a worker has at most these copies of the weights more than DDP: all its tensors are counted."""
    found: dict[str, Any] = {}
    for name, compressor, most in (("dense", None, 0.7), ("int8", INT8, 2.4)):
        before = live_bytes()
        model = single()
        model.one, model.two = nn.Linear(5, 2000), nn.Linear(2000, 3)
        size = sum(4 * p.numel() for p in model.parameters())
        with patch.object(wire, "CHUNK", 64):  # else a thread's memory to encode in is larger than this model
            plan = plan_of(replace(STREAMING, delay_steps=0, mix=0.0), compressor)
            model, optimizer, session = started(plan, adamw, model)
            train(model, optimizer, range(7), single_loss)
        copies = (live_bytes() - before) / size - 4.0  # weights, gradients and AdamW's two moments
        found[f"{name}: {copies:.3f} copies"] = 0.0 < copies <= most
        session.detach()
        del model, optimizer, session
    return found


def nodes() -> dict[str, Any]:
    """Where nodes are the workers, their ranks average gradients inside, and may share the step: rounds come to what
    the reference makes of workers whose loss is that of both their ranks, also over a checkpoint; ranks of a node have
    one model.
    """
    found: dict[str, Any] = {}
    rank, workers = dist.get_rank(), dist.get_world_size() // 2

    def loss(model: nn.Module, worker: int, step: int) -> Tensor:
        return (net_loss(model, 2 * worker, step) + net_loss(model, 2 * worker + 1, step)) / 2.0

    with nodes_of(2) as world:
        for name, spec in (("diloco", DILOCO), ("late", STREAMING), ("shared", SHARED)):
            expected = Reference(Net, adamw, loss, workers, spec).begin().run(14)
            model, optimizer, session = started(plan_of(spec, **world))
            train(model, optimizer, range(8))
            saved = copy.deepcopy((model.state_dict(), session.state_dict()))
            session.detach()
            model, optimizer, session = started(plan_of(spec, **world))
            model.load_state_dict(saved[0])
            session.load_state_dict(saved[1])
            train(model, optimizer, range(8, 14))
            found[name] = near(model.parameters(), expected.models[rank // 2].parameters())
            report = session.report().step
            half = sum(p.numel() * p.element_size() for p in model.parameters())  # of two moments
            found[f"{name}, state"] = (0 if report is None else report.state_bytes) == half * bool(spec.sharded_step)
            session.switch(plan_of(None))
            found[f"{name}, switched"] = same_everywhere(values_of(model, optimizer))
            session.detach()
        found |= ended_by_guard(plan_of(replace(SHARED, warmup_steps=0), **world))
        states, expected_values = saved_and_ended(plan_of(STREAMING), Net, net_loss)
        model, optimizer, session = started(plan_of(STREAMING, **world))
        found["ranks before, alone"] = refused_alone(session, states[rank])
        session.load_state_dict(states)
        found["ranks before"] = near(values_of(model, optimizer), expected_values)
        session.detach()
        for rule in (LOCAL_SGD, OuterOptimizer()):
            found |= narrow(f"int8, {rule}", replace(STREAMING, optimizer=rule), loss, workers, rank // 2, **world)
        for name in ("int8", "topk", "low rank"):
            found |= lossless(name, 2, **world)
            plan = plan_of(STREAMING, COMPRESSORS[name], **world)
            straight, optimizer, session = started(plan, adamw, single())
            train(straight, optimizer, range(5), single_loss)
            saved = copy.deepcopy((straight.state_dict(), session.state_dict()))
            train(straight, optimizer, range(5, 9), single_loss)
            session.detach()
            model, optimizer, session = started(plan, adamw, single())
            model.load_state_dict(saved[0])
            session.load_state_dict(saved[1])
            train(model, optimizer, range(5, 9), single_loss)
            found[f"{name}, resumed"] = near(model.parameters(), straight.parameters(), 0.0)
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, torch.cat([p.detach().flatten() for p in model.parameters()]))
            found[f"{name}, inside"] = torch.equal(everyone[rank], everyone[rank ^ 1])
            found[f"{name}, between"] = not torch.equal(everyone[0], everyone[2])
            assert isinstance(session._mode, Outer)
            assert session._mode.fragments is not None
            rounds = session._mode.fragments._rounds
            messages = [one._lossy.packed for one in rounds if isinstance(one, CompressedRound)]
            found[f"{name}, one message of a node"] = [once_a_node(one) for one in messages] == [True, True]
            session.detach()
    return found


def started_and_ended(plan: Plan) -> tuple[nn.Module, Any, Session]:
    """A model of which the guard has ended outer steps, behind 20 steps."""
    model, optimizer, session = started(plan)
    with (
        warnings.catch_warnings(),
        patch.multiple(distance_guard, MOVEMENT_BOUND=0.0, SHARE_BOUND=0.0, PULLS=1),
    ):
        warnings.simplefilter("ignore")
        train(model, optimizer, range(20))
    return model, optimizer, session


def ended_by_guard(plan: Plan) -> dict[str, Any]:
    """Where the guard ends outer steps, the step is sharded over all ranks, also where the run resumes."""
    found: dict[str, Any] = {}
    model, optimizer, session = started_and_ended(plan)
    found["ended"] = not session._mode.own_weights
    saved = copy.deepcopy((model.state_dict(), session.optimizer_state_dict(), session.state_dict()))
    train(model, optimizer, range(20, 24))
    report = session.report().step
    found["a quarter each"] = report is not None and report.state_bytes == 2 * 8 * (
        6 + (9 if dist.get_rank() == 3 else 11)
    )
    expected = [p.detach().clone() for p in model.parameters()]
    session.detach()
    model, optimizer, session = restarted(plan, saved)
    train(model, optimizer, range(20, 24))
    found["resumed"] = near(model.parameters(), expected, 0.0)
    session.detach()
    return {f"guard, {name}": value for name, value in found.items()}


def once_a_node(message: Any) -> bool:
    """Whether two ranks of a node send parts of what they have alike."""
    return (len(message.received) if isinstance(message, Narrowed) else int(message.copies)) == 2


def four_ranks() -> dict[str, Any]:
    """What needs four ranks."""
    torch.set_num_threads(1)
    return memory() | nodes()


def plain_averaging() -> dict[str, Any]:
    """H = 1 with rate 1 and no momentum is a synchronous step of SGD."""
    straight, optimizer, session = started(plan_of(None), sgd)
    train(straight, optimizer, range(6))
    session.detach()
    model, optimizer, session = started(plan_of(OuterSpec(every=1, optimizer=LOCAL_SGD)), sgd)
    train(model, optimizer, range(6))
    session.detach()
    return {"weights": near(model.parameters(), straight.parameters())}


def compressed() -> dict[str, Any]:
    """Nothing is lost: once the residuals have been sent, workers are where all their gradients lead to."""
    found: dict[str, Any] = {}
    for name, t in itertools.product(COMPRESSORS, (0, 2)):
        found |= lossless(name, t)
    return found


def lossless(name: str, t: int, **world: Any) -> dict[str, Any]:
    """Train with a compressor of this name, rounds of `t` steps.

    With plain SGD, an outer rate of 1 and mix 0 weights end as the first ones − lr · mean of the gradients of all steps
    but those between a round's launch and its end, which mix 0 drops.
    """
    compressor, steps = COMPRESSORS[name], 10
    spec = replace(STREAMING, delay_steps=t, mix=0.0, optimizer=LOCAL_SGD, warmup_steps=0)
    model, optimizer, session = started(plan_of(spec, compressor, **world), sgd, single())
    expected = {n: p.detach().double() for n, p in model.named_parameters()}
    for local in range(1, steps + 1):
        train(model, optimizer, range(local, local + 1), single_loss)
        for n, p in model.named_parameters():
            due = spec.due_after(next(i for i, half in enumerate(HALVES) if n in half), 2)
            if not any(launch < local <= launch + t for launch in range(due, steps + 1, spec.every)):
                expected[n] -= 0.05 * mean_over_ranks(p.grad)
    held = [one.get("residuals", {}) for one in session.state_dict()["outer"]["residuals"]]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, any(bool(part.any()) for parts in held for part in parts.values()))
    holds = (any if world else all)(everyone)  # of a node, a rank that sends no part of 8 bits has no residual
    session.switch(plan_of(None))
    found = {
        f"{name} t={t} holds back": (compressor is not None) == holds,
        f"{name} t={t}": near([p.double() for p in model.parameters()], expected.values(), 2e-6),
    }
    session.detach()
    return found


def narrow_against_reference() -> dict[str, Any]:
    """Rounds in 8 bits with error feedback stay within the format of whole ones in float64, however many there are.

    What all workers hold back is at most one code of the largest pseudo-gradient: half of one of their own, and half
    of one of the sum. The outer optimizer makes at most lr / (1 − momentum) of it. Twice that is allowed, for what it
    changes in later gradients.
    """
    found: dict[str, Any] = {}
    for t, rule in itertools.product((0, 2), (LOCAL_SGD, OuterOptimizer())):
        spec = replace(STREAMING, delay_steps=t, optimizer=rule)
        found |= narrow(f"t={t}, momentum {rule.momentum}", spec, net_loss, dist.get_world_size(), dist.get_rank())
    return found


def narrow(name: str, spec: OuterSpec, loss: Any, workers: int, worker: int, **world: Any) -> dict[str, Any]:
    """Train in 8 bits, and compare one worker with that of the reference; see `narrow_against_reference`."""
    expected = Reference(Net, sgd, loss, workers, spec).begin().run(26)
    model, optimizer, session = started(plan_of(spec, INT8, **world), sgd, single())
    train(model, optimizer, range(26), single_loss)
    session.detach()
    pairs = zip(model.parameters(), expected.models[worker].parameters(), strict=True)
    apart = max(float((one.detach() - other.detach()).abs().max()) for one, other in pairs)
    code = expected.largest / 127.0
    bound = 2.0 * code * spec.optimizer.lr / (1.0 - spec.optimizer.momentum)
    return {f"{name}: {apart / code:.2f} codes": 1e-3 * code < apart <= bound}


def mean_over_ranks(value: Tensor | None) -> Tensor:
    """In float64."""
    assert value is not None
    mean = value.detach().double() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


def resumed() -> dict[str, Any]:
    """A checkpoint in the warm-up, between rounds and with one in flight changes nothing, bit for bit."""
    found: dict[str, Any] = {}
    for name, compressor, make in (("dense", None, Net), ("int8", INT8, single)):
        loss = net_loss if compressor is None else single_loss
        plan = plan_of(STREAMING, compressor)
        straight, optimizer, session = started(plan, adamw, make())
        train(straight, optimizer, range(15), loss)
        session.detach()
        for at in (1, 5, 8):
            model, optimizer, session = started(plan, adamw, make())
            train(model, optimizer, range(at), loss)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), session.state_dict()))
            session.detach()
            model, optimizer, session = restarted(plan, saved, make())
            train(model, optimizer, range(at, 15), loss)
            found[f"{name} at {at}"] = session.step == 15 and near(model.parameters(), straight.parameters(), 0.0)
            session.detach()
    return found


def more_workers() -> dict[str, Any]:
    """One worker more continues where all the others were: anchors, momenta, the mean of weights, all residuals."""
    if dist.get_world_size() < 3:
        return {"left out on two ranks": True}
    found: dict[str, Any] = {}
    fewer = list(range(dist.get_world_size() - 1))
    group = dist.new_group(fewer)
    for name, compressor, make in (("dense", None, Net), ("int8", INT8, single)):
        loss = net_loss if compressor is None else single_loss
        plan = plan_of(replace(STREAMING, warmup_steps=0), compressor)
        state = before = None
        if dist.get_rank() in fewer:
            model, optimizer = make(), None
            optimizer = adamw(model)
            small = replace(plan, world=PlanWorld(ranks=len(fewer)))
            session = runtime.attach(model, optimizer, small, group, drift=False, timeout_s=15.0)
            train(model, optimizer, range(7), loss)
            state = session.state_dict()
            with session.global_weights():
                before = [p.detach().clone() for p in model.parameters()]
            session.detach()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (state, before))
        states = [one for one, _ in everyone if one is not None]
        model, optimizer, session = started(plan, adamw, make())
        session.load_state_dict(states)
        with session.global_weights():
            found[f"{name} anchors"] = near(model.parameters(), everyone[0][1], 0.0)
        now = session.state_dict()["outer"]["residuals"]
        for index, one in enumerate(now):
            for parameter, part in one.get("residuals", {}).items():
                was = sum(state["outer"]["residuals"][index]["residuals"][parameter].double() for state in states)
                found[f"{name} residual {parameter}"] = near(
                    [mean_over_ranks(part) * dist.get_world_size()], [was], 1e-6
                )
        train(model, optimizer, range(7, 12), loss)
        session.switch(plan_of(None))
        found[f"{name} steps"] = session.step == 12 and same_everywhere(list(model.parameters()))
        session.detach()
    return found


def other_layouts() -> dict[str, Any]:
    """Fewer workers, one rank alone, and other plans continue with what a switch to synchronous steps leaves."""
    found: dict[str, Any] = {}
    plans = {
        "same": plan_of(replace(STREAMING, warmup_steps=0)),
        "other": plan_of(OuterSpec(every=3)),
        "with a warm-up": plan_of(OuterSpec(every=2, warmup_steps=5)),
        "longer warm-up": plan_of(OuterSpec(every=2, warmup_steps=90)),
        "synchronous": plan_of(None),
    }
    narrow_plan = plan_of(replace(STREAMING, warmup_steps=0), INT8)
    cases = {
        "dense": (plans, Net, net_loss, TOLERANCE, saved_and_ended(plans["same"], Net, net_loss)),
        "int8": (
            {"same": narrow_plan, "other": plan_of(OuterSpec(every=3))}, single, single_loss, 1e-6,
            saved_and_ended(narrow_plan, single, single_loss),
        ),
    }  # fmt: skip
    for count in range(dist.get_world_size(), 0, -1):  # torch names groups by how many a rank has
        group, world = dist.new_group(list(range(count))), PlanWorld(ranks=count)
        for name, (plans, make, loss, tolerance, (states, expected)) in cases.items():
            for what, plan in plans.items() if dist.get_rank() < count else ():
                case, model = f"{name}, {what} on {count}", make()
                optimizer, plan = adamw(model), replace(plan, world=world)
                session = runtime.attach(model, optimizer, plan, group, drift=False, timeout_s=15.0)
                found[f"{case}, alone"] = what == "same" or refused_alone(session, states[dist.get_rank()])
                session.load_state_dict(states)
                local = count > 1 and what not in ("longer warm-up", "synchronous")
                found[f"{case}, stage"] = session.step == 7 and session._mode.own_weights == local
                if local:
                    session.switch(replace(plan_of(None), world=world))
                found[case] = near(values_of(model, optimizer), expected, tolerance)
                train(model, optimizer, range(7, 9), loss)
                session.detach()
        if dist.get_rank() < count:
            dist.destroy_process_group(group)
    return found


def saved_and_ended(plan: Plan, make: Callable[[], nn.Module], loss: Any) -> tuple[list[Any], list[Tensor]]:
    """States of all ranks behind seven steps, and what a switch to synchronous steps makes of model and optimizer."""
    model, optimizer, session = started(plan, adamw, make())
    train(model, optimizer, range(7), loss)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, session.state_dict())
    session.switch(plan_of(None))
    ended = values_of(model, optimizer)
    session.detach()
    return states, ended


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of the weights and of AdamW's moments."""
    parameters = list(model.parameters())
    moments = [optimizer.state[p][key] for p in parameters for key in ("exp_avg", "exp_avg_sq")]
    return [one.detach().clone() for one in (*parameters, *moments)]


def refused_alone(session: Session, state: Any) -> bool:
    """Whether the state of one rank is not enough."""
    try:
        session.load_state_dict(state)
    except InputError as error:
        return "list of" in str(error)
    return False


def leaves_between_gradient_and_step() -> dict[str, Any]:
    """A switch that happens behind a backward makes that step a synchronous one."""
    model, optimizer, session = started(plan_of(replace(STREAMING, warmup_steps=0)))
    train(model, optimizer, range(5))
    session.switch(plan_of(None), at_step=8)
    train(model, optimizer, range(5, 10))
    found = {"same": same_everywhere(list(model.parameters()))}
    session.detach()
    return found


def switched() -> dict[str, Any]:
    """A run changes to outer steps and back, and all ranks then have one model and one optimizer's state."""
    found: dict[str, Any] = {}
    for name, compressor, make in (("dense", None, Net), ("int8", INT8, single)):
        loss = net_loss if compressor is None else single_loss
        model, optimizer, session = started(plan_of(None), adamw, make())
        train(model, optimizer, range(3), loss)
        session.switch(plan_of(replace(STREAMING, warmup_steps=0), compressor))
        train(model, optimizer, range(3, 10), loss)
        own = [p.detach().clone() for p in model.parameters()]
        found[f"{name} apart"] = not same_everywhere(own)
        session.switch(plan_of(None))
        train(model, optimizer, range(10, 13), loss)
        states = [value for p in model.parameters() for value in optimizer.state[p].values()]
        found[f"{name} weights"] = same_everywhere(list(model.parameters()))
        found[f"{name} optimizer"] = same_everywhere(states)
        session.detach()
    return found


def switched_by_hand() -> dict[str, Any]:
    """A run that has had its warm-up before it takes up outer steps makes synchronous ones first, whose movement the
    guard measures; also where it resumes meanwhile.
    """
    plan, found, ended = plan_of(STREAMING), {}, []
    model, optimizer, session = started(plan_of(None))
    train(model, optimizer, range(3))
    session.switch(plan)
    train(model, optimizer, range(3, 9))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), session.state_dict()))
    found["synchronous"] = same_everywhere(list(model.parameters()))
    for name in ("straight", "resumed"):
        if ended:
            session.detach()
            model, optimizer, session = restarted(plan, saved)
        train(model, optimizer, range(9, 18))
        assert isinstance(session._mode, Outer)
        found[f"{name}, behind two periods"] = session._mode._begun == 11
        found[f"{name}, measured"] = bool(session._mode.period.distances.base)
        ended.append(values_of(model, optimizer))
    session.detach()
    return found | {"alike": near(*ended, 0.0)}


def guarded() -> dict[str, Any]:
    """Workers that are too far from each other take rounds sooner, then synchronous steps, all at one step."""
    plan = replace(plan_of(STREAMING), fallback=plan_of(None))
    model, optimizer, session = started(plan)
    seen, resumed_at = [], 18
    with (
        warnings.catch_warnings(record=True) as caught,
        patch.multiple(distance_guard, MOVEMENT_BOUND=0.0, SHARE_BOUND=0.0, PULLS=2),
    ):
        warnings.simplefilter("always")
        for step in range(40):
            if step == resumed_at:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), session.state_dict()))
                session.detach()
                model, optimizer, session = restarted(plan, saved)
            train(model, optimizer, range(step, step + 1))
            seen.append(session._mode.period.every if isinstance(session._mode, Outer) else 0)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    texts = [str(one.message) for one in caught if one.category is runtime.AccuracyWarning]
    found = {
        "alike": all(one == seen for one in everyone),
        "shortened before it was saved": seen[resumed_at] == 2,
        "shortened, then synchronous": list(dict.fromkeys(seen)) == [4, 2, 1, 0],
        "weights": same_everywhere(list(model.parameters())),
        "reported on rank 0": len(texts) == 3 and "averaged every 2 steps" in texts[0] and "synchronous" in texts[2]
        if dist.get_rank() == 0
        else not texts,
    }
    session.detach()
    return found


def unguarded() -> dict[str, Any]:
    """Without the guard nothing is measured or sent behind a round, and training is the same."""
    (weights, report, sent), (others, none, unsent) = (watched(guard=guard) for guard in (True, False))
    return {
        "same weights": near(others, weights, 0.0), "measured": report != NO_DISTANCE and sent > 0,
        "not measured": none == NO_DISTANCE and unsent == 0,
    }  # fmt: skip


def watched(*, guard: bool) -> tuple[list[Tensor], Any, int]:
    """Weights, the last distance, and how often it was sent."""
    model, optimizer, session = started(plan_of(STREAMING), guard=guard)
    with patch.object(BufferRound, "launch", autospec=True, side_effect=BufferRound.launch) as sent:
        train(model, optimizer, range(15))
    assert isinstance(session._mode, Outer)
    report = session._mode.period.report
    session.detach()
    return [parameter.detach() for parameter in model.parameters()], report, sent.call_count


def ended_for_good() -> dict[str, Any]:
    """What the guard has ended stays synchronous where it resumes, with the same plan and with an exact one."""
    found: dict[str, Any] = {}
    plan = plan_of(replace(STREAMING, warmup_steps=0))
    model, optimizer, session = started_and_ended(plan)
    found["ended"] = not session._mode.own_weights
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), session.state_dict()))
    train(model, optimizer, range(20, 30))
    expected = values_of(model, optimizer)
    session.detach()
    for name, following in (("the same plan", plan), ("an exact one", plan_of(None))):
        model, optimizer, session = restarted(following, saved)
        train(model, optimizer, range(20, 30))
        found[name] = session.step == 30 and near(values_of(model, optimizer), expected, 0.0)
        session.detach()
    return found


def loses_a_worker(folder: Path) -> None:
    """The second worker is killed between rounds, behind a checkpoint of all."""
    model, optimizer, session = started(plan_of(replace(STREAMING, warmup_steps=0)))
    for step in range(20):
        train(model, optimizer, range(step, step + 1))
        if step == 3:
            torch.save(session.state_dict(), folder / f"{dist.get_rank()}.pt")
            dist.barrier()
        if step == 4 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def continues_without_it(folder: Path, before: int) -> dict[str, Any]:
    """Fewer workers continue from the checkpoint of all that there were."""
    model, optimizer, session = started(plan_of(replace(STREAMING, warmup_steps=0)))
    session.load_state_dict([torch.load(folder / f"{rank}.pt") for rank in range(before)])
    train(model, optimizer, range(4, 10))
    found = {"steps": session.step == 10, "local": session._mode.own_weights}
    session.switch(plan_of(None))
    found["alike"] = same_everywhere(list(model.parameters()))
    session.detach()
    return found


def same_everywhere(tensors: list[Tensor]) -> bool:
    """Whether all ranks have the same ones, bit for bit."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [tensor.detach().clone() for tensor in tensors])
    return all(torch.equal(a, b) for other in everyone for a, b in zip(everyone[0], other, strict=True))


def habits() -> dict[str, Any]:
    """Accumulation, steps that one rank leaves out, clipping and evaluation in between keep ranks in step."""
    found: dict[str, Any] = {}
    model, optimizer, session = started(plan_of(STREAMING))
    for step in range(16):
        optimizer.zero_grad()
        with session.no_sync() if step % 3 == 0 else contextlib.nullcontext():
            net_loss(model, dist.get_rank(), 100 + step).backward()
        if step % 3 == 0:
            net_loss(model, dist.get_rank(), step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if (step + dist.get_rank()) % 5:
            optimizer.step()
        with torch.no_grad():
            net_loss(model, dist.get_rank(), step)
    with session.global_weights():
        found["global"] = same_everywhere(list(model.parameters()))
    found["own"] = not same_everywhere(list(model.parameters()))
    found["steps"] = session.step == 16
    session.detach()
    return found


def left_out() -> dict[str, Any]:
    """Rounds that block do not wait for the next forward of a worker that leaves its step out, which a script's own
    collective, a switch or a detach may come before.
    """
    found: dict[str, Any] = {}
    for way in ("overflow", "called", "switched", "detached"):
        model, optimizer, session = started(plan_of(OuterSpec(every=2)), sgd)
        for step in range(4):  # rounds behind the second and the last
            left = step % 2 == 1 and dist.get_rank() == 0
            optimizer.zero_grad()
            loss = net_loss(model, dist.get_rank(), step)
            (loss * (float("inf") if left and way == "overflow" else 1.0)).backward()
            if not left:
                optimizer.step()
            elif way == "called":
                session.wait_for_weights()
            if way in ("overflow", "called"):
                dist.all_reduce(loss.detach())
        if way == "switched":
            session.switch(plan_of(None))
        elif way != "detached":
            session.wait_for_weights()
        session.detach()
        found[way] = way == "detached" or same_everywhere(list(model.parameters()))
    return found


def waits_in_vain() -> dict[str, Any]:
    """Where a script's own collective comes before what a worker that leaves its step out sends, others say so."""
    model = Net()
    optimizer = sgd(model)
    runtime.attach(model, optimizer, plan_of(OuterSpec(every=1)), drift=False, timeout_s=2.0)
    found = True
    net_loss(model, dist.get_rank(), 0).backward()
    if dist.get_rank():
        try:
            optimizer.step()
            found = False
        except CommunicationError as error:
            found = "leaves out its optimizer's step, call session.wait_for_weights() in its place" in str(error)
    dist.all_reduce(torch.zeros(1))
    return {"what to do": found}


class Normed(nn.Module):
    """With running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.one, self.norm, self.two = nn.Linear(5, 7).double(), nn.BatchNorm1d(7).double(), nn.Linear(7, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5) → (batch, 3)."""
        scores: Tensor = self.two(self.norm(self.one(x)))
        return scores

    def statistics(self) -> Tensor:
        """Copies of both, shape (14,)."""
        return torch.cat([self.norm.running_mean, self.norm.running_var])


def buffers() -> dict[str, Any]:
    """Statistics of BatchNorm are a worker's own between rounds, after one the mean of what they were behind its
    launch; global weights have the mean of the present ones.
    """
    results: dict[str, Any] = {}
    names = tuple(name for name, _ in Normed().named_parameters())[::-1]
    for late in (0, 1):
        plan = plan_of(OuterSpec(every=2, delay_steps=late), buckets=(PlanBucket(gradients=names),))
        model, optimizer, session = started(plan, adamw, Normed())
        assert isinstance(model, Normed)
        own: list[Tensor] = []
        for step in range(1, 10):
            optimizer.zero_grad()
            loss = net_loss(model, dist.get_rank(), step)
            own.append(model.statistics())
            loss.backward()
            optimizer.step()
            launched = step - late
            expected = own[-1] if launched % 2 or not launched else mean_over_ranks(own[launched - 1])
            results[f"{late} steps late, step {step}"] = near([model.statistics()], [expected])
        results[f"{late} steps late, apart"] = not same_everywhere([own[-1]])
        expected = mean_over_ranks(model.statistics())
        with session.global_weights():
            results[f"{late} steps late, global"] = near([model.statistics()], [expected])
        session.detach()
    return results


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    check.__name__: check
    for check in (
        against_reference,
        plain_averaging,
        several_optimizers,
        scaled,
        compressed,
        narrow_against_reference,
        resumed,
        switched,
        switched_by_hand,
        more_workers,
        other_layouts,
        leaves_between_gradient_and_step,
        guarded,
        unguarded,
        ended_for_good,
        habits,
        left_out,
        buffers,
    )
}


def run(names: list[str]) -> dict[str, dict[str, Any]]:
    """Results of some checks on this rank."""
    torch.set_num_threads(1)
    return {name: CHECKS[name]() for name in names}
