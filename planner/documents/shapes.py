"""Models by shape: parameters of an architecture, compute from FLOPs and a stated share of the peak. Torch-free.

Forward FLOPs are 2 for each multiply-add of matrices, convolutions and attention; backward is twice forward. A
gradient's share of backward is its weight's share of the FLOPs. Activations kept for backward are counted at 34 bytes
for each token and channel of a transformer block (Korthikanti et al. 2022; flash attention keeps no scores),
checkpoints at 2 bytes. The update moves 28 bytes for each parameter (bfloat16 weights and gradients, FP32 weights and
two moments).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.documents.accelerators import ACCELERATORS
from planner.documents.profile import (
    ComputeEstimate,
    ComputeProfile,
    Gradient,
    OptimizerProfile,
    Profile,
    ProfileWorld,
)
from runtime.errors import InputError
from runtime.plan import ModelReference

UPDATE_BYTES, UPDATE_SHARE = 28, 0.7
ACTIVATION_BYTES = 34
OTHER = 0.35


@dataclass(frozen=True)
class Weight:
    """One parameter: its FLOPs are of forward, for one sample."""

    name: str
    numel: int
    flops: float = 0.0


@dataclass(frozen=True)
class ModelShape:
    """A model, in forward order."""

    name: str
    weights: tuple[Weight, ...]
    parameters: int | None
    """As published, where it was; checked."""
    batch: int
    kept_bytes: float
    """Of one sample, for backward."""
    checkpoint_bytes: float
    efficiency: dict[str, float]
    """By accelerator: which share of its peak is reached."""
    source: str
    notes: tuple[str, ...]
    other_efficiency: float = OTHER
    """Of accelerators that are not listed."""


def transformer_weights(
    name: str, width: int, tokens: int, matrices: list[tuple[str, int, int]], vectors: list[tuple[str, int]],
    attention_width: int,
) -> Iterator[Weight]:  # fmt: skip
    """One block. `attention_width` is heads × head size; scores and values are credited to its first matrix."""
    for at, (which, rows, columns) in enumerate(matrices):
        extra = 4.0 * tokens * tokens * attention_width if at == 0 else 0.0
        yield Weight(f"{name}.{which}.weight", rows * columns, 2.0 * rows * columns * tokens + extra)
    for which, numel in vectors:
        yield Weight(f"{name}.{which}", numel)


def decoder(
    name: str, *, layers: int, width: int, hidden: int, heads: int, key_heads: int, vocabulary: int, tied: bool,
    tokens: int, batch: int, efficiency: dict[str, float], source: str, parameters: int | None = None,
    other_efficiency: float = OTHER,
) -> ModelShape:  # fmt: skip
    """Return a language model of Llama's architecture: gated feed-forward layers, no biases.

    Args:
        name: of the model.
        layers: transformer blocks.
        width: of the residual stream.
        hidden: width of feed-forward layers.
        heads: attention heads.
        key_heads: heads of keys and values.
        vocabulary: tokens that there are.
        tied: whether the embedding is also the output layer.
        tokens: of a sequence.
        batch: sequences per rank.
        efficiency: by accelerator, which share of its peak is reached.
        source: of sizes and shares.
        parameters: as published; checked.
        other_efficiency: of accelerators that are not listed.
    """
    keys = width // heads * key_heads
    matrices = [
        ("self_attn.q_proj", width, width), ("self_attn.k_proj", keys, width), ("self_attn.v_proj", keys, width),
        ("self_attn.o_proj", width, width), ("mlp.gate_proj", hidden, width), ("mlp.up_proj", hidden, width),
        ("mlp.down_proj", width, hidden),
    ]  # fmt: skip
    vectors = [("input_layernorm.weight", width), ("post_attention_layernorm.weight", width)]
    head = 2.0 * vocabulary * width * tokens
    weights = [Weight("model.embed_tokens.weight", vocabulary * width, head if tied else 0.0)]
    for layer in range(layers):
        weights += transformer_weights(f"model.layers.{layer}", width, tokens, matrices, vectors, width)
    weights.append(Weight("model.norm.weight", width))
    if not tied:
        weights.append(Weight("lm_head.weight", vocabulary * width, head))
    return ModelShape(
        name, tuple(weights), parameters, batch, ACTIVATION_BYTES * tokens * width * layers,
        2.0 * tokens * width * layers, efficiency, source, (f"sequences of {tokens} tokens, {batch} for each rank",),
        other_efficiency,
    )  # fmt: skip


def estimated_profile(shape: ModelShape, gpu: str = "h100") -> Profile:
    """Return the profile of a shape: times of FLOPs at a share of the peak.

    Raises ValueError: the parameters are not as many as published.
    """
    numel = sum(weight.numel for weight in shape.weights)
    if shape.parameters not in (None, numel):
        raise ValueError(f"{shape.name}: {numel} parameters, {shape.parameters} published")
    forward = sum(weight.flops for weight in shape.weights) * shape.batch
    share = shape.efficiency.get(gpu, shape.other_efficiency)
    rate = ACCELERATORS[gpu].dense_flops * share / 1e6  # FLOP/µs
    gradients = tuple(
        Gradient(
            name=weight.name,
            layer=weight.name.rpartition(".")[0] or weight.name,
            numel=weight.numel,
            dtype="bfloat16",
            backward_us=float(f"{2.0 * weight.flops * shape.batch / rate:.5g}"),
        )
        for weight in reversed(shape.weights)
    )
    update_us = UPDATE_BYTES * numel / (UPDATE_SHARE * ACCELERATORS[gpu].memory_bytes_per_s) * 1e6
    named = f"; assumed where no accelerator is listed: {shape.other_efficiency:.0%} of its peak"
    return Profile(
        model=ModelReference(name=shape.name),
        world=ProfileWorld(
            ranks=1,
            device="cuda",
            accelerator=gpu,
            memory_bytes=int(ACCELERATORS[gpu].memory_bytes),
            batch_per_rank=shape.batch,
        ),
        compute=ComputeProfile(
            forward_us=float(f"{forward / rate:.6g}"),
            update_us=float(f"{update_us:.5g}"),
            gradients=gradients,
            optimizer=OptimizerProfile(
                name="AdamW", adaptive=True, elementwise=True, holds_all=True, state_bytes=12 * numel
            ),
            estimate=ComputeEstimate(
                gpu=gpu,
                flops=float(f"{3.0 * forward:.6g}"),
                efficiency=shape.efficiency,
                other_efficiency=shape.other_efficiency,
                activation_bytes=int(shape.kept_bytes * shape.batch),
                checkpoint_bytes=int(shape.checkpoint_bytes * shape.batch),
                source=shape.source + named,
            ),
        ),
        source=shape.source,
        notes=(
            "not measured: compute is FLOPs (twice each multiply-add; backward is twice forward) over a share of the "
            f"peak of the cluster's accelerator{named}; a gradient's part of backward is that of its weight's FLOPs",
            "weights and gradients in bfloat16; state of AdamW and a copy of weights in FP32",
            *shape.notes,
        ),
    )


def new_decoder(
    *, layers: int, width: int, batch: int, tokens: int = 2048, heads: int | None = None, key_heads: int | None = None,
    hidden: int | None = None, vocabulary: int = 128_256, tied: bool = False, share: float | None = None,
    name: str = "model",
) -> Profile:  # fmt: skip
    """Return the estimated profile of a language model that was described in a few numbers.

    Args:
        layers: transformer blocks.
        width: of the residual stream.
        batch: sequences per rank.
        tokens: of a sequence.
        heads: attention heads; default: of 128 channels each.
        key_heads: heads of keys and values; default: as many.
        hidden: width of feed-forward layers; default: 8/3 of the width, up to a multiple of 256.
        vocabulary: tokens that there are.
        tied: whether the embedding is also the output layer.
        share: of an accelerator's peak that is reached (MFU); default: `OTHER`.
        name: of the model.

    Raises InputError: a number is out of its range, or heads do not divide what they have to.
    """
    heads = heads or max(1, width // 128)
    key_heads, hidden = key_heads or heads, hidden or -(-8 * width // 3 // 256) * 256
    for option, value, most in (
        ("--layers", layers, 1000), ("--hidden", width, 10**6), ("--batch", batch, 10**6), ("--tokens", tokens, 10**7),
        ("--heads", heads, 10**5), ("--key-heads", key_heads, 10**5), ("--feed-forward", hidden, 10**7),
        ("--vocabulary", vocabulary, 10**7),
    ):  # fmt: skip
        if not 1 <= value <= most:
            raise InputError(f"{option}: found {value}, expected 1 to {most}; correct it")
    for option, value, whole, of in (
        ("--heads", heads, width, "--hidden"),
        ("--key-heads", key_heads, heads, "--heads"),
    ):
        if whole % value:
            raise InputError(f"{option}: found {value}, expected a divisor of {of} ({whole}); correct one of them")
    if share is not None and not 0.0 < share <= 1.0:
        raise InputError(f"--share: found {share}, expected above 0 and at most 1, such as 0.4; correct it")
    shape = decoder(
        name, layers=layers, width=width, hidden=hidden, heads=heads, key_heads=key_heads, vocabulary=vocabulary,
        tied=tied, tokens=tokens, batch=batch, efficiency={}, source="described by `planner model new`, not measured",
        other_efficiency=share or OTHER,
    )  # fmt: skip
    return estimated_profile(shape)
