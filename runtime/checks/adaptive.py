"""Optimizers that selected gradients do not suit: those that divide what comes by a measure of its own size.

Error feedback sends in one step what has gathered over many. SGD moves a weight by all of it; Adam and the like move it
about as far as in any other step, so most of what has gathered is lost, and no residual shows it.
"""

from __future__ import annotations

import warnings

import torch

from runtime.errors import AccuracyWarning
from runtime.optimizers import LAMB
from runtime.plan import Plan

ADAPTIVE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.Muon, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
    torch.optim.Rprop, LAMB,
)  # fmt: skip
"""Those of torch and of this package, and what is derived from them."""


def is_adaptive(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether steps hardly depend on the size of gradients."""
    return isinstance(optimizer, ADAPTIVE)


def warn_of_selection(plan: Plan, optimizer: torch.optim.Optimizer | None) -> None:
    """Says so where a plan selects elements for such an optimizer."""
    selected = sum(bucket.collective == "sparse" for bucket in plan.buckets)
    if selected and is_adaptive(optimizer):
        warnings.warn(
            f"{selected} of {len(plan.buckets)} buckets send selected elements, and {type(optimizer).__name__} divides "
            f"gradients by their own size, so that what was held back is mostly lost when it comes; expect a worse "
            f"model after the same steps (docs/lags.md has figures): use torch.optim.SGD, or an exact plan",
            AccuracyWarning,
            stacklevel=3,
        )
