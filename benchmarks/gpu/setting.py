"""What a part is told, and what it gives back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """Where a part runs, and how long it may take."""

    device: torch.device
    """With its number, where it has one: tensors are compared with it."""
    seconds: float
    """What the part should take at the most."""
    begun_s: float = field(default_factory=time.monotonic)

    @property
    def on_device(self) -> bool:
        return self.device.type == "cuda"

    def pick(self, on_device: T, on_cpu: T) -> T:
        """Return the one of two sizes: all else is the same on a CPU."""
        return on_device if self.on_device else on_cpu

    @property
    def left_s(self) -> float:
        return max(0.0, self.seconds - (time.monotonic() - self.begun_s))


@dataclass(frozen=True)
class Found:
    """What a part has to say; plain JSON types."""

    text: str
    """Markdown, for the page."""
    failures: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """What there was no time, or no memory, for."""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def sentence(what: str, failures: Sequence[str]) -> str:
    """Return how many of something failed, with the first of them."""
    if not failures:
        return f"{what}: all good."
    return f"{what}: **{len(failures)} failed**: {'; '.join(failures[:8])}."
