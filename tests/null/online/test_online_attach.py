"""What `planner.attach` takes and refuses, on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from runtime.errors import InputError
from runtime.plan import ModelReference, Plan, PlanBucket, PlanWorld

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
