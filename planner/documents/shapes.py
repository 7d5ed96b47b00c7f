"""Models by shape: parameters of an architecture, compute from FLOPs and a stated share of the peak. Torch-free.

Forward FLOPs are 2 for each multiply-add of matrices, convolutions and attention; backward is twice forward. A
gradient's share of backward is its weight's share of the FLOPs. Activations kept for backward are counted at 34 bytes
for each token and channel of a transformer block (Korthikanti et al. 2022; flash attention keeps no scores),
checkpoints at 2 bytes. The update moves 28 bytes for each parameter (bfloat16 weights and gradients, FP32 weights and
two moments).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
    """Number of parameters as published, if it was; checked."""
    batch: int
    kept_bytes: float
    """Bytes kept for backward, of one sample."""
    checkpoint_bytes: float
    efficiency: dict[str, float]
    """Share of its peak that is reached, by accelerator."""
    source: str
    notes: tuple[str, ...]
    other_efficiency: float = OTHER
    """Share of accelerators that are not listed."""


def transformer_weights(
    name: str, width: int, tokens: int, matrices: list[tuple[str, int, int]], vectors: list[tuple[str, int]],
    attention_width: int,
) -> Iterator[Weight]:  # fmt: skip
    """Yield the weights of one block. `attention_width` is heads × head size; its first matrix includes scores and
    values.
    """
    for at, (which, rows, columns) in enumerate(matrices):
        extra = 4.0 * tokens * tokens * attention_width if at == 0 else 0.0
        yield Weight(f"{name}.{which}.weight", rows * columns, 2.0 * rows * columns * tokens + extra)
    for which, numel in vectors:
        yield Weight(f"{name}.{which}", numel)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A language model of Llama's architecture: gated feed-forward layers, no biases."""

    layers: int
    """Number of transformer blocks."""
    width: int
    """Width of the residual stream."""
    batch: int
    """Sequences per rank."""
    tokens: int = 2048
    """Length of a sequence."""
    heads: int = 0
    """Number of attention heads; 0: of 128 channels each."""
    key_heads: int = 0
    """Number of heads of keys and values; 0: as many as attention heads."""
    hidden: int = 0
    """Width of feed-forward layers; 0: 8/3 of the width, up to a multiple of 256."""
    vocabulary: int = 128_256
    """Number of different tokens."""
    tied: bool = False
    """Whether the embedding is also the output layer."""

    def complete(self) -> Decoder:
        """Return the architecture with sizes in place of zeros."""
        heads = self.heads or max(1, self.width // 128)
        hidden = self.hidden or -(-8 * self.width // 3 // 256) * 256
        return replace(self, heads=heads, key_heads=self.key_heads or heads, hidden=hidden)


def decoder(
    name: str, model: Decoder, *, efficiency: dict[str, float], source: str, parameters: int | None = None,
    other_efficiency: float = OTHER,
) -> ModelShape:  # fmt: skip
    """Return the shape of a language model.

    Args:
        name: of the model.
        model: its architecture, complete.
        efficiency: by accelerator, the share of its peak that is reached.
        source: of sizes and shares.
        parameters: as published; checked.
        other_efficiency: of accelerators that are not listed.
    """
    width, hidden, tokens = model.width, model.hidden, model.tokens
    keys = width // model.heads * model.key_heads
    matrices = [
        ("self_attn.q_proj", width, width), ("self_attn.k_proj", keys, width), ("self_attn.v_proj", keys, width),
        ("self_attn.o_proj", width, width), ("mlp.gate_proj", hidden, width), ("mlp.up_proj", hidden, width),
        ("mlp.down_proj", width, hidden),
    ]  # fmt: skip
    vectors = [("input_layernorm.weight", width), ("post_attention_layernorm.weight", width)]
    head = 2.0 * model.vocabulary * width * tokens
    weights = [Weight("model.embed_tokens.weight", model.vocabulary * width, head if model.tied else 0.0)]
    for layer in range(model.layers):
        weights += transformer_weights(f"model.layers.{layer}", width, tokens, matrices, vectors, width)
    weights.append(Weight("model.norm.weight", width))
    if not model.tied:
        weights.append(Weight("lm_head.weight", model.vocabulary * width, head))
    note = f"sequences of {tokens} tokens, {model.batch} for each rank"
    return ModelShape(
        name, tuple(weights), parameters, model.batch, ACTIVATION_BYTES * tokens * width * model.layers,
        2.0 * tokens * width * model.layers, efficiency, source, (note,), other_efficiency,
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


MOST_SIZES = {
    "layers": 1000, "width": 10**6, "batch": 10**6, "tokens": 10**7, "heads": 10**5, "key_heads": 10**5,
    "hidden": 10**7, "vocabulary": 10**7,
}  # fmt: skip
OPTIONS = {"width": "--hidden", "hidden": "--feed-forward", "key_heads": "--key-heads"}
"""Sizes of a decoder, and the options of `planner model new` that have another name."""


def new_decoder(described: Decoder, share: float | None = None, name: str = "model") -> Profile:
    """Return the estimated profile of a language model that was described in a few numbers.

    `share` is that of an accelerator's peak that is reached (MFU); default: `OTHER`.

    Raises InputError: a number is out of its range, or heads do not divide what they have to.
    """
    model = described.complete()
    for size, most in MOST_SIZES.items():
        if not 1 <= (value := getattr(model, size)) <= most:
            option = OPTIONS.get(size, f"--{size}")
            raise InputError(f"{option}: found {value}, expected 1 to {most}; correct it")
    for option, value, whole, of in (
        ("--heads", model.heads, model.width, "--hidden"),
        ("--key-heads", model.key_heads, model.heads, "--heads"),
    ):
        if whole % value:
            raise InputError(f"{option}: found {value}, expected a divisor of {of} ({whole}); correct one of them")
    if share is not None and not 0.0 < share <= 1.0:
        raise InputError(f"--share: found {share}, expected above 0 and at most 1, such as 0.4; correct it")
    source = "described by `planner model new`, not measured"
    return estimated_profile(decoder(name, model, efficiency={}, source=source, other_efficiency=share or OTHER))
