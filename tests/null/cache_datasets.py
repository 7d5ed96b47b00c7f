"""Datasets that tests of the data cache read, importable by spawned workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SAMPLES = 24


class Numbers:
    """Sample i is (a tensor of so many i's, i); counts what is read in a file, from whichever process."""

    def __init__(self, log: Path | None = None, samples: int = SAMPLES, size: int = 100) -> None:
        self.log = None if log is None else str(log)
        self.samples = samples
        self.size = size

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.note(index)
        return torch.full((self.size,), index, dtype=torch.float32), index

    def note(self, index: int) -> None:
        """Says that a sample was read from the storage."""
        if self.log is not None:
            handle = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(handle, f"{index}\n".encode())
            os.close(handle)


def reads(log: Path) -> list[int]:
    """Which samples were read, in order."""
    return [int(line) for line in log.read_text().split()] if log.exists() else []


class Raw(Numbers):
    """The same, as raw bytes that are decoded; `salt` changes the data without changing anything else."""

    salt = 0

    def read(self, index: int) -> bytes:
        """The raw sample."""
        self.note(index)
        return np.full(self.size, index + self.salt, dtype=np.int32).tobytes()

    def decode(self, raw: bytes) -> tuple[Tensor, int]:
        """The sample."""
        values = torch.frombuffer(bytearray(raw), dtype=torch.int32)
        return values.to(torch.float32), int(values[0])


class Given:
    """A list of samples, of whatever types."""

    def __init__(self, *samples: Any) -> None:
        self.given = samples

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, index: int) -> Any:
        return self.given[index]


def add_noise(sample: tuple[Tensor, int]) -> tuple[Tensor, int]:
    """A random augmentation, in place."""
    return sample[0].add_(torch.rand(1)), sample[1]
