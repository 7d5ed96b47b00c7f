"""A model of a profile's units: whose parameters are where, what they get of a backward, and what a step takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.documents.units import Unit, Units, UnitWeight
from planner.profile.units import LiveBytes
from planner.rehearse.units_model import UnitsModel

KEPT = (400, 8000, 1200)


def units() -> Units:
    return Units(
        units=tuple(
            Unit(module=module, forward_us=0.0, backward_us=0.0, activation_bytes=kept, input_requires_grad=at > 0)
            for at, (module, kept) in enumerate(zip(("embed", "layers.0", "head"), KEPT, strict=True))
        ),
        weights=(
            UnitWeight(modules=("embed", "head"), shape=(30, 2)),
            UnitWeight(modules=("layers.0.mlp",), shape=(50,)),
            UnitWeight(modules=("layers.0.frozen",), shape=(7,), trainable=False),
            UnitWeight(modules=("",), shape=(5,)),
        ),
        element_bytes=4, state_factor=0.0,
    )  # fmt: skip


def test_parameters_lie_in_the_units_that_have_them_alone_and_get_gradients_of_this_rank() -> None:
    """A tied one and the model's own are the model's; a frozen one gets none."""
    models = [UnitsModel(units(), rank, 2) for rank in range(2)]
    shapes = {name: (p.numel(), p.requires_grad) for name, p in models[0].named_parameters()}
    assert shapes == {
        "weight_0": (60, True), "weight_3": (5, True), "layers.0.weight_1": (50, True),
        "layers.0.weight_2": (7, False),
    }  # fmt: skip
    for model in models:
        model(torch.zeros(1)).sum().backward()
    first, second = ([p.grad for p in model.parameters()] for model in models)
    for mine, other, parameter in zip(first, second, models[0].parameters(), strict=True):
        assert (mine is None) == (not parameter.requires_grad)
        assert mine is None or not torch.equal(mine, other)
    before = nn.utils.parameters_to_vector(models[0].parameters()).detach().clone()
    models[0].zero_grad()
    models[0].step()
    moved = nn.utils.parameters_to_vector(models[0].parameters()) - before
    assert int((moved != 0).sum()) == 60 + 5 + 50
    assert all(parameter.grad is None for parameter in models[0].parameters())


def test_a_step_takes_the_units_memory() -> None:
    """Of the plain model: all activations and the last unit's gradients, or all gradients at the end."""
    model = UnitsModel(units(), 0, 2)
    model.step()
    with LiveBytes(model.local_pointers()) as live:
        model.step()
    # At its most when the block's backward begins: what the embedding and the block keep, and their gradients so far.
    assert live.total_bytes == pytest.approx(KEPT[0] + KEPT[1] + KEPT[2], rel=0.05)
    assert model.local_bytes() == 4 * (60 + 50 + 7 + 5)
