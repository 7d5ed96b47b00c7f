"""What DGC (Lin et al., ICLR 2018) adds to error feedback: momentum correction, its masking, and warm-up of density."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import InputError

START, STAGES = 0.25, 4
"""The first density of the warm-up, whose powers follow, and how many."""


@dataclass(frozen=True, kw_only=True)
class MomentumCorrection:
    """Momentum before selection: what is selected from adds up velocities instead of gradients.

    The optimizer's own momentum has to be off. As with residuals the new velocity goes to a second buffer, which the
    caller commits or discards:

        correction.correct(gradient, velocity, new_velocity)
        values, indices = compressor.compress(new_velocity, residual, new_residual, step)
        correction.mask(new_velocity, indices)
    """

    momentum: float
    masking: bool = True
    """Whether elements that are sent lose their velocity, so that stale momentum does not carry them on."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise InputError(f"momentum: found {self.momentum}, expected at least 0 and less than 1: correct it")

    def correct(self, gradient: Tensor, velocity: Tensor, new_velocity: Tensor) -> None:
        """Writes momentum · velocity + gradient into `new_velocity`; the others stay as they are."""
        torch.mul(velocity, self.momentum, out=new_velocity).add_(gradient)

    def mask(self, new_velocity: Tensor, indices: Tensor) -> None:
        """Takes the velocity from what is sent, where `masking` says so."""
        if self.masking:
            new_velocity[indices.long()] = 0.0


def warmup_density(step: int, warmup_steps: int) -> float:
    """The least density of a step while training begins: the paper's 25 %, 6.25 %, 1.5625 %, 0.39 %; then 0."""
    if warmup_steps < 1 or step < 0:
        raise InputError(f"warm-up: found step {step} of {warmup_steps} steps; expected 0 or more, of 1 or more")
    return 0.0 if step >= warmup_steps else float(START ** (1 + step * STAGES // warmup_steps))
