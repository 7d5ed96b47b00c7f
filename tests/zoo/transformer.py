"""Transformers written by hand, and kin: mixers, Fourier mixing, mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from planner import TrainingJob

from .registry import CLASSES, LENGTH, VOCABULARY, image_job, job, member, text_job, tokens

WIDTH, HEADS = 16, 2


class Attention(nn.Module):
    """Causal self-attention, its mask a buffer."""

    mask: Tensor

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fused = fused
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril().bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, WIDTH) → the same."""
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).split(WIDTH, -1))
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
            scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
            mixed = functional.dropout(scores.softmax(-1), 0.1, self.training) @ v
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return y


class Block(nn.Module):
    """Attention and a layer of two products, or whatever stands in its place."""

    def __init__(self, fused: bool = False, feed: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention(fused)
        self.feed = feed or nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Pre-norm."""
        x = x + self.attention(self.norm1(x))
        x = x + self.feed(self.norm2(x))
        return x


class Gpt(nn.Module):
    """A decoder with tied embeddings."""

    def __init__(self, blocks: list[nn.Module], checkpointing: bool = False) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight
        self.checkpointing = checkpointing

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next token."""
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


@member("transformer")
def gpt() -> TrainingJob:
    """Attention written out, dropout, tied embeddings."""
    return text_job(Gpt([Block(), Block()]))


@member("transformer")
def checkpointed_gpt() -> TrainingJob:
    """The same with fused attention; each block's forward runs again in backward."""
    return text_job(Gpt([Block(fused=True), Block(fused=True)], checkpointing=True))


class Translator(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Transformer(WIDTH, HEADS, 1, 1, 32, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, pair: dict[str, Tensor]) -> Tensor:
        """Takes a dict."""
        mask = nn.Transformer.generate_square_subsequent_mask(pair["target"].shape[1])
        padding = pair["source"] == 0
        y = self.body(
            self.words(pair["source"]), self.words(pair["target"]), tgt_mask=mask, src_key_padding_mask=padding
        )
        scores: Tensor = self.head(y)
        return scores


@member("transformer")
def encoder_decoder() -> TrainingJob:
    """nn.Transformer with a causal mask; called with one dict."""

    def batch(step: int, rank: int) -> dict[str, Tensor]:
        return {"source": tokens(step, rank), "target": tokens(step + 1000, rank)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = model({**batch, "target": batch["target"][:, :-1]})
        return functional.cross_entropy(scores.flatten(0, 1), batch["target"][:, 1:].flatten())

    return job(Translator(), loss, batch)


class Mixer(nn.Module):
    """MLP-Mixer: one product over patches, one over channels."""

    def __init__(self, patches: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.over_patches = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.over_channels = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, patches, WIDTH) → the same."""
        x = x + self.over_patches(self.norm1(x).mT).mT
        return x + self.over_channels(self.norm2(x))


class Patches(nn.Module):
    """Images as rows of patches, mixed, averaged, classified."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.patch, self.blocks = nn.Conv2d(3, WIDTH, 4, 4), nn.Sequential(*blocks)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, 16, 16) → (batch, CLASSES)."""
        scores: Tensor = self.head(self.blocks(self.patch(x).flatten(2).mT).mean(1))
        return scores


@member("transformer")
def mlp_mixer() -> TrainingJob:
    """Products over patches and over channels."""
    return image_job(Patches(Mixer(16), Mixer(16)))


class Fourier(nn.Module):
    """FNet: the real part of a Fourier transform mixes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, WIDTH) → the same."""
        return x + self.feed(self.norm(torch.fft.fft2(x, dim=(-2, -1)).real))


@member("transformer")
def fourier_mixer() -> TrainingJob:
    """Complex numbers on the way."""
    return image_job(Patches(Fourier(), Fourier()))


class RoutedExperts(nn.Module):
    """The best two of four experts for each token; an expert sees only its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Gathers the tokens of each expert, and adds what it makes of them."""
        flat = x.flatten(0, -2)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            result = result.index_add(0, rows, expert(flat[rows]) * weights[rows, slots, None])
        return result.view_as(x)


@member("mixture of experts")
def routed_experts() -> TrainingJob:
    """How many tokens each expert gets depends on the data."""
    return text_job(Gpt([Block(feed=RoutedExperts()), Block(feed=RoutedExperts())]))


class SkippingExperts(RoutedExperts):
    """Experts that nobody chose do not run."""

    def forward(self, x: Tensor) -> Tensor:
        """As the parent, but asks first."""
        flat = x.flatten(0, -2)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        result = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            mine = chosen == number
            result[mine] = self.experts[number](flat[mine]) * weights[mine, None]
        return result.view_as(x)


@member("mixture of experts", data_dependent=True)
def skipping_experts() -> TrainingJob:
    """Switch routing in which experts without tokens are skipped: their gradients are missing in such steps."""
    return text_job(Gpt([Block(feed=SkippingExperts())]))


class SoftExperts(nn.Module):
    """All experts at once, as one stacked weight, mixed by their gates."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, WIDTH, 32) / 4), nn.Parameter(torch.randn(4, 32, WIDTH) / 6)

    def forward(self, x: Tensor) -> Tensor:
        """Sums over experts."""
        inner = torch.einsum("bld,edh->bleh", x, self.up).relu()
        return torch.einsum("bleh,ehd,ble->bld", inner, self.down, self.gate(x).softmax(-1))


@member("mixture of experts")
def soft_experts() -> TrainingJob:
    """Stacked experts in einsum."""
    return text_job(Gpt([Block(feed=SoftExperts())]))


class Rotary(nn.Module):
    """Attention with rotary positions, whose table the first forward makes, on keys that may be cached."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.both = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.table: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, *, cache: Any = None, **options: Any) -> tuple[Tensor, None]:
        """(batch, length, WIDTH) → the same, and no cache."""
        if self.table is None or self.table[0].shape[0] < x.shape[1]:
            angle = torch.outer(torch.arange(LENGTH), 100.0 ** (-torch.arange(WIDTH // 2) / 8))
            self.table = (angle.cos().repeat(1, 2), angle.sin().repeat(1, 2))
        cos, sin = (part[: x.shape[1]] for part in self.table)
        q, (k, v) = self.query(x), self.both(x).chunk(2, -1)
        q, k = (cos * t + sin * torch.cat([-t[..., 8:], t[..., :8]], -1) for t in (q, k))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=options["causal"]), cache


class RotaryLM(nn.Module):
    """Two layers of it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Rotary() for _ in range(2))

    def forward(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Scores of the next token."""
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x, cache=None, **options)[0]
        scores: Tensor = self.head(x)
        return scores


@member("transformer")
def rotary_lm() -> TrainingJob:
    """A table that the first forward makes and keeps; arguments that are None, options passed on."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        scores = model(batch[:, :-1], None, causal=True)
        return functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())

    return job(RotaryLM(), loss, tokens)
