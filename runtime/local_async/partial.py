"""Backward for a part of the parameters, which stops there: what updaters of LPP-SGD do in every other minibatch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.errors import InputError

_REENTRANT = "CheckpointFunctionBackward"
"""The node of reentrant activation checkpoints, whose insides hang on a whole backward."""


def partial_backward(loss: Tensor, block: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Compute the gradients of a loss, a scalar, with respect to the parameters of a block, and no other parameter's:
    None of those that the loss does not depend on.

    Autograd runs the nodes between the loss and the block only. It computes nothing below the block (nearer to the
    input), and above it gradients of inputs, none of weights. No `.grad` is written, and the graph is freed. Raises
    InputError: the model uses reentrant activation checkpoints.
    """
    if not block:
        return ()
    cause = None
    gradients: tuple[Tensor | None, ...] = (None,)
    try:
        gradients = torch.autograd.grad(loss, list(block), allow_unused=True)
    except RuntimeError as error:
        if not is_reentrant(loss):
            raise
        cause = error
    # Parameters inside of a checkpoint are not in the graph.
    if any(gradient is None for gradient in gradients) and is_reentrant(loss):
        raise InputError(
            "the model uses reentrant activation checkpoints, which know whole backwards only; expected none of them "
            "with a plan that has blocks: checkpoint(..., use_reentrant=False), or a plan without blocks"
        ) from cause
    return gradients


def is_reentrant(loss: Tensor) -> bool:
    """Tell whether the loss was computed through a reentrant activation checkpoint."""
    seen: set[object] = set()
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if node.name() == _REENTRANT:
            return True
        seen.add(node)
        left += [following for following, _ in node.next_functions]
    return False
