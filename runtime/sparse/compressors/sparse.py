"""Compressors that send some of the elements: values and where they belong, and keep the rest for later steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from runtime.sparse.compressors.device import DeviceSelection, has_kernels
from runtime.sparse.compressors.exact import select_exact
from runtime.sparse.compressors.magnitudes import seed_of
from runtime.sparse.compressors.mstopk import select_mstopk
from runtime.sparse.compressors.options import Segment
from runtime.sparse.compressors.sampled import select_sampled

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
        by_kernel = selector in (select_exact, select_mstopk)
        self._on_device = DeviceSelection(segments, random_ties=selector is select_mstopk) if by_kernel else None

    def selects_on(self, device: torch.device, *dtypes: torch.dtype) -> bool:
        """Whether kernels of the device do it: then `select_on_device` does what `compress` does."""
        if self._on_device is None or not self.k:
            return False
        return all(has_kernels(device, dtype) for dtype in dtypes)

    def select_on_device(
        self, gradient: Tensor, buffers: tuple[Tensor, Tensor, Tensor], out: tuple[Tensor, Tensor], step: int
    ) -> None:
        """In one launch, without memory of its own.

        Args:
            gradient: 1-D, float32 or bfloat16; unchanged.
            buffers: of the residual, the next one, and whether they have changed places (one int32).
            out: (values, indices), become what is sent.
            step: see `compress`.
        """
        assert self._on_device is not None
        one, other, swapped = buffers
        seed = seed_of(self.segments[0].name, step)
        self._on_device.select(gradient, one, other, out, swapped=swapped, seed=seed)

    def compress(self, gradient: Tensor, residual: Tensor, new_residual: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """(values, indices) of what is sent; indices are int32, ascending, in the whole buffer.

        Args:
            gradient: 1-D, in any floating dtype; unchanged.
            residual: what earlier steps have not sent, in the dtype that is added up in and sent; unchanged.
            new_residual: becomes what this step does not send; other memory than `residual` and `gradient`.
            step: number of the step, the same on all ranks; selectors that draw lots draw others in each.
        """
        if self.selects_on(residual.device, residual.dtype, gradient.dtype):
            values = residual.new_empty(self.k)
            indices = torch.empty(self.k, dtype=torch.int32, device=residual.device)
            unswapped = torch.zeros(1, dtype=torch.int32, device=residual.device)
            self.select_on_device(gradient, (residual, new_residual, unswapped), (values, indices), step)
            return values, indices
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
