"""Jobs around models that this project did not write: those of transformers, from their configs, nothing downloaded;
and a U-Net and perceptrons of torch's own layers.

Sizes at which a step is worth sharing between machines, yet short enough to be measured often. Data are random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from planner import TrainingJob

WORDS, WIDTH, INNER = 2000, 192, 768
"""Known words; width of the layers, and of those inside them."""
SEQUENCES, LENGTH, PIXELS = 8, 48, 32
"""Of a batch."""

Batch = dict[str, Tensor]


def _job(
    model: nn.Module,
    batch: Callable[[torch.Generator], Batch],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
) -> TrainingJob:
    def make(step: int, rank: int) -> Batch:
        return batch(torch.Generator().manual_seed(1000 * step + rank))

    def loss(model: nn.Module, inputs: Batch) -> Any:
        return model(**inputs).loss

    return TrainingJob(model=model, loss=loss, batch=make, optimizer=optimizer)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _words(generator: torch.Generator) -> Batch:
    words = torch.randint(1, WORDS, (SEQUENCES, LENGTH), generator=generator)
    return {"input_ids": words, "labels": words}


def _images(generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(SEQUENCES, 3, PIXELS, PIXELS, generator=generator),
        "labels": torch.randint(10, (SEQUENCES,), generator=generator),
    }


def bert_job() -> TrainingJob:
    """Four layers, 2.2 million parameters in 74 gradients; the decoder shares the weight of the embedding."""
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=4, intermediate_size=INNER,
        max_position_embeddings=64,
    )  # fmt: skip
    return _job(transformers.BertForMaskedLM(config), _words, _adamw)


def vit_job() -> TrainingJob:
    """Six layers, 2.7 million parameters in 104 gradients."""
    config = transformers.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=6, num_attention_heads=3, intermediate_size=INNER, image_size=PIXELS,
        patch_size=4, num_channels=3, num_labels=10,  # type: ignore[call-arg]  # of its base class, which mypy does not see
    )  # fmt: skip
    return _job(transformers.ViTForImageClassification(config), _images, _sgd)


def gpt2_job() -> TrainingJob:
    """Four layers, 2.2 million parameters in 52 gradients; tied embeddings."""
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=64, n_embd=WIDTH, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return _job(transformers.GPT2LMHeadModel(config), _words, _adamw)


def t5_job() -> TrainingJob:
    """Two layers each way; the embedding, which encoder, decoder and head share, is most of it."""
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=48, d_ff=INNER, num_layers=2, num_decoder_layers=2, num_heads=4,
        decoder_start_token_id=0,  # type: ignore[call-arg]  # of its base class, which mypy does not see
    )  # fmt: skip
    return _job(transformers.T5ForConditionalGeneration(config), _words, _adamw)


class _UNet(nn.Module):
    """Two levels down and up again, with skips."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Module:
            layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
            return nn.Sequential(*layers, nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

        self.down = nn.ModuleList([block(3, channels), block(channels, 2 * channels)])
        self.middle = block(2 * channels, 4 * channels)
        self.widen = nn.ModuleList([nn.ConvTranspose2d(2 * n * channels, n * channels, 2, stride=2) for n in (2, 1)])
        self.up = nn.ModuleList([block(4 * channels, 2 * channels), block(2 * channels, channels)])
        self.head = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Any:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for widen, block in zip(self.widen, self.up, strict=True):
            x = block(torch.cat([widen(x), skips.pop()], dim=1))
        return self.head(x)


def unet_job() -> TrainingJob:
    """Most of the gradients' bytes lie in the middle of backward."""

    def make(step: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        images = torch.randn(4, 3, PIXELS, PIXELS, generator=generator)
        return images, images.mean(1, keepdim=True)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    return TrainingJob(model=_UNet(), loss=loss, batch=make, optimizer=_adamw)


def _perceptron(widths: list[int]) -> TrainingJob:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]

    def make(step: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randn(64, widths[0], generator=generator), torch.randint(10, (64,), generator=generator)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return TrainingJob(model=nn.Sequential(*layers[:-1]), loss=loss, batch=make, optimizer=_sgd)


def wide_job() -> TrainingJob:
    """3.7 million parameters in six gradients."""
    return _perceptron([784, 1536, 1536, 10])


def deep_job() -> TrainingJob:
    """2.3 million parameters in 66 gradients."""
    return _perceptron([256] + 32 * [268] + [10])
