"""Models of the catalogue by shape: parameters of a published architecture, compute from FLOPs and a stated share.

Forward FLOPs are 2 for each multiply-add of matrices, convolutions and attention; backward is twice forward. A
gradient's share of backward is its weight's share of the FLOPs. Activations kept for backward are counted at 34 bytes
for each token and channel of a transformer block (Korthikanti et al. 2022; flash attention keeps no scores),
checkpoints at 2 bytes. The update moves 28 bytes for each parameter (bfloat16 weights and gradients, FP32 weights and
two moments).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.documents.nccl import GPUS
from planner.documents.profile import (
    ComputeEstimate,
    ComputeProfile,
    Gradient,
    OptimizerProfile,
    Profile,
    ProfileWorld,
)
from runtime.plan import ModelReference

LLM_FOUNDRY = (
    "github.com/mosaicml/llm-foundry, commit 8c8dd48, scripts/train/benchmarking/README.md, Apache-2.0: MFU of MPT "
    "models on 8 GPUs, sequences of 2048"
)
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
    parameters: int
    """As published; checked."""
    batch: int
    kept_bytes: float
    """Of one sample, for backward."""
    checkpoint_bytes: float
    efficiency: dict[str, float]
    source: str
    notes: tuple[str, ...]


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


def llama(
    name: str, layers: int, width: int, hidden: int, heads: int, key_heads: int, parameters: int, *, tied: bool,
    tokens: int, batch: int, efficiency: dict[str, float], source: str,
) -> ModelShape:  # fmt: skip
    vocabulary, keys = 128256, width // heads * key_heads
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
    )  # fmt: skip


def olmoe(tokens: int = 2048, batch: int = 8) -> ModelShape:
    """A mixture of experts: of 64 in a block each token computes with 8, which backward takes gradients of all for."""
    width, hidden, layers, experts, chosen, vocabulary = 2048, 1024, 16, 64, 8, 50304
    matrices = [(f"self_attn.{name}_proj", width, width) for name in "qkvo"]
    vectors = [
        ("self_attn.q_norm.weight", width), ("self_attn.k_norm.weight", width), ("input_layernorm.weight", width),
        ("post_attention_layernorm.weight", width),
    ]  # fmt: skip
    weights = [Weight("model.embed_tokens.weight", vocabulary * width)]
    for layer in range(layers):
        name = f"model.layers.{layer}"
        weights += transformer_weights(name, width, tokens, matrices, vectors, width)
        weights.append(Weight(f"{name}.mlp.gate.weight", experts * width, 2.0 * experts * width * tokens))
        for which, times in (("gate_up_proj", 2), ("down_proj", 1)):
            flops = 2.0 * chosen * times * hidden * width * tokens
            weights.append(Weight(f"{name}.mlp.experts.{which}", experts * times * hidden * width, flops))
    head = vocabulary * width
    weights += [Weight("model.norm.weight", width), Weight("lm_head.weight", head, 2.0 * head * tokens)]
    return ModelShape(
        "olmoe-1b-7b", tuple(weights), 6_919_161_856, batch, ACTIVATION_BYTES * tokens * width * layers,
        2.0 * tokens * width * layers, {},
        "sizes: OLMoE-1B-7B (Muennighoff et al. 2024); all experts on every rank",
        (f"sequences of {tokens} tokens, {batch} for each rank",),
    )  # fmt: skip


def bert_large(tokens: int = 128, batch: int = 32) -> ModelShape:
    width, hidden, layers, vocabulary = 1024, 4096, 24, 30522
    matrices = [
        ("attention.self.query", width, width), ("attention.self.key", width, width),
        ("attention.self.value", width, width), ("attention.output.dense", width, width),
        ("intermediate.dense", hidden, width), ("output.dense", width, hidden),
    ]  # fmt: skip
    vectors = [
        ("attention.self.query.bias", width), ("attention.self.key.bias", width), ("attention.self.value.bias", width),
        ("attention.output.dense.bias", width), ("attention.output.LayerNorm.weight", width),
        ("attention.output.LayerNorm.bias", width), ("intermediate.dense.bias", hidden), ("output.dense.bias", width),
        ("output.LayerNorm.weight", width), ("output.LayerNorm.bias", width),
    ]  # fmt: skip
    weights = [
        Weight("bert.embeddings.word_embeddings.weight", vocabulary * width),
        Weight("bert.embeddings.position_embeddings.weight", 512 * width),
        Weight("bert.embeddings.token_type_embeddings.weight", 2 * width),
        Weight("bert.embeddings.LayerNorm.weight", width), Weight("bert.embeddings.LayerNorm.bias", width),
    ]  # fmt: skip
    for layer in range(layers):
        weights += transformer_weights(f"bert.encoder.layer.{layer}", width, tokens, matrices, vectors, width)
    weights += [
        Weight("bert.pooler.dense.weight", width * width, 2.0 * width * width),
        Weight("bert.pooler.dense.bias", width),
    ]
    return ModelShape(
        "bert-large-s128", tuple(weights), 335_141_888, batch, ACTIVATION_BYTES * tokens * width * layers,
        2.0 * tokens * width * layers, {"a100": 0.43},
        "sizes: BERT-Large uncased (Devlin et al. 2019); share on A100: 4553 sequences/s on 8 of them, "
        "github.com/NVIDIA/DeepLearningExamples, commit 729963d, Apache-2.0",
        (f"sequences of {tokens} tokens, {batch} for each rank",),
    )  # fmt: skip


def vit_large(batch: int = 64) -> ModelShape:
    width, hidden, layers, tokens = 1024, 4096, 24, 197
    matrices = [
        ("self_attention.in_proj", 3 * width, width), ("self_attention.out_proj", width, width),
        ("mlp.0", hidden, width), ("mlp.3", width, hidden),
    ]  # fmt: skip
    vectors = [
        ("self_attention.in_proj_bias", 3 * width), ("self_attention.out_proj.bias", width), ("mlp.0.bias", hidden),
        ("mlp.3.bias", width), ("ln_1.weight", width), ("ln_1.bias", width), ("ln_2.weight", width),
        ("ln_2.bias", width),
    ]  # fmt: skip
    patch = 3 * 16 * 16 * width
    weights = [
        Weight("class_token", width), Weight("conv_proj.weight", patch, 2.0 * patch * 196),
        Weight("conv_proj.bias", width), Weight("encoder.pos_embedding", tokens * width),
    ]  # fmt: skip
    for layer in range(layers):
        weights += transformer_weights(f"encoder.layers.{layer}", width, tokens, matrices, vectors, width)
    weights += [
        Weight("encoder.ln.weight", width), Weight("encoder.ln.bias", width),
        Weight("heads.head.weight", 1000 * width, 2.0 * 1000 * width), Weight("heads.head.bias", 1000),
    ]  # fmt: skip
    return ModelShape(
        "vit-l16", tuple(weights), 304_326_632, batch, ACTIVATION_BYTES * tokens * width * layers,
        2.0 * tokens * width * layers, {}, "sizes: ViT-L/16 at 224x224 (Dosovitskiy et al. 2021), as in torchvision",
        (f"{batch} images for each rank",),
    )  # fmt: skip


class _UNet:
    """The U-Net of Stable Diffusion 1.x: four widths, two residual blocks of each, transformers at three sizes."""

    widths, context, time = (320, 640, 1280, 1280), 768, 1280

    def __init__(self, side: int = 64) -> None:
        self.side, self.kept = side, 0.0
        self.weights: list[Weight] = []

    def conv(self, name: str, inputs: int, outputs: int, kernel: int, side: int) -> None:
        numel = inputs * outputs * kernel * kernel
        self.weights += [Weight(f"{name}.weight", numel, 2.0 * numel * side * side), Weight(f"{name}.bias", outputs)]
        self.kept += 2.0 * inputs * side * side

    def linear(
        self, name: str, inputs: int, outputs: int, tokens: float, *, bias: bool = True, extra: float = 0.0
    ) -> None:
        self.weights.append(Weight(f"{name}.weight", inputs * outputs, 2.0 * inputs * outputs * tokens + extra))
        self.weights += [Weight(f"{name}.bias", outputs)] if bias else []
        self.kept += 2.0 * inputs * tokens

    def norm(self, name: str, width: int, side: int) -> None:
        self.weights += [Weight(f"{name}.weight", width), Weight(f"{name}.bias", width)]
        self.kept += 2.0 * width * side * side

    def residual(self, name: str, inputs: int, outputs: int, side: int) -> None:
        self.norm(f"{name}.norm1", inputs, side)
        self.conv(f"{name}.conv1", inputs, outputs, 3, side)
        self.linear(f"{name}.time_emb_proj", self.time, outputs, 1)
        self.norm(f"{name}.norm2", outputs, side)
        self.conv(f"{name}.conv2", outputs, outputs, 3, side)
        if inputs != outputs:
            self.conv(f"{name}.conv_shortcut", inputs, outputs, 1, side)

    def transformer(self, name: str, width: int, side: int) -> None:
        tokens = side * side
        self.norm(f"{name}.norm", width, side)
        self.conv(f"{name}.proj_in", width, width, 1, side)
        block = f"{name}.transformer_blocks.0"
        for at, keys, key_tokens in ((1, width, tokens), (2, self.context, 77)):
            self.norm(f"{block}.norm{at}", width, side)
            scores = 4.0 * tokens * key_tokens * width
            self.linear(f"{block}.attn{at}.to_q", width, width, tokens, bias=False, extra=scores)
            self.linear(f"{block}.attn{at}.to_k", keys, width, key_tokens, bias=False)
            self.linear(f"{block}.attn{at}.to_v", keys, width, key_tokens, bias=False)
            self.linear(f"{block}.attn{at}.to_out.0", width, width, tokens)
        self.norm(f"{block}.norm3", width, side)
        self.linear(f"{block}.ff.net.0.proj", width, 8 * width, tokens)
        self.linear(f"{block}.ff.net.2", 4 * width, width, tokens)
        self.conv(f"{name}.proj_out", width, width, 1, side)

    def build(self) -> tuple[Weight, ...]:
        widths, side = self.widths, self.side
        self.linear("time_embedding.linear_1", 320, self.time, 1)
        self.linear("time_embedding.linear_2", self.time, self.time, 1)
        self.conv("conv_in", 4, widths[0], 3, side)
        skips, current = [widths[0]], widths[0]
        for level, width in enumerate(widths):
            for at in range(2):
                self.residual(f"down_blocks.{level}.resnets.{at}", current, width, side)
                current = width
                if level < 3:
                    self.transformer(f"down_blocks.{level}.attentions.{at}", width, side)
                skips.append(current)
            if level < 3:
                side //= 2
                self.conv(f"down_blocks.{level}.downsamplers.0.conv", width, width, 3, side)
                skips.append(current)
        self.residual("mid_block.resnets.0", current, current, side)
        self.transformer("mid_block.attentions.0", current, side)
        self.residual("mid_block.resnets.1", current, current, side)
        for level, width in enumerate(reversed(widths)):
            for at in range(3):
                self.residual(f"up_blocks.{level}.resnets.{at}", current + skips.pop(), width, side)
                current = width
                if level > 0:
                    self.transformer(f"up_blocks.{level}.attentions.{at}", width, side)
            if level < 3:
                side *= 2
                self.conv(f"up_blocks.{level}.upsamplers.0.conv", width, width, 3, side)
        self.norm("conv_norm_out", current, side)
        self.conv("conv_out", current, 4, 3, side)
        return tuple(self.weights)


def diffusion_unet(batch: int = 16) -> ModelShape:
    net = _UNet()
    weights = net.build()
    return ModelShape(
        "sd15-unet", weights, 859_520_964, batch, net.kept, net.kept / 8, {},
        "sizes: U-Net of Stable Diffusion 1.5 (Rombach et al. 2022), as in github.com/huggingface/diffusers",
        (f"{batch} latents of 64x64 for each rank",),
    )  # fmt: skip


def shapes() -> Iterator[ModelShape]:
    """All of them."""
    llama_sizes = "sizes: {} (Grattafiori et al. 2024); shares of peak: {}"
    yield llama(
        "llama-1b", 16, 2048, 8192, 32, 8, 1_235_814_400, tied=True, tokens=2048, batch=8,
        efficiency={"a100": 0.562, "h100": 0.418, "h200": 0.418},
        source=llama_sizes.format("Llama 3.2 1B", f"{LLM_FOUNDRY}, 1b"),
    )  # fmt: skip
    yield llama(
        "llama-8b", 32, 4096, 14336, 32, 8, 8_030_261_248, tied=False, tokens=2048, batch=2,
        efficiency={"a100": 0.642, "h100": 0.464, "h200": 0.464},
        source=llama_sizes.format("Llama 3.1 8B", f"{LLM_FOUNDRY}, 7b"),
    )  # fmt: skip
    yield llama(
        "llama-70b", 80, 8192, 28672, 64, 8, 70_553_706_496, tied=False, tokens=2048, batch=1,
        efficiency={"a100": 0.69, "h100": 0.578, "h200": 0.578},
        source=llama_sizes.format("Llama 3.1 70B", f"{LLM_FOUNDRY}: HFU, for blocks are computed twice"),
    )  # fmt: skip
    yield olmoe()
    yield vit_large()
    yield bert_large()
    yield diffusion_unet()


def estimated_profile(shape: ModelShape, gpu: str = "h100") -> Profile:
    """The profile of a shape: times of FLOPs at a share of the peak.

    Raises ValueError: the parameters are not as many as published.
    """
    numel = sum(weight.numel for weight in shape.weights)
    if numel != shape.parameters:
        raise ValueError(f"{shape.name}: {numel} parameters, {shape.parameters} published")
    forward = sum(weight.flops for weight in shape.weights) * shape.batch
    share = shape.efficiency.get(gpu, OTHER)
    rate = GPUS[gpu].dense_flops * share / 1e6  # FLOP/µs
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
    update_us = UPDATE_BYTES * numel / (UPDATE_SHARE * GPUS[gpu].memory_bytes_per_s) * 1e6
    named = f"; assumed where no accelerator is listed: {OTHER:.0%} of its peak"
    return Profile(
        model=ModelReference(name=shape.name),
        world=ProfileWorld(
            ranks=1,
            device="cuda",
            accelerator=gpu,
            memory_bytes=int(GPUS[gpu].memory_bytes),
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
                other_efficiency=OTHER,
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
