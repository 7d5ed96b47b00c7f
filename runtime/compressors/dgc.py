"""What DGC (Lin et al., ICLR 2018) adds to error feedback: momentum correction, its masking, and warm-up of density."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import InputError


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


def warmup_density(step: int, steps_per_stage: int, target: float, start: float = 0.25) -> float:
    """The density of a step while training begins: start, start², start³, …, and from then on `target`.

    With 0.25 these are the paper's 25 %, 6.25 %, 1.5625 %, 0.4 %, then 0.1 %.
    """
    if steps_per_stage < 1 or step < 0:
        raise InputError(f"warm-up: found step {step} of stages of {steps_per_stage} steps; expected 0 and 1 or more")
    if not (0.0 < target <= 1.0 and 0.0 < start < 1.0):
        raise InputError(
            f"warm-up: found the densities {start} to {target}; expected a start between 0 and 1 and a target of more "
            f"than 0 and at most 1: correct them"
        )
    density: float = start ** (1 + step // steps_per_stage)
    return max(target, density)
