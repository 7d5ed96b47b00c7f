"""What every mode has to keep to, also one that is added: the table of combinations, refusals, a rank alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from runtime.checks.modes import MODES, asked_modes, make_mode
from runtime.checks.optimizer import check_optimizer
from runtime.checks.plan import check_plan, check_switch, trainable_parameters
from runtime.comm.world import World
from runtime.core.options import AttachOptions
from runtime.modes.base import Mode, Synchronous
from runtime.monitor.clock import WallClock
from runtime.monitor.recorder import Recorder
from runtime.outer.local_steps import Outer
from runtime.plan import (
    CompressorSpec,
    DelaySpec,
    LocalAsyncSpec,
    ModelReference,
    NormPlan,
    OperatorPlan,
    OuterSpec,
    Plan,
    PlanBucket,
    PlanWorld,
    StepPlan,
    UpdatePlan,
)
from runtime.plan.combinations import ALSO_EXECUTED, COMBINATIONS, FEATURES, reason_against
from runtime.sharded.sharded import LateGather

MODEL = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
PARAMETERS = trainable_parameters(MODEL)
NAMES = tuple(reversed(PARAMETERS))
BUCKET = PlanBucket(gradients=NAMES)
PLAN = Plan(model=ModelReference(name="test"), world=PlanWorld(ranks=2), accuracy="relaxed", buckets=(BUCKET,))
TOPK = CompressorSpec(name="topk", density=0.5)

ASKS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "sharded": {"interface": ("sharded-step",), "updates": UpdatePlan(step=StepPlan(sharded=True))},
    "delay": {"delay": DelaySpec(steps=2, warmup_steps=4)},
    "outer": {"outer": OuterSpec(every=4, fragments=(NAMES,), delay_steps=1, mix=0.5)},
    "local_updaters": {"local_async": LocalAsyncSpec(updaters=1)},
}
"""Mode → what of a plan asks for it."""
SPARSE = replace(BUCKET, collective="sparse", algorithm="flat", compressor=TOPK)
HAS: dict[str, Any] = {
    "topology": replace(BUCKET, algorithm="tree"),
    "selection": SPARSE,
    "layer_selection": replace(SPARSE, compressor=replace(TOPK, scope="layer")),
    "wire": replace(BUCKET, compressor=CompressorSpec(name="wire", dtype="bfloat16")),
    "low_rank": replace(BUCKET, compressor=CompressorSpec(name="powersgd", rank=1)),
    "from_step": 100,
    "shared_norms": NormPlan(shares=(NAMES[:2], NAMES[2:])),
    "shared_operator": OperatorPlan(owners={NAMES[0]: 1}),
}
"""Feature → the bucket, the norms, the operator or the first compressed step of a plan that has it."""
PLANNING_ALONE = {"solver"}
"""Features of no plan."""

ALL = (*MODES, Synchronous)
LATE_GATHER: dict[str, Any] = {
    "interface": ("late-gather",), "updates": UpdatePlan(step=StepPlan(sharded=True, gather="forward", gathers=((0,),)))
}  # fmt: skip
SHARED_NODES: dict[str, Any] = {
    "interface": ("sharded-step",), "world": PlanWorld(ranks=2, nodes=1),
    "outer": replace(ASKS["outer"]["outer"], sharded_step=True),
}  # fmt: skip
WAYS = [
    *((mode, LATE_GATHER if mode is LateGather else ASKS[mode.name]) for mode in ALL),
    (Outer, SHARED_NODES),
]
"""Every mode, and what of a plan asks for it."""


def plan_of(asks: dict[str, Any], feature: str | None = None) -> Plan:
    plan = replace(PLAN, **asks)
    if feature is None:
        return plan
    has = HAS[feature]
    if isinstance(has, PlanBucket):
        return replace(plan, buckets=(has,))
    if isinstance(has, int):
        return replace(plan, from_step=has)
    part = "norms" if isinstance(has, NormPlan) else "operator"
    return replace(plan, updates=replace(plan.updates or UpdatePlan(), **{part: has}))


def test_modes_are_those_of_the_table() -> None:
    names = dict.fromkeys(mode.name for mode in ALL if mode is not Synchronous)
    assert list(names) == [n for n in COMBINATIONS if n != "synchronous"]
    assert set(COMBINATIONS) == set(ASKS)
    assert set(FEATURES) - PLANNING_ALONE == set(HAS)
    for name, features in ALSO_EXECUTED.items():
        assert features <= set(COMBINATIONS[name])


@pytest.mark.parametrize(("mode", "asks"), WAYS)
def test_a_plan_asks_for_one_mode(mode: type[Mode], asks: dict[str, Any]) -> None:
    assert asked_modes(plan_of(asks)) == [mode]
    assert check_plan(PARAMETERS, plan_of(asks), 2) is None


@pytest.mark.parametrize(("one", "other"), [pair for pair in combinations(MODES, 2) if pair[0].name != pair[1].name])
def test_two_modes_are_refused(one: type[Mode], other: type[Mode]) -> None:
    problem = check_plan(PARAMETERS, replace(PLAN, **ASKS[one.name], **ASKS[other.name]), 2)
    assert problem is not None
    assert f"{one.what} beside {other.what}" in problem


@pytest.mark.parametrize("feature", HAS)
@pytest.mark.parametrize(("mode", "asks"), WAYS)
def test_what_the_table_says_is_what_is_refused(mode: type[Mode], asks: dict[str, Any], feature: str) -> None:
    reason = None if feature in ALSO_EXECUTED.get(mode.name, ()) else reason_against(mode.name, feature)
    problem = check_plan(PARAMETERS, plan_of(asks, feature), 2)
    if reason is not None:
        assert problem is not None
        assert reason in problem
        assert "expected" in problem
    else:
        assert problem is None or mode.name == "local_updaters"  # which look at compressors themselves


@pytest.mark.parametrize("mode", [mode for mode in ALL if mode.relaxed])
def test_what_is_relaxed_says_so(mode: type[Mode]) -> None:
    problem = check_plan(PARAMETERS, replace(plan_of(ASKS[mode.name]), accuracy="exact"), 2)
    assert problem is not None
    assert 'expected "relaxed"' in problem


def test_gathers_leave_out_no_bucket_between_theirs() -> None:
    buckets = tuple(replace(BUCKET, gradients=(name,)) for name in NAMES)
    for groups, words in (
        (((0, 2), (1, 3)), "gathers[0]: found buckets 0 and 2 without bucket 1"),
        (((2,), (1, 0)), "gathers: found none with bucket 3"),
    ):
        step = StepPlan(sharded=True, gather="forward", gathers=groups)
        problem = check_plan(
            PARAMETERS, replace(plan_of(LATE_GATHER), buckets=buckets, updates=UpdatePlan(step=step)), 2
        )
        assert problem is not None
        assert words in problem
        assert "expected" in problem


class Wrapper:
    """Changes gradients before the optimizer's step, say."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        """Not looked into."""


@pytest.mark.parametrize("asks", [asks for mode, asks in WAYS if mode.owned_step(plan_of(asks)) is not None])
def test_a_mode_that_owns_the_step_sees_all_of_it(asks: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    assert check_optimizer(plan_of(asks), optimizer, PARAMETERS) is None
    wrapped = check_optimizer(plan_of(asks), Wrapper(optimizer), PARAMETERS)
    assert wrapped is not None
    assert "a wrapper around SGD" in wrapped
    partial = check_optimizer(plan_of(asks), torch.optim.SGD(MODEL[0].parameters(), lr=0.1), PARAMETERS)
    assert partial is not None
    assert "not in the optimizer" in partial
    assert check_optimizer(plan_of(asks), None, PARAMETERS) is not None


@pytest.mark.parametrize(("mode", "asks"), WAYS)
def test_switches_are_refused_in_words(mode: type[Mode], asks: dict[str, Any]) -> None:
    assert check_switch(plan_of(asks), 3, 3) == (mode.attach_reason or mode.late_reason)


@pytest.mark.parametrize("asks", [asks for _, asks in WAYS])
def test_a_rank_alone_trains_synchronously_and_keeps_its_plan(asks: dict[str, Any]) -> None:
    host = SimpleNamespace(
        world=World(), options=AttachOptions(), parameters=PARAMETERS, device=torch.device("cpu"),
        recorder=Recorder(WallClock(), 1, len(NAMES)),
    )  # fmt: skip
    made = make_mode(plan_of(asks), host)  # type: ignore[arg-type]
    assert type(made) is Synchronous
    assert made.plan == plan_of(asks)
    assert list(made.make_exchange().buckets) == []
