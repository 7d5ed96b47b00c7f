"""What `planner.attach` takes and refuses, on one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.online.opening import Opener
from runtime.errors import InputError, PlanMismatch
from runtime.plan import CompressorSpec, ModelReference, Plan, PlanBucket, PlanWorld
from runtime.plan.document import PhasePlan

PLAN = Plan(
    model=ModelReference(name="linear"), world=PlanWorld(ranks=1), accuracy="exact",
    buckets=(PlanBucket(gradients=("weight", "bias")),),
)  # fmt: skip
HEAD = nn.Linear(2, 2)


def sgd(*parameters: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_one_interface_is_allowed_by_its_name() -> None:
    model = nn.Linear(2, 2)
    planner.attach(model, sgd(*model.parameters()), allow="sharded-step").detach()
    with pytest.raises(InputError, match="found 'shared-step', which is unknown"):
        planner.attach(model, sgd(*model.parameters()), allow="shared-step")


def test_an_unknown_class_is_refused_with_a_plan() -> None:
    with pytest.raises(InputError, match="accuracy: found 'fast', expected one of: exact, bounded, relaxed"):
        planner.attach(nn.Linear(2, 2), None, PLAN, accuracy="fast")  # type: ignore[arg-type]


SPARSE = Plan(
    model=PLAN.model, world=PLAN.world, accuracy="bounded",
    buckets=(
        PlanBucket(
            gradients=("weight", "bias"), collective="sparse", algorithm="flat",
            compressor=CompressorSpec(name="topk", density=0.1),
        ),
    ),
)  # fmt: skip


PHASED = replace(SPARSE, buckets=(), phases=(PhasePlan(plan=PLAN, until_step=3), PhasePlan(plan=SPARSE)))


@pytest.mark.parametrize(
    ("plan", "options", "error", "said"),
    [
        (SPARSE, {"compress": "wire"}, PlanMismatch, "need compress='sparse', expected 'wire' alone"),
        (PHASED, {"compress": "wire"}, PlanMismatch, "need compress='sparse', expected 'wire' alone"),
        (SPARSE, {"compress": "zip"}, InputError, "compress: found 'zip', expected one of all, wire, lowrank, sparse"),
        (SPARSE, {"accuracy": "exact"}, PlanMismatch, "accuracy is bounded, expected at most exact"),
        (None, {"accuracy": "bounded", "compress": "wire,sparse"}, InputError, "without a plan, expected wire or none"),
        (None, {"accuracy": "bounded", "compress": "zip"}, InputError, "compress: found 'zip'"),
        (
            None,
            {"accuracy": "relaxed"},
            InputError,
            "expected exact or bounded, or allow=.*`planner profile --for relaxed`",
        ),
        (None, {"compress": "none"}, InputError, "compress: found 'none' with accuracy='exact'"),
    ],
)
def test_what_is_riskier_than_permitted_is_refused(
    plan: Plan | None, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(error, match=said):
        planner.attach(model, sgd(*model.parameters()), plan, **options)
    planner.attach(model, sgd(*model.parameters()), plan, guard=False).detach()  # nothing has been changed


def test_a_run_without_encodings_is_an_exact_one() -> None:
    """Whose plans and cache it has."""
    model = nn.Linear(2, 2)
    found = {
        compress: Opener(model, None, "bounded", compress, ()).planned_accuracy for compress in (None, "wire", "none")
    }
    assert found == {None: "bounded", "wire": "bounded", "none": "exact"}
    planner.attach(model, sgd(*model.parameters()), accuracy="bounded").detach()


@pytest.mark.parametrize("plan", [None, PLAN])
def test_an_optimizer_of_another_model_is_refused(plan: Plan | None) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match=r"SGD of 2 parameters, none of which is the model's \(Linear\)"):
        planner.attach(model, sgd(*HEAD.parameters()), plan)
    planner.attach(model, sgd(*model.parameters()), plan).detach()  # nothing has been changed


@pytest.mark.parametrize(
    "made",
    [
        lambda model: sgd(model.weight),
        lambda model: sgd(*model.parameters(), *HEAD.parameters()),
        lambda model: None,
    ],
)
def test_an_optimizer_may_hold_a_part_of_the_model_or_more(made: Any) -> None:
    model = nn.Linear(2, 2)
    planner.attach(model, made(model), PLAN).detach()


@pytest.mark.parametrize("with_plan", [True, False])
def test_a_lazy_model_is_to_see_a_batch_first(with_plan: bool) -> None:
    model = nn.LazyLinear(2)
    for call in (
        lambda: planner.attach(model, None, PLAN if with_plan else None),
        lambda: planner.profile_step(model, lambda: None),
    ):
        with pytest.raises(InputError, match=r"weight has no shape yet \(a lazy module\).*one forward before attach"):
            call()


def test_a_page_takes_the_place_of_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("planner.html").write_text("mine", encoding="utf-8")
    for page in ("planner-2.html", "planner-3.html"):
        model = nn.Linear(2, 2)
        session = planner.attach(model, sgd(*model.parameters()))
        for _ in range(2):  # its own page is written again
            assert f"wrote {page}" in session.explain()
        session.detach()
    assert Path("planner.html").read_text(encoding="utf-8") == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["planner-2.html", "planner-3.html", "planner.html"]
