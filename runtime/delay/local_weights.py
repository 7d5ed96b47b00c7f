"""A rank's own weights while it is delayed, and how it updates them between two pulls of the global ones: GLU.

Source: SSD-SGD (Xu et al., arXiv 2012.05396), Eq. 8 and 9.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runtime.delay.checkpoint import clones, copy_all, kept_on_host
from runtime.delay.server import Rates
from runtime.modes.chunks import chunks
from runtime.plan import DelaySpec

Gradients = Mapping[int, Tensor]
"""Gradients by `id` of the parameter."""


class LocalWeights:
    """The parameters between two pulls."""

    def __init__(
        self,
        spec: DelaySpec,
        parameters: Mapping[str, nn.Parameter],
        groups: Sequence[Sequence[tuple[str, nn.Parameter]]],
    ) -> None:
        """Keep the parameters by name, and with their names by group of the optimizer."""
        self._spec, self._parameters, self._groups = spec, parameters, groups
        self._before: dict[str, Tensor] = {}
        self._aside: tuple[dict[str, Tensor], list[Tensor]] | None = None
        """The rank's own weights and buffers, while the model has others."""

    def begin(self) -> None:
        # All ranks have the global weights now.
        self._before = {name: kept_on_host(parameter) for name, parameter in self._parameters.items()}

    def end(self) -> None:
        self._before = {}

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Make pulled weights, by name, the rank's own."""
        copy_all([self._parameters[name] for name in weights], list(weights.values()))

    @contextmanager
    def aside(self, buffers: Sequence[Tensor]) -> Iterator[None]:
        """Allow other values of parameters and buffers inside; `state` returns the rank's own, which are restored."""
        before, own = self._aside, (clones(self._parameters), [buffer.detach().clone() for buffer in buffers])
        self._aside = before or own
        try:
            yield
        finally:
            self._aside = before
            self.take(own[0])
            copy_all(buffers, own[1])

    def overwrite(self, weights: Mapping[str, Tensor]) -> None:
        """Make pulled weights `pre_weight`: after the local update that took them."""
        for name, weight in weights.items():
            self._before[name].copy_(weight, non_blocking=True)

    def update(self, gradients: Gradients, rates: Rates, lr_sums: Sequence[float]) -> None:
        """Update with this worker's gradients; `lr_sums`: of the last k steps' learning rates, of each group."""
        for group, values, lr_sum in zip(self._groups, rates, lr_sums, strict=True):
            found = [(name, p, gradients[id(p)]) for name, p in group if id(p) in gradients]
            if found:
                weights = [parameter.detach() for _, parameter, _ in found]
                before = [self._before[name].to(p.device, non_blocking=True) for name, p, _ in found]
                glu(self._spec, weights, [gradient for _, _, gradient in found], before, values, lr_sum)

    def state(self, buffers: Sequence[Tensor]) -> dict[str, Any]:
        """Return copies: what `load` continues from, and the rank's own `buffers`."""
        own, own_buffers = self._aside or (self._parameters, buffers)
        return {
            "weights": clones(own), "buffers": [buffer.detach().clone() for buffer in own_buffers],
            "pre_weight": clones(self._before),
        }  # fmt: skip

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's `state`."""
        for name, before in state["pre_weight"].items():
            self._before[name].copy_(before)
        self.take(state["weights"])


def glu(
    spec: DelaySpec,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    before: Sequence[Tensor],
    rates: Mapping[str, Any],
    lr_sum: float,
) -> None:
    """Update with the global gradient, in place: w ← w − lr_loc·(α·g + wd·w + β·grad_sync), lr_loc = local_lr_scale·lr.

    grad_sync = (pre_weight − w)·(1 − momentum) / (lr·k) is the mean global gradient that a pull shows, and what the
    local steps since then come to. The paper's Eq. 8 prints a plus sign, with the sign of descent inside.

    Args:
        spec: α, β and the scale of the learning rate.
        weights: this rank's, of the parameters of one of the optimizer's groups; changed in place.
        gradients: this rank's own, of its last backward; one for each weight, in its shape.
        before: `pre_weight`, the global weights of a pull before; one for each weight.
        rates: the group's hyperparameters now.
        lr_sum: of the learning rates of the k steps that led from `before` to the global weights after them (lr·k); 0
            leaves grad_sync out.
    """
    decay, local_lr = rates["weight_decay"], float(rates["lr"]) * spec.local_lr_scale
    for own, gradient, pulled in chunks(weights, gradients, before):
        direction = torch._foreach_mul(gradient, spec.alpha)
        if decay:
            torch._foreach_add_(direction, own, alpha=decay)
        if lr_sum > 0.0:
            apart = torch._foreach_sub(pulled, own)
            torch._foreach_mul_(apart, (1.0 - rates["momentum"]) / lr_sum)
            torch._foreach_add_(direction, apart, alpha=spec.beta)
        torch._foreach_add_(own, direction, alpha=-local_lr)
