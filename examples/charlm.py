"""A small GPT that learns to write Python, character by character, from the sources of the standard library.

planner profile examples/charlm.py:job
planner optimize profile.json
planner run examples/charlm.py:job --plan plan.json --steps 200
"""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner import TrainingJob

TEXT_BYTES = 400_000
BATCH_SIZE, CONTEXT = 8, 64
"""Sequences per rank and step; characters per sequence."""
WIDTH, HEADS, BLOCKS = 128, 4, 3


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, WIDTH) → the same shape."""
        batch, length, width = x.shape
        heads = self.queries_keys_values(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.perceptron(self.norm2(x))
        return result


class CharLM(nn.Module):
    """Scores for the next character; the output layer shares the weight of the embedding."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, characters, bias=False)
        for embedding in (self.embedding, self.position):
            nn.init.normal_(embedding.weight, std=0.02)
        self.output.weight = self.embedding.weight

    def forward(self, characters: Tensor) -> Tensor:
        """(batch, length) → (batch, length, characters known)."""
        positions = torch.arange(characters.shape[1], device=characters.device)
        x = self.embedding(characters) + self.position(positions)
        scores: Tensor = self.output(self.norm(self.blocks(x)))
        return scores


@cache
def text() -> tuple[Tensor, int]:
    """The text as numbers, and how many different characters it has."""
    library = Path(sysconfig.get_path("stdlib"))
    raw = bytearray()
    for source in sorted(library.glob("*.py")):
        raw += source.read_bytes()
        if len(raw) >= TEXT_BYTES:
            break
    characters, numbers = torch.frombuffer(raw[:TEXT_BYTES], dtype=torch.uint8).unique(return_inverse=True)
    return numbers, len(characters)


def batch(step: int, rank: int) -> Tensor:
    """Sequences of CONTEXT + 1 characters from anywhere in the text; the same step and rank draw the same ones."""
    numbers, _ = text()
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first = torch.randint(len(numbers) - CONTEXT, (BATCH_SIZE, 1), generator=generator)
    return numbers[first + torch.arange(CONTEXT + 1)]


def loss(model: nn.Module, sequences: Tensor) -> Tensor:
    """Cross-entropy of each next character, a scalar."""
    scores = model(sequences[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), sequences[:, 1:].flatten())


def job() -> TrainingJob:
    """The character model's job."""
    _, characters = text()
    return TrainingJob(
        model=CharLM(characters),
        loss=loss,
        batch=batch,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
    )
