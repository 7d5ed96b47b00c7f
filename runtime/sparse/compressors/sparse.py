"""Compressors that send some of the elements: values and where they belong, and keep the rest for later steps."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from runtime.kernels import TopkState, ef_topk_, make_state, ms_topk_
from runtime.kernels.backend import usable
from runtime.kernels.checks import FLOATS, MOST_RANKS
from runtime.sparse.compressors.magnitudes import seed_of
from runtime.sparse.compressors.options import Segment
from runtime.sparse.compressors.selectors import select_exact, select_mstopk, select_random, select_sampled

Selector = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]
"""(residual, gradient, total, k, seed) → k ascending positions; writes residual + gradient into `total`."""

SELECTORS: Mapping[str, Selector] = {"exact": select_exact, "mstopk": select_mstopk, "sampled": select_sampled}


@functools.cache
def _warn_once(device: torch.device, why: str) -> None:
    warnings.warn(
        f"selection on {device} takes torch's own operations, several times as long as the kernels: {why}; "
        f"`planner doctor` says what works",
        RuntimeWarning,
        stacklevel=2,
    )


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether kernels select from a dtype on a device; warns where these should work and do not."""
    if dtype not in FLOATS or (device.type == "cpu" and usable(device) is not None):
        return False
    why = usable(device)
    if why is not None:
        _warn_once(device, why)
    return why is None


def unpacks(values: Tensor, sums: Tensor) -> bool:
    """Tell whether messages of all ranks (ranks, k) are added up by a kernel."""
    return values.dtype in FLOATS and values.shape[0] <= MOST_RANKS and has_kernels(sums.device, sums.dtype)


class SparseCompressor:
    """Sends k elements of a buffer, the same number in each step.

    Values are those of residual + gradient, NaN and ±Inf among them: with every selector but the random one these count
    as the largest, so that all ranks see them. Such a step is to be discarded: what does not fit into k stays in the
    new residual as it is.
    """

    def __init__(self, segments: Sequence[Segment], selector: Selector) -> None:
        self.segments = tuple(segments)
        """Segments that are selected from separately; nothing else of the buffer has elements."""
        self.k = sum(segment.k for segment in segments)
        self._selector = selector
        self.by_magnitude = selector is not select_random
        """Whether elements that are not finite are chosen first."""
        self._states: dict[torch.device, TopkState] = {}

    def selects_on(self, device: torch.device, *dtypes: torch.dtype) -> bool:
        """Tell whether kernels of the device do it: then `select_on_device` does what `compress` does."""
        if self._selector not in (select_exact, select_mstopk) or not self.k:
            return False
        return all(has_kernels(device, dtype) for dtype in dtypes)

    def select_on_device(
        self, gradient: Tensor, buffers: tuple[Tensor, Tensor, Tensor], out: tuple[Tensor, Tensor], step: int
    ) -> None:
        """Select in one launch, without memory of its own, from a gradient (1-D, float32 or bfloat16; unchanged).
        `buffers`: of the residual, the next one, and whether they have changed places (one int32); `out`: (values,
        indices), become what is sent.
        """
        one, other, swapped = buffers
        if gradient.device not in self._states:
            elements, k = [s.elements for s in self.segments], [s.k for s in self.segments]
            self._states[gradient.device] = make_state(elements, k, gradient.device)
        state = self._states[gradient.device]
        if self._selector is select_exact:
            ef_topk_(gradient, (one, other), out, state, swapped=swapped)
        else:
            seed = seed_of(self.segments[0].name, step)
            ms_topk_(gradient, (one, other), out, state, seed=seed, swapped=swapped)

    def compress(self, gradient: Tensor, residual: Tensor, new_residual: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return (values, indices) of what is sent; indices are int32, ascending, in the whole buffer.

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
