"""Kernels for gradients that are sent in part: error feedback, selection or narrow codes, and the new residual in one
launch; unpacking.

    state = make_state([gradient.numel()], [k], gradient.device)                # once
    ef_topk_(gradient, (residual, new_residual), (values, indices), state)      # in every step
    unpack_(sums, all_values, all_indices, factor=1 / ranks)                    # of what all ranks sent

Results are those of `ef_topk_torch`, bit for bit, whatever a state has seen before and however many blocks run. On CUDA
tensors nothing is allocated, nothing waits for the host, and calls can be captured in CUDA graphs; the kernels are
compiled when they are first needed (`cuda.py`). On CPU tensors the reference runs, which is slow: it is for tests.
docs/concepts/compression.md explains the method, docs/results/gpu.md has measurements.
"""

from __future__ import annotations

from torch import Tensor

from runtime.kernels.checks import Pair, check_selection, check_unpack
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
    gradient: Tensor, residuals: Pair, out: Pair, state: TopkState, *, swapped: Tensor | None = None,
    launches: int = ALL_AT_ONCE,
) -> None:  # fmt: skip
    """Select the k largest magnitudes of residual + gradient, of each segment of the state, in one launch.

    The residual stays as it was, so that a step can be undone by not exchanging it with the new one. Equal magnitudes
    are taken by index. NaN and ±Inf are the largest; `state.nonfinite` reports whether there was any.

    Args:
        gradient: 1-D, float32 or bfloat16, all segments one after the other; unchanged.
        residuals: (residual, new residual), each with as many elements, float32 or bfloat16. The first is unchanged,
            the second becomes the sum, with 0 where it was selected.
        out: (values, indices), each of as many elements as the k of all segments together: what was selected, by
            ascending index, in the residual's dtype, and its places in `gradient`, int32.
        state: of these segments, from `make_state`, on the tensors' device.
        swapped: one int32; if it is not 0, the two residuals change places.
        launches: `ALL_AT_ONCE`, or `ONE_BY_ONE` with a launch for each phase.

    Raises:
        ValueError: a tensor does not fit, or shares memory with another; names it.
    """
    check_selection(gradient, residuals, out, state, swapped)
    numbers = [0, 0, launches, *state.layout.numbers]
    ef_topk_operator(gradient, list(residuals), list(out), state.memory, swapped, numbers)


def ms_topk_(
    gradient: Tensor, residuals: Pair, out: Pair, state: TopkState, *, seed: int, swapped: Tensor | None = None
) -> None:
    """Select as `ef_topk_` does, by MSTopK's rule in place of the exact one; `ms_topk_torch` defines it.

    `seed` determines the random places; it should differ between steps.
    """
    check_selection(gradient, residuals, out, state, swapped)
    numbers = [1, seed, ALL_AT_ONCE, *state.layout.numbers]
    ef_topk_operator(gradient, list(residuals), list(out), state.memory, swapped, numbers)


def unpack_(sums: Tensor, values: Tensor, indices: Tensor, *, factor: float = 1.0) -> None:
    """Add up all ranks' messages, in order of ranks, and multiply by `factor` (1/ranks for the mean), in one launch.

    Args:
        sums: 1-D, float32 or bfloat16; becomes the sum, with 0 where nothing came.
        values: (ranks, k), float32 or bfloat16, each row contiguous; sums are made in float32.
        indices: of the same shape, int32; ascending in each row, each below the elements of `sums`.
        factor: what the sums are multiplied by.

    Raises:
        ValueError: names the argument that does not fit, or that shares memory with another.
    """
    check_unpack(sums, values, indices)
    unpack_operator(sums, values, indices, factor)
