"""What a session does on one rank, without a process group: steps, switches, putting aside and the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

import runtime
from runtime.comm.world import World
from runtime.core.options import AttachOptions
from runtime.errors import InputError, PlanMismatch
from runtime.plan import ModelReference, Plan, PlanBucket, PlanWorld
from runtime.session.session import Session

NAMES = ("1.bias", "1.weight", "0.bias", "0.weight")


def plan(*sizes: int) -> Plan:
    """Buckets of so many gradients."""
    buckets = []
    for size in sizes:
        start = sum(len(bucket.gradients) for bucket in buckets)
        buckets.append(PlanBucket(gradients=NAMES[start : start + size]))
    return Plan(model=ModelReference(name="test"), world=PlanWorld(ranks=1), accuracy="exact", buckets=tuple(buckets))


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()


@contextmanager
def attached(given: Plan) -> Iterator[tuple[Session, nn.Module, torch.optim.Optimizer]]:
    model, optimizer = made()
    session = runtime.attach(model, optimizer, given)
    yield session, model, optimizer
    session.detach()


def test_weights_are_those_of_plain_training() -> None:
    reference = made()
    steps(*reference, 4)
    with attached(plan(4)) as (session, model, optimizer):
        steps(model, optimizer, 2)
        session.switch(plan(1, 3), at_step=3)
        assert session.plan == plan(4)
        steps(model, optimizer, 2)
        assert (session.step, session.plan) == (4, plan(1, 3))
    assert not session.is_attached
    for found, expected in zip(model.parameters(), reference[0].parameters(), strict=True):
        assert found.tolist() == expected.tolist()


def test_a_session_that_was_aside_goes_on_where_it_was() -> None:
    with attached(plan(2, 2)) as (session, model, optimizer):
        steps(model, optimizer, 2)
        before = session._exchange
        model[0].requires_grad_(False)
        with session._aside("test", nullcontext):
            assert not session.is_attached
            steps(model, optimizer, 1)
        model[0].requires_grad_(True)
        assert session.is_attached
        assert session.step == 2
        assert session._exchange is not before
        assert list(session._parameters) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        steps(model, optimizer, 1)
        assert session.step == 3


def test_calls_at_wrong_times_are_refused() -> None:
    with attached(plan(4)) as (session, model, optimizer):
        with pytest.raises(PlanMismatch, match="at_step"):
            session.switch(plan(4), at_step=-1)
        session.switch(plan(1, 3), at_step=5)
        with pytest.raises(InputError, match=r"session.switch waits for step 5"), session._aside("test", nullcontext):
            pass
        output = model(torch.ones(2, 3)).sum()
        output.register_hook(lambda _: session.switch(plan(4)))
        with pytest.raises(InputError, match="called while a backward runs"):
            output.backward()
        del optimizer
    with pytest.raises(InputError, match="the session is detached"):
        session.switch(plan(4))


def test_a_state_is_continued_from() -> None:
    with attached(plan(4)) as (session, model, optimizer):
        steps(model, optimizer, 1)
        state = session.state_dict()
        assert state == {"plan": plan(4).digest(), "ranks": 1}
        session.load_state_dict(state)
        assert session.step == 1


def test_a_measuring_session_leaves_gradients_where_ranks_would_differ() -> None:
    model, optimizer = made()
    options = AttachOptions(communicate=False, drift=False, guard=False)
    session = Session(model, optimizer, plan(1, 3), World(), options)
    steps(model, optimizer, 2)
    assert [len(bucket.slots) for bucket in session._exchange.buckets] == [1, 3]
    assert session.report().steps == 2
    session.detach()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world": PlanWorld(ranks=2)}, "the plan was made for 2 ranks, found 1"),
        ({"buckets": plan(4).buckets[:0]}, "trainable in the model but not in the plan"),
    ],
)
def test_a_refused_plan_changes_nothing(changes: dict[str, object], words: str) -> None:
    model, optimizer = made()
    with pytest.raises(PlanMismatch, match=words):
        runtime.attach(model, optimizer, replace(plan(4), **changes))  # type: ignore[arg-type]
    assert not model._forward_pre_hooks
    runtime.attach(model, optimizer, plan(4)).detach()


def test_metrics_are_the_report_in_plain_numbers() -> None:
    """Before a step was seen whole there are no times; parts add up to the step."""
    with attached(plan(1, 3)) as (session, model, optimizer):
        assert session.metrics() == {"step": 0, "steps_seen": 0}
        steps(model, optimizer, 6)
        found, report = session.metrics(), session.report()
        assert (found["step"], found["steps_seen"], found["micro_batches"]) == (6, report.steps, 1)
        parts = ("forward_us", "backward_us", "wait_us", "update_us")
        assert found["step_us"] == pytest.approx(sum(found[name] for name in parts))
        assert found["interval_us"] == pytest.approx(found["step_us"] + found["script_us"])
        assert all(type(value) in (int, float) for value in found.values())
        assert "predicted_us" not in found
