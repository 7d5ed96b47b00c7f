"""Ranks share the optimizer's step: as if every rank did all of it, in every state of a run; and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import sharded_checks
import sharded_refusals
import torch
from findings import hold

import runtime
from planner.jobs.launch import LocalWorld, run_ranks
from runtime.checks.plan import trainable_parameters
from runtime.plan import ModelReference, Plan, PlanBucket, PlanWorld

Results = list[dict[str, Any]]


@pytest.fixture(
    scope="module", params=[2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)]
)
def ranks(request: pytest.FixtureRequest) -> Results:
    """What every rank of two, three and four found."""
    return run_ranks(LocalWorld(ranks=request.param), sharded_refusals.run)


@pytest.mark.parametrize("check", sharded_refusals.CHECKS)
def test_on_every_rank(ranks: Results, check: str) -> None:
    hold(ranks, check, {"taken"})


def test_one_rank_goes_on_alone_with_what_several_have_saved(ranks: Results) -> None:
    """The whole state, on another number of ranks: the step after it, whose gradients are the ranks' average."""
    whole, weights, _ = ranks[0]["states"]["taken"]
    models = []
    for shared in (True, False):
        model = sharded_checks.Net().double()
        model.load_state_dict(weights)
        optimizer = sharded_checks.MAKERS["Adam, foreach"](model.parameters())
        optimizer.load_state_dict(copy.deepcopy(whole))  # which would be the optimizer's own from then on
        names = tuple(trainable_parameters(model))
        plan = Plan(
            model=ModelReference(name="test"), world=PlanWorld(ranks=1), accuracy="exact",
            buckets=(PlanBucket(gradients=names),), updates=sharded_checks.SHARED if shared else None,
            interface=("sharded-step",) if shared else None,
        )  # fmt: skip
        session = runtime.attach(model, optimizer, plan)
        sharded_checks.plain(model, optimizer, session, 3)
        assert len(session.optimizer_state_dict()["state"]) == len(optimizer.state_dict()["state"])
        session.detach()
        models.append(model)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("LARS", "but found LARS, which scales the step of each layer by norms of the whole layer; expected"),
        ("LBFGS", "but found LBFGS, which compares whole gradients of several backwards"),
        ("Adafactor", "but found Adafactor, which keeps sums over rows and columns"),
        ("subclass", "but found Own, of which this version does not know that it treats every element by itself"),
        ("none", "but found no optimizer"),
        ("differentiable", "but found SGD with differentiable=True"),
        ("unowned", "expected all of them in it: add that parameter, freeze it before profiling, or plan without"),
        ("delay", "found a sharded step beside a delay"),
        ("read", "on the gradient of out.weight, but ranks share the optimizer's step"),
        ("histogram", "InputError: found numpy on the gradient of out.weight"),
        ("row", "InputError: found __getitem__ on the gradient of out.weight"),
        ("dim", "InputError: found norm with dim, keepdim, dtype on the gradient of out.weight"),
        ("transposed", "InputError: found .T on the gradient of out.weight"),
        ("norm in backward", "InputError: norms of gradients were asked for while a backward runs"),
        ("step in backward", "InputError: the optimizer's step was called while a backward runs"),
        ("said", "ShardedGradient(the gradient of out.weight, shape (5, 288), torch.float64)"),
    ],
)
def test_what_is_refused(ranks: Results, case: str, words: str) -> None:
    for rank in ranks if len(ranks) == 2 else []:
        assert words in rank["misfits"][case]


def test_a_rank_that_makes_no_step_is_named(ranks: Results) -> None:
    if len(ranks) == 2:
        said = ranks[0]["deadline"]
        assert "CommunicationError: rank 0: gathering the weights that ranks have updated" in said
        assert "rank 1 died or did not answer within 2 s" in said
