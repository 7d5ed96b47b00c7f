"""Models of `benchmarks.compiled`: plain modules with lists of blocks, of about 4 million parameters each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, HEADS, LENGTH = 2000, 256, 4, 64
"""Vocabulary, width, heads and longest text of transformers."""


class Attention(nn.Module):
    """Self-attention with one product for queries, keys and values."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.inside, self.out, self.causal = nn.Linear(width, 3 * width), nn.Linear(width, width), causal

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same."""
        batch, length, width = x.shape
        query, key, value = self.inside(x).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        found: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return found


class Block(nn.Module):
    """Attention and two linear layers, each with a residual connection and a norm before it or behind it."""

    def __init__(self, width: int = WIDTH, *, causal: bool = False, norm_first: bool = True) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention = Attention(width, causal)
        self.inside = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleDict({"attention": nn.LayerNorm(width), "inside": nn.LayerNorm(width)})

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same."""
        for part, norm in ((self.attention, self.norms["attention"]), (self.inside, self.norms["inside"])):
            x = x + part(norm(x)) if self.norm_first else norm(x + part(x))
        return x


class Gpt(nn.Module):
    """A decoder whose output shares the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h, self.norm = nn.ModuleList(Block(causal=True) for _ in range(5)), nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, length) → scores of the words that follow (batch · length, words)."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return functional.linear(self.norm(x), self.words.weight).flatten(0, 1)


class Bert(nn.Module):
    """An encoder with norms behind its layers, and a head for masked words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm, self.layers = nn.LayerNorm(WIDTH), nn.ModuleList(Block(norm_first=False) for _ in range(5))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, length) → scores of words (batch · length, words)."""
        x = self.norm(self.words(tokens) + self.places.weight[: tokens.shape[1]])
        for block in self.layers:
            x = block(x)
        scores: Tensor = self.head(x).flatten(0, 1)
        return scores


class Vit(nn.Module):
    """A vision transformer on images of 32 × 32 pixels in patches of 4 × 4."""

    def __init__(self, width: int = 224) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.places, self.first = nn.Parameter(torch.zeros(65, width)), nn.Parameter(torch.zeros(1, 1, width))
        self.blocks, self.norm = nn.ModuleList(Block(width) for _ in range(6)), nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, 3, 32, 32) → scores of classes (batch, 10)."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.places
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x[:, 0]))
        return found


class Residual(nn.Module):
    """Two convolutions with batch norms, around which a connection goes."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Conv2d(inside, width, 3, step, 1, bias=False), nn.BatchNorm2d(width))
            for inside, step in ((before, stride), (width, 1))
        )
        self.around = nn.Identity() if stride == 1 else nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, before, height, height) → (batch, width, height / stride, height / stride)."""
        return functional.relu(self.second(functional.relu(self.first(x))) + self.around(x))


def resnet(width: int = 40) -> nn.Module:
    """Return a ResNet-18 for images of 32 × 32 pixels: (batch, 3, 32, 32) → scores of classes (batch, 10)."""
    widths = [width, *(width * 2**stage for stage in range(4) for _ in range(2))]
    strides = [1, 1, 2, 1, 2, 1, 2, 1]
    blocks = [
        Residual(before, after, stride) for before, after, stride in zip(widths, widths[1:], strides, strict=False)
    ]
    stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))
