"""Momentum that the runtime adds up itself (momentum correction, Deep Gradient Compression), of what travels whole.

Buckets that select have a velocity of each rank's own gradients, which they select from (`runtime.sparse.lossy`). All
other gradients are averaged first; here the averages become velocities, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


class Momenta:
    """Velocities of averaged gradients, by name."""

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self.velocities: dict[str, Tensor] = {}
        """Shapes and dtypes as the gradients'."""

    def add(self, gradients: Mapping[str, Tensor], finite: Tensor) -> None:
        """Makes gradients velocities, in place; they count from now on if `finite` (0-d) is true."""
        if not gradients:
            return
        averages = list(gradients.values())
        before = [self.velocities.get(name) for name in gradients]
        known = [torch.zeros_like(gradient) if v is None else v for v, gradient in zip(before, averages, strict=True)]
        following = list(torch._foreach_mul(known, self.momentum))
        torch._foreach_add_(following, averages)
        torch._foreach_copy_(averages, following)
        if finite.device.type != "cpu":
            following = [torch.where(finite, new, old) for new, old in zip(following, known, strict=True)]
        elif not finite:
            following = known
        self.velocities.update(zip(gradients, following, strict=True))


@dataclass(frozen=True)
class Owed:
    """What one gradient's past has yet to do to its parameter, on this rank; sums over ranks count."""

    residual: Tensor
    velocity: Tensor
    """This rank's share."""
    momentum: float
    selected: bool
    """Whether the residual is of velocities; else it is of gradients."""

    def total(self) -> Tensor:
        """All that it would come to if no gradient followed."""
        later = self.momentum / (1.0 - self.momentum)
        residual = self.residual if self.selected else self.residual / (1.0 - self.momentum)
        return residual + later * self.velocity

    def rest(self, velocity: Tensor, momentum: float, *, selected: bool) -> Tensor:
        """The residual that owes as much beside another velocity and momentum."""
        if (momentum, selected) == (self.momentum, self.selected) and velocity is self.velocity:
            return self.residual
        left = self.total() - velocity * (momentum / (1.0 - momentum))
        return left if selected else left * (1.0 - momentum)
