"""Facts of a model and reasons against attaching it, found in one visit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from runtime.checks.attach import ModelFacts, check_attach, form_of_followed
from runtime.checks.plan import model_fingerprint
from runtime.comm.world import World
from runtime.core.options import AttachOptions
from runtime.plan import CompressorSpec, DelaySpec, ModelReference, Plan, PlanBucket, PlanWorld

PLAN = Plan(
    model=ModelReference(name="linear"), world=PlanWorld(ranks=1), accuracy="exact",
    buckets=(PlanBucket(gradients=("bias", "weight")),),
)  # fmt: skip


def test_facts_are_of_what_trains() -> None:
    model = nn.Linear(2, 2)
    facts = ModelFacts.of(model)
    assert (list(facts.parameters), facts.problem, facts.device.type) == (["weight", "bias"], None, "cpu")
    assert facts.fingerprint == model_fingerprint(model)
    model.bias.requires_grad_(False)
    assert list(ModelFacts.of(model).parameters) == ["weight"]
    assert ModelFacts.of(model, [model.bias]) == facts


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(2, 2).requires_grad_(False), "no trainable parameter"),
        (nn.LazyLinear(2), "weight has no shape yet"),
        (nn.Linear(2, 2, device="meta"), "on the device meta"),
        (nn.Embedding(3, 2, sparse=True), "sparse=True"),
        (nn.ModuleDict({"module": nn.Linear(2, 2), "_orig_mod": nn.Linear(2, 2)}), "are both called"),
    ],
)
def test_a_model_that_no_plan_can_drive_has_no_parameters(model: nn.Module, words: str) -> None:
    facts = ModelFacts.of(model)
    assert facts.problem is not None
    assert words in facts.problem
    assert facts.parameters == {}


def found(
    model: nn.Module | None = None, optimizer: Any = None, plan: Plan | None = PLAN, **options: Any
) -> str | None:
    """The reason against attaching."""
    attached = options.pop("attached", ())
    return check_attach(model or nn.Linear(2, 2), optimizer, plan, AttachOptions(**options), World(), attached)[1]


def test_the_first_reason_counts() -> None:
    model = nn.Linear(2, 2)
    assert found(model) is None
    assert found(model, plan=None) is None
    assert "attached already" in str(found(model, attached=[model]))
    assert "belongs to another attached model" in str(found(model, attached=[nn.Sequential(model)]))
    assert "none of which is the model's" in str(found(model, torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)))
    assert "loss_scale: found 3" in str(found(model, loss_scale=3))
    assert "residual_unit: found 'bits', expected one of 'gradient', 'update'" in str(
        found(model, residual_unit="bits")
    )
    delayed = Plan(
        model=PLAN.model, world=PLAN.world, accuracy="relaxed", buckets=PLAN.buckets, delay=DelaySpec(steps=1)
    )
    adam, sgd = torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    assert found(model, sgd, residual_unit="update") is None
    assert "with a delay, whose servers keep" in str(found(model, sgd, delayed, residual_unit="update"))
    assert "found Adam" in str(found(model, adam, delayed, attached=()))
    assert "another model" in str(found(nn.Linear(2, 2, bias=False)))


@pytest.mark.parametrize(
    ("bucket", "words"),
    [
        (PlanBucket(gradients=("bias", "weight"), algorithm="magic"), "is sent by all_reduce/magic, which is unknown"),
        (
            PlanBucket(gradients=("bias", "weight"), compressor=CompressorSpec(name="wire", dtype="bfloat16")),
            "the plan's accuracy is exact",
        ),
    ],
)
def test_a_bucket_that_cannot_be_sent_is_named(bucket: PlanBucket, words: str) -> None:
    plan = Plan(model=PLAN.model, world=PLAN.world, accuracy="exact", buckets=(bucket,))
    assert words in str(found(plan=plan))


def test_what_follows_rank_0_is_told_by_its_form() -> None:
    model = nn.BatchNorm1d(3)
    forms = {form_of_followed(model, buffers=buffers) for buffers in (True, False)}
    assert len(forms) == 2
    assert form_of_followed(nn.BatchNorm1d(3), buffers=True) in forms
    assert form_of_followed(nn.BatchNorm1d(4), buffers=True) not in forms
    assert form_of_followed(nn.LazyLinear(3), buffers=True) == ""
