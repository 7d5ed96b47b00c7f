"""The anchor: the weights of a fragment's last round, and the momentum of the outer optimizer, by message.

Of a dense bucket each worker owns one part of both, as of the global weights in SSD-SGD: workers send their weights to
the owners, whose outer step gives the new weights. A compressed bucket needs the whole anchor on every worker, for
pseudo-gradients are encoded, and every worker decodes their mean and takes the whole outer step.
Source: DiLoCo (Douillard et al., arXiv 2311.08105), Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from runtime.core.buckets import Message, Part
from runtime.plan import OuterOptimizer


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of anchors of weights of this dtype: float32 of those in 16 bits."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Anchor(Part):
    """One owner's part of the anchor of one message, and of the outer momentum."""

    def __init__(self, message: Message, rank: int, ranks: int, optimizer: OuterOptimizer) -> None:
        """Make zeros; `rank` is this owner's number, of `ranks`."""
        super().__init__(message, rank, ranks)
        self._optimizer = optimizer
        self.weights = message.flat.new_zeros(self.share, dtype=wide_dtype(message.flat.dtype))
        """Shape (share,)."""
        self.momentum = torch.zeros_like(self.weights) if optimizer.momentum else None
        """Momentum buffer of the outer optimizer. Shape (share,); None: it has no momentum."""

    def flatten(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the tensors of the message's parameters, by name, as one vector. Shape (ranks · share,)."""
        whole = torch.zeros(self.ranks * self.share, dtype=dtype, device=self.message.flat.device)
        for name, view in self.views(whole).items():
            view.copy_(tensors[name])
        return whole

    def own(self, whole: Tensor) -> Tensor:
        """Return this owner's part of a vector of all parts."""
        return whole[self.rank * self.share : (self.rank + 1) * self.share]

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin at these weights, by name, which are the same on all workers."""
        self.weights.copy_(self.own(self.flatten(tensors, self.weights.dtype)))

    def step(self, pseudo_gradient: Tensor) -> None:
        """Take an outer step, as torch.optim.SGD(lr, momentum, nesterov=True) does.

        Args:
            pseudo_gradient: mean over workers of anchor − weights. Shape (share,).
        """
        update, momentum = pseudo_gradient, self._optimizer.momentum
        if self.momentum is not None:
            self.momentum.mul_(momentum).add_(pseudo_gradient)
            update = torch.add(pseudo_gradient, self.momentum, alpha=momentum)
        self.weights.sub_(update, alpha=self._optimizer.lr)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs of it; no copies."""
        return {"anchor": self.weights} | ({} if self.momentum is None else {"momentum": self.momentum})
