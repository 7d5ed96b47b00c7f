"""The kernels as custom operators of torch: `torch.compile` leaves them whole, and they launch without waiting.

An operator takes tensors and numbers alone, so a state comes as its memory and the numbers that define its layout.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.kernels.backend import backend_for
from runtime.kernels.checks import RESIDUALS, check_apart, check_memory, check_unpack_memory
from runtime.kernels.reference import ef_topk_torch, ms_topk_torch, unpack_torch
from runtime.kernels.source import UNPACK, UNPACK_PART, Program
from runtime.kernels.state import CHECKED, TopkState, layout_of

ALL_AT_ONCE, ONE_BY_ONE = 0, 1
"""Ways to launch the phases: all by one kernel, or by one kernel each (for comparison)."""

PHASES = 6


@torch.library.custom_op("commplanner::ef_topk_", mutates_args=("residuals", "out", "memory"))
def ef_topk_operator(
    gradient: Tensor,
    residuals: Sequence[Tensor],
    out: Sequence[Tensor],
    memory: Tensor,
    swapped: Tensor | None,
    numbers: Sequence[int],
) -> None:
    """Select as `runtime.kernels.ef_topk_` and `ms_topk_` do; `numbers`: (whether MSTopK's rule holds, seed, launches),
    and those of the layout of the memory.
    """
    random_ties, seed, launches, *segments = numbers
    layout = layout_of(tuple(segments))
    check_memory(layout, memory)
    if not gradient.numel():
        return
    state = TopkState(layout, memory)
    names = ("state", "gradient", *RESIDUALS, "values", "indices")
    _check_apart_once(list(zip(names, (memory, gradient, *residuals, *out), strict=True)))
    backend = backend_for(memory.device)
    if backend is None:
        exchanged = swapped is not None and bool(swapped)
        _by_reference(state, gradient, residuals[::-1] if exchanged else residuals, out, seed if random_ties else None)
        return
    tensors = [tensor.data_ptr() for tensor in (gradient, *residuals, *out)]
    where = [memory.data_ptr() + 4 * part.start for part in layout.parts.values()]
    counts = [len(layout.elements), sum(layout.tiles), sum(layout.chunks)]
    kernel = f"ef_topk_{_name(gradient)}_{_name(out[0])}"
    program = Program(name="topk", shape=layout.shape)
    words = [*tensors, 0 if swapped is None else swapped.data_ptr(), *where, *counts]
    grid = min(backend.blocks(program, kernel), words[-2])
    spans = [(0, PHASES - 1)] if launches == ALL_AT_ONCE else [(phase, phase) for phase in range(PHASES)]
    for first, last in spans:
        backend.launch(program, kernel, grid, as_words([*words, first, last, random_ties, seed & (2**64 - 1)]))


@ef_topk_operator.register_fake
def _(*arguments: object) -> None:
    return None


def as_words(values: Sequence[int]) -> ctypes.Array[ctypes.c_uint64]:
    """Return the words of a kernel's argument."""
    return (ctypes.c_uint64 * len(values))(*values)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_apart_once(named: list[tuple[str, Tensor]]) -> None:
    """Raise ValueError if tensors share memory; the first one is a state's, and a call with tensors at the same places
    as in its last call is not checked again.
    """
    addresses = tuple(tensor.data_ptr() for _, tensor in named)
    if CHECKED.get(addresses[0]) != addresses:
        check_apart(named)
        CHECKED[addresses[0]] = addresses


def _by_reference(
    state: TopkState, gradient: Tensor, residuals: Sequence[Tensor], out: Sequence[Tensor], seed: int | None
) -> None:
    """Select segment by segment in torch; with a seed, by MSTopK's rule."""
    elements, k = list(state.layout.elements), list(state.layout.k)
    segments = zip(*(tensor.split(elements) for tensor in (gradient, *residuals)), strict=True)
    places = zip(*(tensor.split(k) for tensor in out), strict=True)
    start = 0
    for i, ((part, residual, new_residual), (values, indices)) in enumerate(zip(segments, places, strict=True)):
        if seed is None:
            found = ef_topk_torch(part, residual, k[i])
        else:
            found = ms_topk_torch(part, residual, k[i], seed=seed, segment=i)
        values.copy_(found[0])
        indices.copy_(found[1] + start)
        new_residual.copy_(found[2])
        state.nonfinite[i] = int(not bool(found[0].isfinite().all()))
        start += part.numel()


@torch.library.custom_op("commplanner::unpack_", mutates_args=("sums",))
def unpack_operator(sums: Tensor, values: Tensor, indices: Tensor, factor: float) -> None:
    """Add up messages as `runtime.kernels.unpack_` does."""
    check_unpack_memory(sums, values, indices)
    if not sums.numel():
        return
    backend = backend_for(sums.device)
    if backend is None or not values.numel():
        sums.copy_(unpack_torch(values, indices, sums.numel(), factor=factor, dtype=sums.dtype))
        return
    kernel = f"unpack_{_name(values)}_{_name(sums)}"
    ranks, k = values.shape
    (bits,) = struct.unpack("<I", struct.pack("<f", factor))
    words = [values.data_ptr(), indices.data_ptr(), sums.data_ptr(), ranks, k, values.stride(0), indices.stride(0)]
    elements = UNPACK_PART * UNPACK.shape.threads // 32  # of a block at a time
    grid = min(backend.blocks(UNPACK, kernel), -(-sums.numel() // elements))
    backend.launch(UNPACK, kernel, grid, as_words([*words, sums.numel(), bits]))


@unpack_operator.register_fake
def _(*arguments: object) -> None:
    return None
