"""Inputs of every kind that selection has trouble with: the same on all machines."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor


def _uniform_bits(n: int, g: torch.Generator) -> Tensor:
    return torch.randint(-(2**31), 2**31, (n,), generator=g).to(torch.int32).view(torch.float32)


def _normal(n: int, g: torch.Generator) -> Tensor:
    return torch.randn(n, generator=g)


def _student(n: int, g: torch.Generator) -> Tensor:
    return torch.randn(n, generator=g) / torch.randn(3, n, generator=g).square().mean(0).sqrt()


def _layers(n: int, g: torch.Generator) -> Tensor:
    scale = 10.0 ** (-6 + 4 * torch.arange(n) / max(1, n - 1))
    return torch.randn(n, generator=g) * scale


def _sprinkled(values: list[float]) -> Callable[[int, torch.Generator], Tensor]:
    def make(n: int, g: torch.Generator) -> Tensor:
        made = torch.randn(n, generator=g)
        for value in values:
            made[torch.randint(n, (max(1, n // 50),), generator=g)] = value
        return made

    return make


def _one_place(n: int, g: torch.Generator) -> Tensor:
    made = torch.randn(n, generator=g) * 1e-3
    made[n // 3 : n // 3 + max(1, n // 40)] *= 1e6
    return made


FAMILIES: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "normal": _normal,
    "laplace": lambda n, g: torch.rand(n, generator=g).log() * (torch.randint(2, (n,), generator=g) * 2 - 1),
    "student": _student,
    "lognormal": lambda n, g: (2 * torch.randn(n, generator=g)).exp(),
    "power law": lambda n, g: (1 - torch.rand(n, generator=g)).clamp_min(1e-6) ** -1.5,
    "narrow": lambda n, g: 1 + 3e-5 * torch.rand(n, generator=g),
    "layers": _layers,
    "all equal": lambda n, g: torch.full((n,), -1.25),
    "two values": lambda n, g: torch.where(torch.rand(n, generator=g) < 0.05, 2.0, -1.0),
    "zeros": lambda n, g: torch.zeros(n),
    "signed zeros": lambda n, g: torch.where(torch.rand(n, generator=g) < 0.5, -0.0, 0.0),
    "mostly zeros": lambda n, g: torch.where(torch.rand(n, generator=g) < 0.001, torch.randn(n, generator=g), 0.0),
    "denormals": lambda n, g: torch.randn(n, generator=g) * 1e-40,
    "infinities": _sprinkled([math.inf, -math.inf]),
    "nan": _sprinkled([math.nan, math.inf]),
    "all nan": lambda n, g: torch.full((n,), math.nan),
    "overflow": lambda n, g: torch.full((n,), torch.finfo(torch.float32).max) * torch.rand(n, generator=g),
    "ascending": lambda n, g: torch.randn(n, generator=g).abs().sort().values,
    "descending": lambda n, g: -torch.randn(n, generator=g).abs().sort(descending=True).values,
    "one place": _one_place,
    "few values": lambda n, g: torch.randn(n, generator=g).to(torch.float8_e5m2).float(),
    "any bits": _uniform_bits,
}


def family(name: str, elements: int, seed: int, dtype: torch.dtype) -> Tensor:
    """One input. Shape (elements,)."""
    return FAMILIES[name](elements, torch.Generator().manual_seed(seed)).to(dtype)


@functools.cache
def steady_residual(elements: int, k: int, steps: int = 1000) -> Tensor:
    """What error feedback leaves behind after many steps: it piles up just below the threshold. Float32."""
    generator = torch.Generator().manual_seed(elements)
    mean, residual = 0.1 * torch.randn(elements, generator=generator), torch.zeros(elements)
    for _ in range(steps):
        residual += mean + torch.randn(elements, generator=generator)
        residual[residual.abs().topk(k, sorted=False).indices] = 0.0
    return residual
