"""Compressors that send some of the elements: values and where they belong, and keep the rest for later steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from runtime.compressors.exact import select_exact
from runtime.compressors.magnitudes import seed_of
from runtime.compressors.mstopk import select_mstopk
from runtime.compressors.options import Segment
from runtime.compressors.sampled import select_sampled

Selector = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]
"""(residual, gradient, total, k, seed) → k ascending positions; writes residual + gradient into `total`."""

SELECTORS: Mapping[str, Selector] = MappingProxyType(
    {"exact": select_exact, "mstopk": select_mstopk, "sampled": select_sampled}
)
"""How `topk` may find its elements."""


class SparseCompressor:
    """Sends k elements of a buffer, the same number in each step.

    Values are those of residual + gradient, NaN and ±Inf among them: with every selector but the random one these count
    as the largest, so that all ranks see them. Such a step is to be discarded: what does not fit into k stays in the
    new residual as it is.
    """

    def __init__(self, segments: Sequence[Segment], selector: Selector) -> None:
        self.segments = tuple(segments)
        """What is selected from separately; nothing else of the buffer has elements."""
        self.k = sum(segment.k for segment in segments)
        """Elements that are sent in all."""
        self._selector = selector

    def at_least(self, density: float) -> SparseCompressor:
        """The same, with k of each part raised to this share of its elements."""
        segments = [replace(one, k=max(one.k, math.floor(density * one.elements))) for one in self.segments]
        return SparseCompressor(segments, self._selector)

    def compress(self, gradient: Tensor, residual: Tensor, new_residual: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """(values, indices) of what is sent; indices are int32, ascending, in the whole buffer.

        Args:
            gradient: 1-D, in any floating dtype; unchanged.
            residual: what earlier steps have not sent, in the dtype that is added up in and sent; unchanged.
            new_residual: becomes what this step does not send; other memory than `residual` and `gradient`.
            step: number of the step, the same on all ranks; selectors that draw lots draw others in each.
        """
        chosen = []
        for segment in self.segments:
            part = slice(segment.start, segment.start + segment.elements)
            seed = seed_of(segment.name, step)
            found = self._selector(residual[part], gradient[part], new_residual[part], segment.k, seed)
            chosen.append(found.add_(segment.start))
        indices = torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64, device=residual.device)
        values = new_residual.index_select(0, indices)
        new_residual.index_fill_(0, indices, 0.0)
        return values, indices.to(torch.int32)
