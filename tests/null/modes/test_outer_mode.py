"""What plans with outer steps refuse, and the outer step against torch.optim.SGD."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from runtime.checks.plan import trainable_parameters
from runtime.comm.topology import Topology
from runtime.core.buckets import make_plain_buckets
from runtime.outer.anchors import Anchor
from runtime.outer.averages import mean_of
from runtime.outer.local_steps import Outer
from runtime.outer.saved_state import _merged_optimizer
from runtime.plan import ModelReference, OuterOptimizer, OuterSpec, Plan, PlanBucket, PlanWorld

MODEL = nn.Linear(3, 2).double()
PARAMETERS = trainable_parameters(MODEL)
PLAN = Plan(
    model=ModelReference(name="test"), world=PlanWorld(ranks=4, nodes=2), accuracy="relaxed",
    buckets=(PlanBucket(gradients=tuple(PARAMETERS)),), outer=OuterSpec(every=4),
)  # fmt: skip


def test_optimizers_that_step_alone_are_wanted() -> None:
    assert Outer.check_optimizer(PLAN, (torch.optim.AdamW(MODEL.parameters()),), PARAMETERS) is None
    for optimizers, what in (((), "no optimizer"), ((torch.optim.LBFGS(MODEL.parameters()),), "LBFGS")):
        problem = Outer.check_optimizer(PLAN, optimizers, PARAMETERS)
        assert problem is not None
        assert what in problem
        assert "expected" in problem


def test_nodes_are_workers_where_the_plan_says_so() -> None:
    assert Outer.check_topology(PLAN, Topology(((0, 1), (2, 3)))) is None
    assert Outer.check_topology(replace(PLAN, world=PlanWorld(ranks=4)), None) is None
    problem = Outer.check_topology(PLAN, Topology(((0, 1, 2, 3),)))
    assert problem is not None
    assert "outer steps between 2 nodes, but found 1 nodes of 4 ranks; expected 2 of 2 ranks" in problem


def test_owners_take_the_outer_step_together() -> None:
    """All parts, of three owners, come to what torch.optim.SGD makes of the whole."""
    rule = OuterOptimizer(lr=0.7, momentum=0.9)
    (bucket,) = make_plain_buckets(PLAN, PARAMETERS)
    parts = [Anchor(bucket.messages[0], rank, 3, rule) for rank in range(3)]
    weights = {name: parameter.detach().clone() for name, parameter in PARAMETERS.items()}
    for part in parts:
        part.take(weights)
    whole = nn.Parameter(torch.cat([part.weights for part in parts]).clone())
    outer = torch.optim.SGD([whole], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(3):
        gradient = torch.randn(whole.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        whole.grad = gradient
        outer.step()
        for part in parts:
            part.step(part.own(gradient))
        torch.testing.assert_close(torch.cat([part.weights for part in parts]), whole.detach(), rtol=0, atol=1e-15)


def test_owners_part_of_a_whole_anchor_moves_as_all_of_it() -> None:
    """Owners that have the momentum alone, and continue as another number of them, move weights as whole steps do."""
    rule = OuterOptimizer(lr=0.7, momentum=0.9)
    (bucket,) = make_plain_buckets(PLAN, PARAMETERS)
    whole = Anchor(bucket.messages[0], 0, 1, rule, whole=True)
    parts = [Anchor(bucket.messages[0], rank, 3, rule, 4, whole=True) for rank in range(3)]
    for one in (whole, *parts):
        one.take({name: parameter.detach() for name, parameter in PARAMETERS.items()})
    for step in range(4):
        gradient = torch.randn(whole.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        whole.step(gradient)
        moved = torch.cat([one.movement(one.own(gradient)) for one in parts])
        for one in parts:
            one.weights.sub_(moved)
            torch.testing.assert_close(one.weights, whole.weights, rtol=0, atol=1e-14)
        if step == 1:
            saved = [copy.deepcopy(one.tensors()) for one in parts]
            parts = [Anchor(bucket.messages[0], rank, 2, rule, whole=True) for rank in range(2)]
            for one in parts:
                one.load(saved[0], saved)


def test_the_mean_of_equal_tensors_is_the_tensor() -> None:
    one = torch.rand(7)
    assert torch.equal(mean_of([one, one.clone(), one.clone()]), one)


def test_moments_of_a_single_element_are_averaged_and_step_counts_are_not() -> None:
    states = []
    for gradient in (1.0, 3.0):
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.AdamW([parameter])
        for _ in range(int(gradient)):
            parameter.grad = torch.full((1,), gradient)
            optimizer.step()
        states.append(optimizer.state_dict())
    one, other, found = (state["state"][0] for state in (*states, _merged_optimizer(states)))
    assert float(found["step"]) == 1.0
    assert float(found["exp_avg"]) == pytest.approx(float(one["exp_avg"] + other["exp_avg"]) / 2.0)
