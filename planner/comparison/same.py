"""Whether exact plans train as DDP does: the weights after the first step of their blocks, and the losses of all steps.

Blocks begin with the same weights, batches and random states. After one step two ways to sum the same gradients differ
by no more than rounding, which later steps multiply; a gradient that was not averaged differs by about its own length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from planner.comparison.variants import BEST_DDP, DDP

if TYPE_CHECKING:
    from planner.comparison.measure import Measured

TOLERANCE = 0.01
"""Distance of the first update of a parameter from DDP's that is always allowed, as a share of its length."""

ROUNDING = 4.0
"""Distance that is allowed as well, in √ε of the parameter's dtype: the effect of rounding, and of an optimizer that
divides by the gradient's size, on sums that were taken in another order."""


LOSS_TOLERANCE = 1e-3
"""Relative difference of losses that is allowed."""

SURE_STEPS = 3
"""Number of first losses that are compared on more than two ranks: sums may be taken in another order there, and
training multiplies their differences. DDP itself, with other buckets, ends with other losses."""

NOISE = 3.0
"""Factor by which others may differ more than DDP's own blocks do."""


@dataclass(frozen=True)
class Deviation:
    """The parameter whose first update is furthest from DDP's."""

    name: str
    share: float
    """Distance as a share of the length of DDP's update."""
    allowed: float

    @property
    def ratio(self) -> float:
        """Distance over what is allowed; more than 1 is more than rounding."""
        return self.share / self.allowed


class FirstStep:
    """The first step of the first block of plain DDP, and how far those of others are from it."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._start: list[Tensor] | None = None
        self._reached: list[Tensor] | None = None
        self._lengths: list[float] = []

    def begin(self) -> None:
        """Keep the weights before DDP's first step."""
        self._start = [parameter.detach().clone() for parameter in self._parameters.values()]

    def take_ddp(self) -> None:
        """Keep the weights after DDP's first step."""
        assert self._start is not None
        self._reached = [parameter.detach().clone() for parameter in self._parameters.values()]
        self._lengths = [_length(now - before) for now, before in zip(self._reached, self._start, strict=True)]
        self._start = None

    @property
    def taken(self) -> bool:
        return self._reached is not None

    def compare(self) -> Deviation:
        """Return the parameter that is furthest from DDP's, relative to how far it may be."""
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


@dataclass(frozen=True)
class Training:
    """The result of the judgement."""

    same: dict[str, bool | None]
    """Whether it is the same training, by exact plan; None if that cannot be told."""
    differences: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Difference:
    """A difference between a block and the first one of plain DDP."""

    step: int
    """Number of the step, from 1."""
    ratio: float
    """Distance over what is allowed; more than 1 is more than rounding."""
    words: str


def judge_training(measured: Sequence[Measured]) -> Training:
    """Hold every exact plan against DDP, and DDP against itself, from what each rank saw."""
    sure = SURE_STEPS if len(measured) > 2 else None
    variants = [record.variant for record in measured[0].records]
    own = [
        difference
        for index, one in enumerate(variants)
        if one.name == DDP or one.name.startswith(BEST_DDP)
        for difference in _differences(measured, index, sure)
    ]
    plans = {
        one.name: list(_differences(measured, index, sure))
        for index, one in enumerate(variants)
        if one.kind == "plan" and one.exact
    }
    doubt = max((one for one in own if one.step == 1), key=lambda one: one.ratio, default=None)
    if doubt is not None and doubt.ratio > 1.0:
        return Training(
            same=dict.fromkeys(plans),
            doubts=(
                f"cannot tell whether training is the same with {', '.join(plans)} as with DDP: two blocks of DDP "
                f"itself, from the same weights, batches and random states, differ ({doubt.words}); what is trained "
                f"draws from a generator of its own, or keeps something from step to step",
            ),
        )
    same: dict[str, bool | None] = {}
    differences = []
    for name, found in plans.items():
        # How far blocks of DDP are apart up to a step.
        noise = {one.step: max((o.ratio for o in own if o.step <= one.step), default=0.0) for one in found}
        real = [one for one in found if one.ratio > max(1.0, NOISE * noise[one.step])]
        same[name] = None if not found else not real
        if real:
            first = min(real, key=lambda one: (one.step, -one.ratio))
            differences.append(f"NOT THE SAME TRAINING: {name}: {first.words}; do not train with it, and report it")
    return Training(same=same, differences=tuple(differences))


def _differences(measured: Sequence[Measured], index: int, sure: int | None) -> Iterator[_Difference]:
    """Yield the differences of all blocks of one variant on all ranks; losses of the first `sure` steps only."""
    for rank, seen in enumerate(measured):
        record = seen.records[index]
        for deviation in record.deviations:
            yield _Difference(
                1,
                deviation.ratio,
                f"on rank {rank} the first update of {deviation.name} is off by {deviation.share:.1%} of its length, "
                f"expected {deviation.allowed:.0%} at most",
            )
        reference = next(one for one in seen.records if one.variant.name == DDP)
        for losses in record.losses:
            for step, (found, expected) in enumerate(zip(losses[:sure], reference.losses[0], strict=False), start=1):
                if found is not None and expected is not None:
                    ratio = abs(found - expected) / (LOSS_TOLERANCE * max(abs(expected), 1e-5))
                    if not (math.isfinite(found) and math.isfinite(expected)):
                        ratio = 0.0 if repr(found) == repr(expected) else math.inf
                    yield _Difference(
                        step,
                        ratio,
                        f"on rank {rank} the loss was {found:.6g} in step {step} of a block, DDP's {expected:.6g}",
                    )
