"""What ranks do in tests of plans in phases: one run with a plan in phases, and the same steps by hand."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from interplay_harness import SGD, loss_of, mlp
from session_checks import plan_of
from step_checks import raised
from torch import nn

import runtime
from runtime.monitor.trial import Trial
from runtime.plan import DelaySpec, Plan
from runtime.plan.document import PhasePlan
from runtime.session.phases import Phases

BORDERS = (3, 5)
STEPS = 8


def phased(model: nn.Module, borders: tuple[int | None, ...]) -> Plan:
    """Buckets of 1, 3 and 100 gradients."""
    plans = [plan_of(model, group) for group in (1, 3, 100)]
    phases = tuple(PhasePlan(plan=plan, until_step=until) for plan, until in zip(plans, (*borders, None), strict=True))
    return Plan(model=plans[0].model, world=plans[0].world, accuracy="exact", buckets=(), phases=phases)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def in_phases(by_call: bool, resumes: bool) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """Weights, and (phase, buckets) after each step; `resumes`: in a new session in the middle of phase 1."""
    torch.manual_seed(1)
    model = mlp()
    optimizer = SGD(model.parameters())
    plan = phased(model, (None, None) if by_call else BORDERS)
    session = runtime.attach(model, optimizer, plan)
    seen = []
    for step in range(STEPS):
        if resumes and step == BORDERS[0] + 1:
            state = session.state_dict()
            session.detach()
            session = runtime.attach(model, optimizer, plan)
            session.load_state_dict(state)
        if by_call and step in BORDERS:
            session.next_phase()
        train(model, optimizer, range(step, step + 1))
        seen.append((session.phase, len(session.plan.buckets)))
    if by_call:
        assert "found the last of 3 phases" in raised(session.next_phase)
    session.detach()
    return weights(model), seen


def by_hand() -> list[torch.Tensor]:
    """Three runs: attached, trained, detached."""
    torch.manual_seed(1)
    model = mlp()
    optimizer = SGD(model.parameters())
    for group, start, stop in zip((1, 3, 100), (0, *BORDERS), (*BORDERS, STEPS), strict=True):
        session = runtime.attach(model, optimizer, plan_of(model, group))
        train(model, optimizer, range(start, stop))
        session.detach()
    return weights(model)


def check() -> dict[str, Any]:
    expected = by_hand()
    result: dict[str, Any] = {}
    for by_call, resumes in product((False, True), repeat=2):
        found, seen = in_phases(by_call, resumes)
        result["by call" if by_call else "by step", resumes] = (
            all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
            [phase for phase, _ in seen],
            len({buckets for _, buckets in seen}),
        )
    torch.manual_seed(1)
    model = mlp()
    session = runtime.attach(model, SGD(model.parameters()), plan_of(model, 1))
    result["without phases"] = raised(session.next_phase)
    session.detach()
    optimizer = SGD(model.parameters())
    delayed = PhasePlan(plan=plan_of(model, 1, accuracy="relaxed", delay=DelaySpec(steps=1)))
    late = replace(phased(model, (None, None)), accuracy="relaxed", phases=(PhasePlan(plan=plan_of(model, 1)), delayed))
    result["a later delay"] = raised(lambda: runtime.attach(model, optimizer, late))
    session = runtime.attach(model, optimizer, phased(model, (None, None)))
    failed: list[str] = []
    hook = next(model.parameters()).register_hook(lambda _: failed.append(raised(session.next_phase)))
    train(model, optimizer, range(1))
    hook.remove()
    other = plan_of(model, 2)
    failed.append(raised(session.next_phase if dist.get_rank() == 0 else lambda: session.switch(other)))
    session.next_phase()
    result["failed"] = *failed, session.phase, len(session.plan.buckets) == len(plan_of(model, 3).buckets)
    with session._aside("a test", nullcontext):
        pass
    assert isinstance(session._director, Phases)
    session._monitor.trial = trial = Trial(other, session._world, session._recorder)
    session._director._begin(other)
    result["trial of the phase before"] = session._monitor.trial is trial
    session.detach()
    return result
