"""LAMB: layer-wise adaptive moments, for training with large batches.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 Minutes", ICLR 2020 (arXiv
1904.00962), Algorithm 2, with φ(z) = z.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runtime.optimizers.layerwise import Batch, LayerwiseOptimizer, check_range


class LAMB(LayerwiseOptimizer):
    """Adam whose step has, in each layer, a length in proportion to the layer's weights.

    m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²;  r = m̂ / (√v̂ + eps) + weight_decay · w;  w ← w − lr · ‖w‖/‖r‖ · r.
    The ratio is 1 in layers that are not adapted, and where a norm is 0.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        adapt: bool = True,
        exclude_1d: bool = True,
    ) -> None:
        """Take options, each of which may differ between parameter groups.

        Args:
            params: parameters, named ones, or groups of them.
            lr: the global learning rate.
            betas: how fast both moments forget.
            eps: keeps the root from zero.
            weight_decay: λ of the paper.
            bias_correction: m̂ = m/(1−β1ᵗ), v̂ = v/(1−β2ᵗ); False: as they are.
            adapt: False: plain AdamW.
            exclude_1d: scalars and vectors (biases, normalization layers) are neither adapted nor decayed.

        Raises:
            InputError: an option is out of its range.
        """
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
            "adapt": adapt, "exclude_1d": exclude_1d,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_range("LAMB: lr", group["lr"], 0.0)
        for name, beta in zip(("first", "second"), group["betas"], strict=True):
            check_range(f"LAMB: the {name} of betas", beta, 0.0, 1.0, open_end=True)
        check_range("LAMB: eps", group["eps"], 0.0)
        check_range("LAMB: weight_decay", group["weight_decay"], 0.0)

    def _update(self, batches: list[Batch], layers: list[Tensor], dtype: torch.dtype) -> None:
        # A rank's own share first, so that its norms are sent while it does the rest.
        updates: dict[Tensor, Tensor] = {}
        for batch in batches:
            if batch.adapted:
                self._add_updates(updates, batch, {p for p in batch.parameters if self._norms.mine(p, dtype)})
        wait = self._norms.start(layers, {p: (p, update) for p, update in updates.items()}, dtype)
        for batch in batches:
            self._add_updates(updates, batch, {p for p in batch.parameters if p not in updates})
        norms, begin = wait(), 0
        for batch in batches:
            if not batch.adapted:
                torch._foreach_mul_(steps := [updates[p] for p in batch.parameters], batch.group["lr"])
                torch._foreach_sub_(batch.parameters, steps)
                continue
            end = begin + len(batch.parameters)
            weights, lengths = norms[begin:end].unbind(1)
            ratios = torch.where((weights > 0.0) & (lengths > 0.0), weights / lengths, 1.0)
            rates = list((ratios * batch.group["lr"]).unbind())
            torch._foreach_addcmul_(batch.parameters, [updates[p] for p in batch.parameters], rates, value=-1.0)
            begin = end

    def _add_updates(self, updates: dict[Tensor, Tensor], batch: Batch, chosen: set[Tensor]) -> None:
        """Add r of the chosen parameters of a batch, whose moments move by one step."""
        pairs = [(p, g) for p, g in zip(batch.parameters, batch.gradients, strict=True) if p in chosen]
        if not pairs:
            return
        parameters, gradients = (list(column) for column in zip(*pairs, strict=True))
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = 0
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["step"] += 1
        first, second = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        beta1, beta2 = batch.group["betas"]
        torch._foreach_lerp_(first, gradients, 1.0 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, value=1.0 - beta2)
        below = list(torch._foreach_sqrt(second))
        if batch.group["bias_correction"]:
            torch._foreach_div_(below, [(1.0 - beta2 ** state["step"]) ** 0.5 for state in states])
        torch._foreach_add_(below, batch.group["eps"])
        if batch.group["bias_correction"]:
            torch._foreach_mul_(below, [1.0 - beta1 ** state["step"] for state in states])
        found = list(torch._foreach_div(first, below))
        if batch.weight_decay:
            torch._foreach_add_(found, parameters, alpha=batch.weight_decay)
        updates.update(zip(parameters, found, strict=True))
