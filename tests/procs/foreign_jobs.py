"""Jobs around models that this project did not write, built small from their configs: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from planner import TrainingJob
from planner.jobs.training import build, weights_sha256

VOCABULARY, LENGTH, SEQUENCES = 97, 16, 4
MASK, MASKED_SHARE, IGNORED = 0, 0.3, -100
"""The token that hides another one, how many are hidden, and the label of those that are not."""
PIXELS, CLASSES = 16, 10


def _generator(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + rank)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def tokens(step: int, rank: int) -> Tensor:
    """(SEQUENCES, LENGTH) token numbers, none of them MASK."""
    return torch.randint(1, VOCABULARY, (SEQUENCES, LENGTH), generator=_generator(step, rank))


def masked_tokens(step: int, rank: int) -> dict[str, Tensor]:
    """What BERT is given: some tokens hidden, and labels for those."""
    original = tokens(step, rank)
    hidden = torch.rand(original.shape, generator=_generator(step, rank)) < MASKED_SHARE
    hidden[:, 0] = True
    return {
        "input_ids": original.masked_fill(hidden, MASK),
        "attention_mask": torch.ones_like(original),
        "labels": original.masked_fill(~hidden, IGNORED),
    }


def images(step: int, rank: int) -> dict[str, Tensor]:
    """What ViT is given: noise, and labels."""
    generator = _generator(step, rank)
    return {
        "pixel_values": torch.randn(SEQUENCES, 1, PIXELS, PIXELS, generator=generator),
        "labels": torch.randint(CLASSES, (SEQUENCES,), generator=generator),
    }


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that a model of transformers computes when it is given labels."""
    loss: Tensor = model(**batch).loss
    return loss


def bert_config() -> transformers.BertConfig:
    """Two layers; the decoder shares the weight of the embedding."""
    return transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
    )


def bert() -> TrainingJob:
    """BERT that guesses hidden tokens; tied embeddings, dropout."""
    model = transformers.BertForMaskedLM(bert_config())
    return TrainingJob(model=model, loss=own_loss, batch=masked_tokens, optimizer=_adamw)


def bert_with_idle_pooler() -> TrainingJob:
    """BERT with the head for sentence pairs, which this loss leaves alone: its pooler and head get no gradient."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        scores = model(batch["input_ids"], batch["attention_mask"]).prediction_logits
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    model = transformers.BertForPreTraining(bert_config())
    return TrainingJob(model=model, loss=loss, batch=masked_tokens, optimizer=_adamw)


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """The loss of a language model of transformers."""
    return own_loss(model, {"input_ids": batch, "labels": batch})


def gpt2() -> TrainingJob:
    """GPT-2 that guesses the next token; tied embeddings, dropout, weights stored transposed (Conv1D)."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    return TrainingJob(model=model, loss=next_token_loss, batch=tokens, optimizer=_adamw)


def llama() -> TrainingJob:
    """Llama: rotary positions, norms without a mean, gated layers."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    return TrainingJob(model=model, loss=next_token_loss, batch=tokens, optimizer=_adamw)


def vit() -> TrainingJob:
    """ViT that names images; its class token and position embeddings are parameters of no layer."""
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=PIXELS,
        patch_size=4,
        num_channels=1,
        num_labels=CLASSES,
    )
    model = transformers.ViTForImageClassification(config)
    return TrainingJob(model=model, loss=own_loss, batch=images, optimizer=_adamw)


def resnet() -> TrainingJob:
    """ResNet with bottlenecks and batch norms."""
    config = transformers.ResNetConfig(
        num_channels=1, num_labels=CLASSES, embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1]
    )
    model = transformers.ResNetForImageClassification(config)
    return TrainingJob(model=model, loss=own_loss, batch=images, optimizer=_adamw)


class LstmLM(nn.Module):
    """Two LSTM layers; the output layer shares the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        width = 32
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.1, batch_first=True)
        self.output = nn.Linear(width, VOCABULARY)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length) → (batch, length, VOCABULARY)."""
        states, _ = self.lstm(self.embedding(x))
        scores: Tensor = self.output(states)
        return scores


def lstm() -> TrainingJob:
    """An LSTM that guesses the next token; tied embeddings, dropout between its layers."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return TrainingJob(model=LstmLM(), loss=loss, batch=tokens, optimizer=_adamw)


def train_with_ddp(path: str, names: Iterable[str], steps: int) -> dict[str, str]:
    """On each rank: trains jobs of this file with DDP, one after the other; SHA-256 of the weights by name.

    DDP refuses to train past unused parameters unless it is told to search for them.
    """
    weights = {}
    for name in names:
        built = build(f"{path}:{name}", "cpu")
        unused = name == bert_with_idle_pooler.__name__
        model = DistributedDataParallel(built.model, find_unused_parameters=unused)
        for step in range(steps):
            built.optimizer.zero_grad()
            built.loss(model, built.batch(step)).backward()
            built.optimizer.step()
        weights[name] = weights_sha256(built.model)
    return weights
