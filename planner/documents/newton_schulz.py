"""Estimated times of Muon's Newton–Schulz for profiles of models that were measured with another optimizer. Torch-free.

Source: Keller Jordan, Muon (2024); `torch.optim.Muon`: five iterations in bfloat16, for matrices of hidden layers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from planner.documents.accelerators import ACCELERATORS, find_accelerator
from planner.documents.profile import Gradient, OperatorProfile, OperatorShape, OptimizerProfile, Profile
from planner.documents.shapes import OTHER
from runtime.errors import InputError

ITERATIONS = 5
RESULT_BYTES, STATE_BYTES = 2, 4
"""Bytes of an element of a result, in bfloat16; and of a moment, of which Muon has one and AdamW two."""
APART = (
    "emb", "wte", "wpe", "head", "classifier", "cls", "position", "pooler", "ln_", "norm", "bias", "conv", "experts",
)  # fmt: skip
"""Parts of names of parameters that AdamW updates."""
VECTORS = ("ln_", "norm", "bias")


def flops(rows: int, columns: int) -> float:
    """Return the floating-point operations of Newton–Schulz: per iteration X·Xᵀ, its square, and a product with X."""
    short, long = sorted((rows, columns))
    return ITERATIONS * (4.0 * short**2 * long + 2.0 * short**3)


def hidden_matrix(gradient: Gradient, width: int) -> tuple[int, int] | None:
    """Return rows and columns of a parameter that Muon's authors would train by it: a matrix that is no embedding and
    no output layer; None for others. Where a profile has no matrix, one of its dimensions is the model's `width`.
    """
    name = gradient.name.lower().replace("multihead", "")
    if any(part in name for part in APART):
        return None
    if gradient.matrix is not None:
        return gradient.matrix if min(gradient.matrix) > 1 else None
    rows, rest = divmod(gradient.numel, width)
    return (rows, width) if rest == 0 and 8 * rows >= width else None


def _width(profile: Profile) -> int:
    """Return the size of most biases and norms, which is the width of a transformer; 0 where most have others."""
    gradients = profile.compute.gradients
    sizes = [one.numel for one in gradients if any(part in one.name.lower() for part in VECTORS)]
    width, count = Counter(sizes).most_common(1)[0] if sizes else (0, 0)
    return width if 2 * count >= len(sizes) else 0


def with_newton_schulz(profile: Profile, share: float | None = None) -> Profile:
    """Return a profile whose hidden matrices Muon updates, and AdamW the rest, as every rank does.

    Args:
        profile: a transformer's; the rest of its update stays.
        share: of the step's compute that Newton–Schulz takes, above 0 and below 1, divided over shapes by FLOPs;
            default: FLOPs over a share of the accelerator's peak.

    Raises:
        InputError: the model has no such matrices, or its accelerator is not known.
    """
    compute, width = profile.compute, _width(profile)
    shapes: dict[tuple[int, int], list[str]] = {}
    for gradient in reversed(compute.gradients) if width else ():
        if (matrix := hidden_matrix(gradient, width)) is not None:
            shapes.setdefault(matrix, []).append(gradient.name)
    if not shapes:
        raise InputError(
            f"{profile.model.name}: found no matrices of hidden layers for Muon, expected a transformer; leave Muon out"
        )
    whole = sum(flops(*shape) * len(names) for shape, names in shapes.items())
    if share is None:
        unit_us, how = 1.0 / _flops_per_us(profile), "FLOPs over a share of the accelerator's peak"
    else:
        unit_us = share / (1.0 - share) * compute.step_us / whole
        how = f"{share:.0%} of the step's compute, divided by FLOPs"
    operator = OperatorProfile(
        optimizer="Muon", applied=True,
        shapes=tuple(
            OperatorShape(
                shape=shape, operator_us=flops(*shape) * unit_us, result_bytes=RESULT_BYTES * shape[0] * shape[1],
                parameters=tuple(names),
            )
            for shape, names in shapes.items()
        ),
        estimated=f"estimated: {how}",
    )  # fmt: skip
    before, elements = compute.optimizer, sum(rows * columns * len(of) for (rows, columns), of in shapes.items())
    state_bytes = None if before is None or before.state_bytes is None else before.state_bytes - STATE_BYTES * elements
    optimizer = OptimizerProfile(
        name="Muon, AdamW", adaptive=True, elementwise=False, unit="matrix", holds_all=True,
        matrices=operator.parameters, state_bytes=state_bytes,
    )  # fmt: skip
    update_us = compute.update_us + whole * unit_us
    return replace(
        profile, compute=replace(compute, update_us=update_us, operator=operator, optimizer=optimizer, norms=None)
    )


def _flops_per_us(profile: Profile) -> float:
    """Return the rate of matrix products on a profile's accelerator."""
    estimate, world = profile.compute.estimate, profile.world
    gpu = find_accelerator(world.accelerator, world.memory_bytes) if estimate is None else estimate.gpu
    if gpu is None:
        raise InputError(
            f"{profile.model.name}: found no accelerator whose rate is known, expected one for the time of Muon's "
            f"Newton–Schulz: one of {', '.join(ACCELERATORS)} in $.world.accelerator"
        )
    return ACCELERATORS[gpu].dense_flops * (OTHER if estimate is None else estimate.share_of(gpu)) / 1e6
