"""Estimated times of Muon's Newton–Schulz for profiles of models that were measured with another optimizer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from planner.documents.profile import Gradient, OperatorProfile, OperatorShape, Profile
from runtime.errors import InputError

ITERATIONS = 5
RESULT_BYTES = 2
"""Bytes of an element of a result, in bfloat16."""


def flops(rows: int, columns: int) -> float:
    """Return the floating-point operations of Newton–Schulz: per iteration X·Xᵀ, its square, and a product with X."""
    short, long = sorted((rows, columns))
    return ITERATIONS * (4.0 * short**2 * long + 2.0 * short**3)


def hidden_matrix(gradient: Gradient, width: int) -> tuple[int, int] | None:
    """Return rows and columns of a parameter that Muon's authors would train by it: a matrix that is no embedding and
    no output layer; None for others. Where a profile has no matrix, one of its dimensions is the model's `width`.
    """
    name = gradient.name.lower()
    if any(part in name for part in APART):
        return None
    if gradient.matrix is not None:
        return gradient.matrix if min(gradient.matrix) > 1 else None
    rows, rest = divmod(gradient.numel, width)
    return (rows, width) if rest == 0 and 8 * rows >= width else None


APART = ("emb", "wte", "wpe", "head", "classifier", "cls", "decoder", "position", "pooler", "ln_", "norm", "bias")
"""Parts of names of parameters that AdamW updates."""


def with_newton_schulz(profile: Profile, share: float) -> Profile:
    """Return a profile whose hidden matrices Muon updates, with Newton–Schulz on every rank as a share of the step.

    Args:
        profile: a model's, whose gradients have matrices.
        share: of the step's compute, above 0 and below 1. Divided over shapes by FLOPs; the rest of the update stays.

    Raises:
        InputError: the model has no such matrices.
    """
    compute = profile.compute
    shapes: dict[tuple[int, int], list[str]] = {}
    # Biases and norms, of which there are most, have the width of the model.
    width = Counter(gradient.numel for gradient in compute.gradients).most_common(1)[0][0]
    for gradient in reversed(compute.gradients):
        if (matrix := hidden_matrix(gradient, width)) is not None:
            shapes.setdefault(matrix, []).append(gradient.name)
    if not shapes:
        raise InputError(f"{profile.model.name}: found no matrices of hidden layers, expected a model with some")
    total_us = share / (1.0 - share) * compute.step_us
    unit_us = total_us / sum(flops(*shape) * len(names) for shape, names in shapes.items())
    operator = OperatorProfile(
        optimizer="Muon", applied=True,
        shapes=tuple(
            OperatorShape(
                shape=shape, operator_us=flops(*shape) * unit_us, result_bytes=RESULT_BYTES * shape[0] * shape[1],
                parameters=tuple(names),
            )
            for shape, names in shapes.items()
        ),
        estimated=f"estimated: {share:.0%} of the step's compute, divided by FLOPs",
    )  # fmt: skip
    return replace(profile, compute=replace(compute, update_us=compute.update_us + total_us, operator=operator))
