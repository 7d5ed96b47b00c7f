"""Section `units` of profile.json: the modules of a model in the order of forward, with times and memory of each.

What FSDP2 can gather together are groups of them; see `planner.fsdp2.program`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Annotated

from pydantic import Field

from planner.documents.text import pluralize
from runtime.plan.fully_sharded import ROOT, ModulePath, contains
from runtime.plan.strict_json import Count, Name, Record, TimeUs, repeated_item


@dataclass(frozen=True, kw_only=True)
class Unit(Record):
    """A module that computes once in each step."""

    module: Name
    forward_us: TimeUs
    backward_us: TimeUs
    activation_bytes: Count = 0
    """Bytes kept for backward beyond parameters, and beyond what units before it keep."""
    forward_working_bytes: Count = 0
    """Peak bytes of its forward beyond activations; 0 if it is not known."""
    backward_working_bytes: Annotated[int, Field(ge=-(2**53), le=2**53)] = 0
    """Peak bytes of its backward beyond all its activations and gradients of parameters: below 0 if the
    former are gone before the latter are there."""
    carried_bytes: Count = 0
    """Part of that which is there already when its backward begins."""
    input_requires_grad: bool = True
    """False of the first one, whose input is data: its gradients are reduced last."""


@dataclass(frozen=True, kw_only=True)
class UnitWeight(Record):
    """A parameter, with every module that has it."""

    modules: Annotated[tuple[ModulePath, ...], Field(min_length=1)]
    shape: Annotated[tuple[Count, ...], Field(min_length=1)]
    trainable: bool = True

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def padded_numel(self, ranks: int) -> int:
        """Return the elements with the rows, its first dimension, that make every rank's part equally large."""
        rows = self.shape[0]
        return -(-rows // ranks) * ranks * (self.numel // max(1, rows))


@dataclass(frozen=True, kw_only=True)
class Units(Record):
    """All of a model's units and parameters."""

    units: Annotated[tuple[Unit, ...], Field(min_length=1)]
    weights: Annotated[tuple[UnitWeight, ...], Field(min_length=1)]
    element_bytes: Annotated[int, Field(ge=1, le=16)] = 4
    state_factor: Annotated[float, Field(ge=0.0, le=64.0)] = 0.0
    """Bytes of the optimizer's state for each byte of parameters."""
    passes_through: tuple[ModulePath, ...] = (ROOT,)
    """Modules that return what the last one inside them does."""
    update_us: TimeUs = 0.0
    """The optimizer's update of all parameters."""
    loss_working_bytes: Count = 0
    """Peak bytes of the loss, forward and backward, beyond all activations."""
    estimated: bool = False
    """Whether times are shared out by size, and not measured."""

    def problem(self, path: str) -> str | None:
        """Return what is wrong if modules are named twice or inside each other."""
        if (twice := repeated_item([unit.module] for unit in self.units)) is not None:
            place = f"{path}.units[{twice[0]}].module: found {twice[2]!r}"
            return f"{place} once more, expected each module once: take one out"
        for index, unit in enumerate(self.units):
            inside = next((other.module for other in self.units if contains(other.module, unit.module)), None)
            if inside is not None:
                place = f"{path}.units[{index}].module: found {unit.module!r}"
                return f"{place}, a part of the unit {inside!r}, expected modules apart: take one out"
        return None

    @property
    def summary(self) -> str:
        """Return the units in words."""
        numel = sum(weight.numel for weight in self.weights)
        total_us = sum(unit.forward_us + unit.backward_us for unit in self.units)
        return (
            f"{pluralize(len(self.units), 'unit')} for FSDP2: {numel * self.element_bytes / 2**20:.1f} MiB of "
            f"parameters, {sum(unit.activation_bytes for unit in self.units) / 2**20:.1f} MiB of activations, "
            f"{total_us / 1e3:.2f} ms of forward and backward"
        )
