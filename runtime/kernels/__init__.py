"""Kernels for gradients of which less is sent: error feedback, selection or narrow codes, and the new residual in one
launch; unpacking.

    state = make_state([gradient.numel()], [k], gradient.device)          # once
    ef_topk_(gradient, residual, new_residual, values, indices, state)    # in every step
    unpack_(sums, all_values, all_indices, factor=1 / ranks)              # of what all ranks sent

Results are those of `ef_topk_torch`, bit for bit, whatever a state has seen before and however many blocks run. On CUDA
tensors nothing is allocated, nothing waits for the host, and calls can be captured in CUDA graphs; the kernels are
compiled when they are first needed (`cuda.py`). On CPU tensors the reference runs, which is slow: it is for tests.
docs/concepts/compression.md tells how it is done, docs/results/gpu.md what has been measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from runtime.kernels.checks import check_selection, check_unpack
from runtime.kernels.operators import ALL_AT_ONCE, ONE_BY_ONE, ef_topk_operator, unpack_operator
from runtime.kernels.reference import ef_topk_torch, ms_topk_torch, unpack_torch
from runtime.kernels.source import Shape
from runtime.kernels.state import TopkState, make_state
from runtime.kernels.wire import WireLayout, wire_combine_, wire_decode_, wire_encode_

__all__ = [
    "ALL_AT_ONCE",
    "ONE_BY_ONE",
    "Shape",
    "TopkState",
    "WireLayout",
    "ef_topk_",
    "ef_topk_segments_",
    "ef_topk_torch",
    "make_state",
    "ms_topk_",
    "ms_topk_torch",
    "unpack_",
    "unpack_torch",
    "wire_combine_",
    "wire_decode_",
    "wire_encode_",
]


def ef_topk_(
    gradient: Tensor, residual: Tensor, new_residual: Tensor, values: Tensor, indices: Tensor, state: TopkState, *,
    swapped: Tensor | None = None, launches: int = ALL_AT_ONCE,
) -> None:  # fmt: skip
    """Select the k largest magnitudes of residual + gradient, of each segment of the state, in one launch.

    The residual stays as it was, so that a step can be undone by not exchanging it with the new one. Equal magnitudes
    are taken by index. NaN and ±Inf are the largest; `state.nonfinite` says whether there was any.

    Args:
        gradient: 1-D, float32 or bfloat16, all segments one behind the other; unchanged.
        residual: as many elements, float32 or bfloat16; unchanged.
        new_residual: likewise; becomes the sum, with 0 where it was selected.
        values: (k of all segments together,), in the residual's dtype; becomes what was selected, by ascending index.
        indices: likewise, int32; becomes the places in `gradient`.
        state: of these segments, from `make_state`, on the tensors' device.
        swapped: one int32; where it is not 0, `residual` and `new_residual` change places.
        launches: `ALL_AT_ONCE`, or `ONE_BY_ONE` with a launch for each phase.

    Raises:
        ValueError: names the argument that does not fit, or that shares memory with another.
    """
    _select([gradient], [residual], [new_residual], values, indices, state, swapped, launches)


def ef_topk_segments_(
    gradients: Sequence[Tensor], residuals: Sequence[Tensor], new_residuals: Sequence[Tensor], values: Tensor,
    indices: Tensor, state: TopkState, *, swapped: Tensor | None = None, launches: int = ALL_AT_ONCE,
) -> None:  # fmt: skip
    """`ef_topk_` for segments that are tensors of their own: one launch for all of them.

    Indices count through all gradients, one behind the other. Tensors may move from step to step, which costs a small
    copy to the device, but not while a CUDA graph is captured.
    """
    _select(gradients, residuals, new_residuals, values, indices, state, swapped, launches, plural=True)


def ms_topk_(
    gradient: Tensor, residual: Tensor, new_residual: Tensor, values: Tensor, indices: Tensor, state: TopkState, *,
    seed: int, swapped: Tensor | None = None,
) -> None:  # fmt: skip
    """As `ef_topk_`, with MSTopK's selection in place of the exact one: see `ms_topk_torch`.

    Args:
        seed: what the random places follow from; the same on no two steps.
    """
    _select([gradient], [residual], [new_residual], values, indices, state, swapped, seed=seed)


def unpack_(sums: Tensor, values: Tensor, indices: Tensor, *, factor: float = 1.0) -> None:
    """Add up all ranks' messages, in order of ranks, and multiply by `factor` (1/ranks for the mean), in one launch.

    Args:
        sums: 1-D, float32 or bfloat16; becomes the sum, with 0 where nothing came.
        values: (ranks, k), float32 or bfloat16, each row contiguous; sums are made in float32.
        indices: likewise, int32; ascending in each row, each below the elements of `sums`.
        factor: what the sums are multiplied by.

    Raises:
        ValueError: names the argument that does not fit, or that shares memory with another.
    """
    check_unpack(sums, values, indices)
    unpack_operator(sums, values, indices, factor)


def _select(
    gradients: Sequence[Tensor], residuals: Sequence[Tensor], new_residuals: Sequence[Tensor], values: Tensor,
    indices: Tensor, state: TopkState, swapped: Tensor | None, launches: int = ALL_AT_ONCE, *,
    plural: bool = False, seed: int | None = None,
) -> None:  # fmt: skip
    check_selection(gradients, residuals, new_residuals, values, indices, state, swapped, plural=plural)
    layout = state.layout
    shape = [layout.shape.threads, layout.shape.vectors, layout.shape.min_blocks]
    ef_topk_operator(
        list(gradients), list(residuals), list(new_residuals), values, indices, state.memory, swapped,
        list(layout.elements), list(layout.k), shape, layout.capacity, seed is not None, seed or 0, launches,
    )  # fmt: skip
