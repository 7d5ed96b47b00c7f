"""The anchor: the weights of a fragment's last round, and the momentum of the outer optimizer, by message.

Each worker owns one part of the momentum. Of a dense bucket it owns one part of the anchor, too, as of the global
weights in SSD-SGD: workers send their weights to the owners, whose outer step gives the new weights. A compressed
bucket needs the whole anchor on every worker: pseudo-gradients are encoded, and what comes back is what the anchor
moves by. Source: DiLoCo (Douillard et al., arXiv 2311.08105), Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from runtime.core.buckets import Message, Part
from runtime.plan import OuterOptimizer

MOMENTUM = "momentum"


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of anchors of weights of this dtype: float32 of those in 16 bits."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Anchor(Part):
    """One owner's part of the outer momentum of one message, and its part of the anchor, or all of it."""

    def __init__(
        self, message: Message, rank: int, ranks: int, optimizer: OuterOptimizer, share: int | None = None, *,
        whole: bool = False,
    ) -> None:  # fmt: skip
        """Make zeros.

        Args:
            message: of the bucket whose weights these are.
            rank: this owner's number.
            ranks: number of owners.
            optimizer: takes the outer steps.
            share: elements that each owns; by default as few as there can be.
            whole: whether this owner has the whole anchor.
        """
        super().__init__(message, rank, ranks, share)
        self._optimizer, self._whole = optimizer, whole
        elements, dtype = self.numel if whole else self.share, wide_dtype(message.flat.dtype)
        self.weights = message.flat.new_zeros(elements, dtype=dtype)
        """Shape (share,), or (numel,) of the whole anchor."""
        self.momentum = message.flat.new_zeros(self.share, dtype=dtype) if optimizer.momentum else None
        """Momentum buffer of the outer optimizer. Shape (share,); None: it has no momentum."""

    def flatten(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the tensors of the message's parameters, by name, as one vector. Shape (ranks · share,)."""
        whole = torch.empty(self.ranks * self.share, dtype=dtype, device=self.message.flat.device)
        whole[self.numel :] = 0.0
        for name, view in self.views(whole).items():
            view.copy_(tensors[name])
        return whole

    def own(self, whole: Tensor) -> Tensor:
        """Return this owner's part of a vector of all parts."""
        return whole[self.rank * self.share : (self.rank + 1) * self.share]

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin at these weights, by name, which are the same on all workers."""
        vector = self.flatten(tensors, self.weights.dtype)
        self.weights.copy_(vector[: self.numel] if self._whole else self.own(vector))

    def _update(self, pseudo_gradient: Tensor) -> Tensor:
        update, momentum = pseudo_gradient, self._optimizer.momentum
        if self.momentum is not None:
            kept = self.momentum[: len(pseudo_gradient)].mul_(momentum).add_(pseudo_gradient)
            update = torch.add(pseudo_gradient, kept, alpha=momentum)
        return update

    def step(self, pseudo_gradient: Tensor) -> None:
        """Take an outer step, as torch.optim.SGD(lr, momentum, nesterov=True) does.

        Args:
            pseudo_gradient: mean over workers of anchor − weights. Shape (share,).
        """
        self.weights.sub_(self._update(pseudo_gradient), alpha=self._optimizer.lr)

    def movement(self, pseudo_gradient: Tensor) -> Tensor:
        """Return what an outer step takes from this owner's part of the weights; shapes as for `step`, or shorter."""
        return self._update(pseudo_gradient) * self._optimizer.lr

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs of it; no copies."""
        return {"anchor": self.weights} | ({} if self.momentum is None else {MOMENTUM: self.momentum})

    def load(self, own: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]] | None = None) -> None:
        """Continue from what owners have saved.

        Args:
            own: this owner's `tensors`, of as many owners.
            parts: those of all owners, where there was another number of them.
        """
        for key, tensor in self.tensors().items():
            in_parts = self.ranks > 1 and (key == MOMENTUM or not self._whole)
            if parts is None or not in_parts:
                tensor.copy_(own[key])
                continue
            vector = torch.cat([part[key] for part in parts])[: self.numel]
            tensor.copy_(self.own(nn.functional.pad(vector, (0, self.ranks * self.share - self.numel))))
