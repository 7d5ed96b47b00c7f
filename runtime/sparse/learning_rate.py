"""The learning rate, for residuals in units of updates (α·g): Algorithm 1 of LAGS-SGD (Shi et al., ECAI 2020).

With a constant rate they are residuals of gradients. Where the rate falls (cosine), an old residual counts with the
larger rate of its step; where it rises (warm-up), with the smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import torch

from runtime.core.options import ResidualUnit
from runtime.errors import InputError

NEAR = 1e-6
"""Relative difference of factors that are the same, but for rounding."""


class LearningRate:
    """The rate of optimizers whose groups change theirs by one factor, as a share of the first one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._first: list[float] = []
        """First rates of the groups; empty until one is above 0."""

    def __call__(self) -> float:
        """Return present rate / first rate; 0 before there is one. Raises InputError where groups change unlike."""
        rates = [float(group["lr"]) for one in self._optimizers for group in one.param_groups]
        if not self._first and not any(rates):
            return 0.0
        self._first = self._first or rates
        known = list(zip(rates, self._first, strict=False))
        shares = [rate / first for rate, first in known if first > 0.0]
        share = max(shares)
        if share - min(shares) > NEAR * share or any(rate > 0.0 for rate, first in known if first == 0.0):
            raise InputError(
                f'residual_unit="update": found learning rates {rates} after {self._first}, expected all groups to '
                f'change theirs by one factor; schedule them alike, or attach with residual_unit="gradient"'
            )
        if share > 0.0:  # groups that came later
            self._first += [rate / share for rate in rates[len(self._first) :]]
        return share


def check_residual_unit(unit: object, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """Return why residuals cannot have this unit, if so."""
    if unit not in get_args(ResidualUnit):
        return f"residual_unit: found {unit!r}, expected one of {', '.join(map(repr, get_args(ResidualUnit)))}"
    if unit == "gradient" or (optimizers and all("lr" in group for one in optimizers for group in one.param_groups)):
        return None
    return 'residual_unit: found "update" without an optimizer that has a learning rate; give one, or use "gradient"'


def learning_rate(unit: ResidualUnit, optimizers: Sequence[torch.optim.Optimizer]) -> Callable[[], float] | None:
    """Return what residuals in this unit follow; None: nothing."""
    return LearningRate(optimizers) if unit == "update" else None
