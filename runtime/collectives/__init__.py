"""Collectives that a bucket can travel by, one file each. `COLLECTIVES` is the only list of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from runtime.collectives.library import LibraryAllReduce


class Collective(Protocol):
    """Sums a flat tensor over all ranks, in place."""

    def start(self, flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Starts the sum of `flat` (1-D, the same size and dtype on every rank); `wait()` on the result ends it."""
        ...


COLLECTIVES: Mapping[tuple[str, str], Collective] = {("all_reduce", "library"): LibraryAllReduce()}
"""Registry: (collective, algorithm) → implementation. Add one here and the contract test covers it."""
