"""What every rank checks of `planner.compare` inside a script."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from compare_script import Training, plan_document
from torch import Tensor, nn

import planner
from planner.comparison.learned import Learned
from runtime.errors import InputError


def _state(training: Training) -> list[Tensor]:
    weights = [parameter.detach().clone() for parameter in training.model.parameters()]
    return [
        *weights,
        torch.tensor(training.scheduler.last_epoch),
        torch.tensor(training.optimizer.param_groups[0]["lr"]),
    ]


LEARN = {"learn": 10, "seeds": 1}
"""Options of a short `planner.compare` of losses."""


def _trained(
    plan: planner.Plan, *, measured: bool, learns: bool = False
) -> tuple[list[list[Tensor]], planner.Comparison | None]:
    """The states after each of six steps, with a comparison in the middle or without."""
    training, states, comparison = Training(plan), [], None
    for step in range(6):
        if measured and step == 3:
            gradients = [copy.deepcopy(p.grad) for p in training.model.parameters()] if not plan.sharded else []
            if learns:
                comparison = training.compare(lambda model, number: training.step(model), **LEARN)
            else:
                comparison = training.compare()
            for parameter, before in zip(training.model.parameters(), gradients, strict=False):
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, before)
        training.step(training.model)
        states.append(_state(training))
    training.session.detach()
    return states, comparison


def learn_as_if_nothing_had_happened(documents: dict[str, dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Plans by name; differences from DDP's last loss, by plan and row."""
    said = {}
    for name, document in documents.items():
        plan = planner.parse_plan(document)
        plain, _ = _trained(plan, measured=False)
        around, comparison = _trained(plan, measured=True, learns=True)
        for before, after in zip(plain, around, strict=True):
            assert all(map(torch.equal, before, after)), name
        assert isinstance(comparison, Learned)
        said[name] = {row.name: row.against_ddp for row in comparison.rows}
    return said


def go_on_as_if_nothing_had_happened(documents: dict[str, dict[str, Any]]) -> dict[str, dict[str, bool | None]]:
    """Plans by name; what the comparisons say of training, by plan and row."""
    said = {}
    for name, document in documents.items():
        plan = planner.parse_plan(document)
        plain, _ = _trained(plan, measured=False)
        around, comparison = _trained(plan, measured=True)
        for before, after in zip(plain, around, strict=True):
            assert all(map(torch.equal, before, after)), name
        assert comparison is not None
        said[name] = {row.name: row.same_training for row in comparison.rows}
        assert comparison.differences == (), comparison.differences
    return said


def refuse(_: object = None) -> dict[str, str]:
    """What is said of steps that cannot be measured; the session trains on after each."""
    training = Training(planner.parse_plan(plan_document()))
    batch = torch.zeros(2, 8)

    def own(_model: nn.Module) -> None:
        training.model(batch).sum().backward()
        training.optimizer.step()

    def broken(_model: nn.Module) -> None:
        raise ZeroDivisionError("of the script")

    said = {}
    for name, step in {"own": own, "broken": broken}.items():
        try:
            training.compare(step)
        except InputError as error:
            said[name] = str(error)
        training.step(training.model)
    everyone = [parameter.detach().clone() for parameter in training.model.parameters()]
    gathered = training.session._world.gather(everyone, "comparing weights")
    assert all(torch.equal(mine, first) for mine, first in zip(everyone, gathered[0], strict=True))
    training.session.detach()
    try:
        training.compare()
    except InputError as error:
        said["detached"] = str(error)
    return said


def attach_and_report(documents: dict[str, dict[str, Any]]) -> dict[str, tuple[list[str], str]]:
    """By plan: what is warned of its cost at attach, on this rank, and the lines of the report on it."""
    found = {}
    for name, document in documents.items():
        training = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            training = Training(planner.parse_plan(document))
        texts = [str(one.message) for one in caught if one.category is planner.AccuracyCostWarning]
        for _ in range(3):
            training.step(training.model)
        report = str(training.session.report())
        found[name] = texts, "\n".join(line.strip() for line in report.splitlines() if "accuracy:" in line)
        training.session.detach()
    return found


def refuse_to_learn(file: str) -> dict[str, str]:
    """What is said of steps that nothing can be learnt from; after each, training is where it was, and continues."""
    training = Training(planner.parse_plan(plan_document()))
    training.step(training.model)

    def broken(model: nn.Module, number: int, at: int = 8, *, plain: bool = False) -> Tensor:
        if number == at and (model is training.model) == plain:
            raise ZeroDivisionError("of the script")
        return training.step(model)

    def silent(model: nn.Module, number: int) -> None:
        training.step(model)

    def constant(model: nn.Module, number: int) -> object:
        training.step(model)
        return np.float32(0.0)

    asked: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
        "DDP": (broken, LEARN), "plan": (lambda model, number: broken(model, number, plain=True), LEARN),
        "estimate": (lambda model, number: broken(model, number, 3), LEARN), "silent": (silent, LEARN),
        "constant": (constant, LEARN), "phase": (broken, LEARN | {"plan": f"{file}@0"}),
        "phases": (broken, LEARN | {"plan": file}), "seeds": (training.step, {"seeds": 2}),
    }  # fmt: skip
    said = {}
    for name, (step, options) in asked.items():
        before = _state(training)
        try:
            training.compare(step, **options)
        except InputError as error:
            said[name] = str(error)
        assert all(map(torch.equal, before, _state(training))), name
        training.step(training.model)
    training.compare(lambda model, number: training.step(model), plan=f"{file}.one", **LEARN)
    everyone = training.session._world.gather(_state(training), "comparing weights")
    assert all(map(torch.equal, everyone[0], everyone[1]))
    training.session.detach()
    return said
