"""A small GPT whose matrices are trained by Muon, and the rest by AdamW: `planner profile examples/muon.py:job`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner import TrainingJob

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 512, 256, 4, 4, 32, 4


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states, shape (batch, length, width)."""
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A language model of the usual form."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, shape (batch, length, vocabulary)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the cross-entropy of the next tokens."""
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def batch(step: int, rank: int) -> Tensor:
    """Return tokens, shape (batch, length + 1)."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def optimizers(named: Iterable[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices of blocks, and AdamW for the rest."""
    listed = list(named)
    matrices = [p for name, p in listed if name.startswith("blocks.") and p.ndim == 2]
    rest = [p for name, p in listed if not (name.startswith("blocks.") and p.ndim == 2)]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-4)]


def job() -> TrainingJob:
    """Return the job."""
    return TrainingJob(model=GPT(), loss=loss, batch=batch, optimizer=optimizers)
