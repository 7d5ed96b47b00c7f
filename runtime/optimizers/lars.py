"""LARS: layer-wise adaptive rate scaling, for training with large batches.

Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017 (arXiv 1708.03888), Algorithm
1; CommLib (Shi et al., MLSys 2021, arXiv 2010.10458) gives the layer's rate as Eq. 11.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runtime.errors import InputError
from runtime.optimizers.layerwise import Batch, LayerwiseOptimizer, check_range


class LARS(LayerwiseOptimizer):
    """Momentum SGD whose rate is, in each layer, in proportion to the layer's weights over its gradient.

    λ = trust_coefficient · ‖w‖ / (‖g‖ + weight_decay · ‖w‖);  v ← momentum · v + lr · λ · (g + weight_decay · w);
    w ← w − v. λ is 1 in layers that are not adapted, and where it is not defined (‖w‖ or the denominator is 0).

    As in the paper the rate is inside the velocity, so that a change of `lr` acts on new gradients only; with constant
    `lr` this is what `torch.optim.SGD` does with λ · (g + weight_decay · w). With Nesterov's momentum the step is
    momentum · v + lr · λ · (g + weight_decay · w), with the new v.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
        adapt: bool = True,
        exclude_1d: bool = True,
    ) -> None:
        """Take options, each of which may differ between parameter groups.

        Args:
            params: parameters, named ones, or groups of them.
            lr: the global learning rate.
            momentum: 0 keeps no velocity.
            weight_decay: β of the paper.
            nesterov: Nesterov's momentum.
            trust_coefficient: η of the paper, γ of Eq. 11.
            adapt: False: plain SGD.
            exclude_1d: scalars and vectors (biases, normalization layers) are neither adapted nor decayed.

        Raises:
            InputError: an option is out of its range.
        """
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov,
            "trust_coefficient": trust_coefficient, "adapt": adapt, "exclude_1d": exclude_1d,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_range("LARS: lr", group["lr"], 0.0)
        check_range("LARS: momentum", group["momentum"], 0.0, 1.0, open_end=True)
        check_range("LARS: weight_decay", group["weight_decay"], 0.0)
        check_range("LARS: trust_coefficient", group["trust_coefficient"], 0.0)
        if group["nesterov"] and group["momentum"] == 0.0:
            raise InputError("LARS: found nesterov without momentum, expected momentum above 0; set it")

    def _update(self, batches: list[Batch], layers: list[Tensor], dtype: torch.dtype) -> None:
        gradients = {p: (p, g) for batch in batches for p, g in zip(batch.parameters, batch.gradients, strict=True)}
        wait = self._norms.start(layers, gradients, dtype)
        velocities = [self._decayed_velocities(batch) for batch in batches]  # while norms are in flight
        norms, begin = wait(), 0
        for batch, velocity in zip(batches, velocities, strict=True):
            if not batch.adapted:
                _step(batch, velocity, None)
                continue
            end = begin + len(batch.parameters)
            weights, gradient_norms = norms[begin:end].unbind(1)
            below = gradient_norms + weights * batch.weight_decay
            defined = (weights > 0.0) & (below > 0.0)
            _step(batch, velocity, torch.where(defined, weights * batch.group["trust_coefficient"] / below, 1.0))
            begin = end

    def _decayed_velocities(self, batch: Batch) -> list[Tensor]:
        """Return momentum · v of each parameter; nothing without momentum."""
        momentum = batch.group["momentum"]
        if momentum == 0.0:
            return []
        velocities = []
        for parameter in batch.parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            velocities.append(state["momentum_buffer"])
        torch._foreach_mul_(velocities, momentum)
        return velocities


def _step(batch: Batch, velocities: list[Tensor], ratios: Tensor | None) -> None:
    """Update weights with velocities that are decayed already; `ratios`: λ by layer, shape (layers,), None for 1."""
    parameters, gradients, lr = batch.parameters, batch.gradients, batch.group["lr"]
    # lr · λ of each parameter, as scalar tensors on its device, so that the host does not wait for that.
    if ratios is not None:
        rates = list((ratios * lr).unbind())
    else:
        one = torch.as_tensor(lr, dtype=torch.float64 if parameters[0].dtype == torch.float64 else torch.float32)
        rates = [one.to(parameters[0].device)] * len(parameters)
    decays = [rate * batch.weight_decay for rate in rates] if batch.weight_decay else None
    if velocities and not batch.group["nesterov"]:
        torch._foreach_addcmul_(velocities, gradients, rates, value=1.0)
        if decays is not None:
            torch._foreach_addcmul_(velocities, parameters, decays, value=1.0)
        torch._foreach_sub_(parameters, velocities)
        return
    steps = list(torch._foreach_mul(gradients, rates))
    if decays is not None:
        torch._foreach_addcmul_(steps, parameters, decays, value=1.0)
    if velocities:
        torch._foreach_add_(velocities, steps)
        torch._foreach_sub_(parameters, velocities, alpha=batch.group["momentum"])
    torch._foreach_sub_(parameters, steps)
