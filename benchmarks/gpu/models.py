"""ResNet-50, BERT-base and GPT-2 in plain torch, which give their loss; and the same in thin, for a CPU.

Shapes are those of the papers: He et al. (2016), Devlin et al. (2019), Radford et al. (2019). Weights are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions, and a shortcut."""

    def __init__(self, width_in: int, inner: int, stride: int) -> None:
        super().__init__()
        width = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(width_in, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width_in, h, w) → (batch, 4 · inner, h / stride, w / stride)."""
        return functional.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """(3, 4, 6, 3) bottlenecks of 64 to 512 channels: 25.6 million parameters in 161 tensors."""

    def __init__(self, channels: int = 64, blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        stages: list[nn.Module] = []
        width = channels
        for stage, count in enumerate(blocks):
            for block in range(count):
                stages.append(Bottleneck(width, channels << stage, 2 if stage and not block else 1))
                width = 4 * (channels << stage)
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """(batch, 3, h, w), (batch,) → loss."""
        return functional.cross_entropy(self.head(self.stages(self.stem(images)).mean((2, 3))), labels)


class Transformer(nn.Module):
    """Embeddings, layers of attention, and a loss over the vocabulary, whose matrix is that of the embeddings."""

    def __init__(self, vocabulary: int, tokens: int, width: int, layers: int, heads: int, *, causal: bool) -> None:
        """`causal`: as GPT-2, normalized before each half of a layer; else as BERT, behind it."""
        super().__init__()
        self.causal = causal
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=causal
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, words: Tensor, expected: Tensor) -> Tensor:
        """(batch, tokens), (batch, tokens) → loss."""
        tokens = words.shape[1]
        x = self.words(words) + self.places.weight[:tokens]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens, device=x.device) if self.causal else None
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=self.causal)
        logits = self.norm(x) @ self.words.weight.t()
        return functional.cross_entropy(logits.flatten(0, 1), expected.flatten())


@dataclass(frozen=True)
class Model:
    """A model by size."""

    make: Callable[[bool], nn.Module]
    """(small)."""
    batch: Callable[[bool, int, int], tuple[Tensor, Tensor]]
    """(small, samples, seed) → what the model is called with, on the CPU."""
    batches: tuple[int, ...]
    """From tiny to what keeps a device full."""


def _images(small: bool, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator, side = torch.Generator().manual_seed(seed), 32 if small else 224
    images = torch.randn(samples, 3, side, side, generator=generator)
    return images, torch.randint(4 if small else 1000, (samples,), generator=generator)


def _words(vocabulary: int, tokens: int) -> Callable[[bool, int, int], tuple[Tensor, Tensor]]:
    def batch(small: bool, samples: int, seed: int) -> tuple[Tensor, Tensor]:
        generator, shape = torch.Generator().manual_seed(seed), (2, samples, 8 if small else tokens)
        words, expected = torch.randint(64 if small else vocabulary, shape, generator=generator)
        return words, expected

    return batch


MODELS: Mapping[str, Model] = {
    "ResNet-50": Model(
        lambda small: ResNet(4, (1, 1), 4) if small else ResNet(), _images, (1, 8, 32, 128),
    ),
    "BERT-base": Model(
        lambda small: Transformer(64, 8, 16, 2, 2, causal=False)
        if small
        else Transformer(30522, 512, 768, 12, 12, causal=False),
        _words(30522, 128), (1, 8, 32),
    ),
    "GPT-2": Model(
        lambda small: Transformer(64, 8, 16, 2, 2, causal=True)
        if small
        else Transformer(50257, 1024, 768, 12, 12, causal=True),
        _words(50257, 512), (1, 4, 8),
    ),
}  # fmt: skip
