"""Models of the catalogue by shape: published architectures, and the published shares of peaks that they reach."""

from __future__ import annotations

from collections.abc import Iterator

from planner.documents.shapes import ACTIVATION_BYTES, Decoder, ModelShape, Weight, decoder, transformer_weights

LLM_FOUNDRY = (
    "github.com/mosaicml/llm-foundry, commit 8c8dd48, scripts/train/benchmarking/README.md, Apache-2.0: MFU of MPT "
    "models on 8 GPUs, sequences of 2048"
)
LLAMA_VOCABULARY = 128_256


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
    yield decoder(
        "llama-1b",
        Decoder(layers=16, width=2048, hidden=8192, heads=32, key_heads=8, vocabulary=LLAMA_VOCABULARY, tied=True,
                tokens=2048, batch=8),
        parameters=1_235_814_400, efficiency={"a100": 0.562, "h100": 0.418, "h200": 0.418},
        source=llama_sizes.format("Llama 3.2 1B", f"{LLM_FOUNDRY}, 1b"),
    )  # fmt: skip
    yield decoder(
        "llama-8b",
        Decoder(layers=32, width=4096, hidden=14336, heads=32, key_heads=8, vocabulary=LLAMA_VOCABULARY, tokens=2048,
                batch=2),
        parameters=8_030_261_248, efficiency={"a100": 0.642, "h100": 0.464, "h200": 0.464},
        source=llama_sizes.format("Llama 3.1 8B", f"{LLM_FOUNDRY}, 7b"),
    )  # fmt: skip
    yield decoder(
        "llama-70b",
        Decoder(layers=80, width=8192, hidden=28672, heads=64, key_heads=8, vocabulary=LLAMA_VOCABULARY, tokens=2048,
                batch=1),
        parameters=70_553_706_496, efficiency={"a100": 0.69, "h100": 0.578, "h200": 0.578},
        source=llama_sizes.format("Llama 3.1 70B", f"{LLM_FOUNDRY}: HFU, for blocks are computed twice"),
    )  # fmt: skip
    yield olmoe()
    yield vit_large()
    yield bert_large()
    yield diffusion_unet()
