"""Jobs around models that this project did not write: those of transformers, from their configs, nothing downloaded.

Sizes at which a step is worth sharing between machines, yet short enough to be measured often. Data are random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
