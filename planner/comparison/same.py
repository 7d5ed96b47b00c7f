"""Whether variants train alike: the weights after the first step of their blocks, held against those of plain DDP.

Blocks begin with the same weights, batches and random states. After one step two ways to sum the same gradients differ
by no more than rounding, which later steps multiply; a gradient that was not averaged differs by about its own length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

TOLERANCE = 0.01
"""How far the first update of a parameter may be from DDP's, as a share of its length, at the least."""

ROUNDING = 4.0
"""… and this times √ε of the parameter's dtype: what rounding to it, and an optimizer that divides by the gradient's
size, make of sums that were taken in another order."""


@dataclass(frozen=True)
class Deviation:
    """The parameter whose first update is furthest from DDP's."""

    name: str
    share: float
    """Of the length of DDP's update."""
    allowed: float

    @property
    def ratio(self) -> float:
        """More than 1 is more than rounding."""
        return self.share / self.allowed


class FirstStep:
    """The first step of the first block of plain DDP, and how far those of others are from it."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._start: list[Tensor] | None = None
        self._reached: list[Tensor] | None = None
        self._lengths: list[float] = []

    def begin(self) -> None:
        """DDP's first step comes next: weights are kept, to tell what it adds to them."""
        self._start = [parameter.detach().clone() for parameter in self._parameters.values()]

    def take_ddp(self) -> None:
        """It is done."""
        assert self._start is not None
        self._reached = [parameter.detach().clone() for parameter in self._parameters.values()]
        self._lengths = [_length(now - before) for now, before in zip(self._reached, self._start, strict=True)]
        self._start = None

    @property
    def taken(self) -> bool:
        """Whether there is something to hold others against."""
        return self._reached is not None

    def compare(self) -> Deviation:
        """The parameter that is furthest from DDP's, relative to how far it may be."""
        assert self._reached is not None
        rows = zip(self._parameters.items(), self._reached, self._lengths, strict=True)
        apart = [_apart(name, one.detach(), expected, length) for (name, one), expected, length in rows]
        return max(apart, key=lambda one: one.ratio)


def _apart(name: str, found: Tensor, expected: Tensor, length: float) -> Deviation:
    epsilon = torch.finfo(expected.dtype).eps
    allowed = max(TOLERANCE, ROUNDING * math.sqrt(epsilon))
    away = _length(found - expected)
    if not math.isfinite(away):
        both = not math.isfinite(_length(found)) and not math.isfinite(_length(expected))
        return Deviation(name, 0.0 if both else math.inf, allowed)
    # An update below the rounding of the weights says nothing about the gradient.
    least = epsilon * _length(expected)
    return Deviation(name, 0.0 if away == 0.0 else away / max(length, least, 1e-300), allowed)


def _length(values: Tensor) -> float:
    real = torch.view_as_real(values) if values.is_complex() else values
    return float(torch.linalg.vector_norm(real.reshape(-1), dtype=torch.float64))
