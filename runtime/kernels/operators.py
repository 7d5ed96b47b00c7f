"""The kernels as custom operators of torch: `torch.compile` leaves them whole, and they launch without waiting.

An operator takes a state's memory, and its segments as numbers, from which its layout follows.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.kernels.backend import backend_for
from runtime.kernels.checks import check_apart, check_memory, check_unpack_memory
from runtime.kernels.reference import ef_topk_torch, ms_topk_torch, unpack_torch
from runtime.kernels.source import UNPACK, UNPACK_PART, Program, Shape
from runtime.kernels.state import POINTED, WORDS_OF_SEGMENT, TopkState, layout_of

ALL_AT_ONCE, ONE_BY_ONE = 0, 1
"""How phases are launched: all by one kernel, or by one kernel each (for comparison)."""

PHASES = 6


@torch.library.custom_op(
    "commplanner::ef_topk_", mutates_args=("residuals", "new_residuals", "values", "indices", "memory")
)
def ef_topk_operator(
    gradients: Sequence[Tensor],
    residuals: Sequence[Tensor],
    new_residuals: Sequence[Tensor],
    values: Tensor,
    indices: Tensor,
    memory: Tensor,
    swapped: Tensor | None,
    elements: Sequence[int],
    k: Sequence[int],
    shape: Sequence[int],
    capacity: int | None,
    random_ties: bool,
    seed: int,
    launches: int,
) -> None:
    """See `runtime.kernels.ef_topk_`; gradients of one element are one flat buffer of all segments."""
    # Operators take tensors and numbers alone, so a state comes as its memory and what its layout follows from.
    threads, vectors, min_blocks = shape
    sizes = Shape(threads=threads, vectors=vectors, min_blocks=min_blocks)
    layout = layout_of(tuple(elements), tuple(k), sizes, capacity)
    check_memory(layout, memory)
    if not sum(elements):
        return
    state = TopkState(layout, memory)
    pointers = _point_to(state, gradients, residuals, new_residuals, values, indices)
    backend = backend_for(memory.device)
    if backend is None:
        _by_reference(state, gradients, residuals, new_residuals, values, indices, swapped, random_ties, seed)
        return
    where = [state.memory.data_ptr() + 4 * part.start for part in layout.parts.values()]
    outputs = [values.data_ptr(), indices.data_ptr(), 0 if swapped is None else swapped.data_ptr()]
    counts = [len(elements), sum(layout.tiles), sum(layout.chunks)]
    options = [int(random_ties), seed & (2**64 - 1)]
    kernel = f"ef_topk_{_name(gradients[0])}_{_name(values)}"
    program = Program(name="topk", shape=sizes)
    words = [*pointers, *outputs, *where, *counts]
    grid = min(backend.blocks(program, kernel), words[-2])
    spans = [(0, PHASES - 1)] if launches == ALL_AT_ONCE else [(phase, phase) for phase in range(PHASES)]
    for first, last in spans:
        backend.launch(program, kernel, grid, _words([*words, first, last, *options]))


@ef_topk_operator.register_fake
def _(*arguments: object) -> None:
    return None


def _words(values: list[int]) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * len(values))(*values)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _point_to(
    state: TopkState, gradients: Sequence[Tensor], residuals: Sequence[Tensor], new_residuals: Sequence[Tensor],
    values: Tensor, indices: Tensor,
) -> tuple[int, int, int]:  # fmt: skip
    """Addresses that the table of the state's segments counts from: of one flat buffer, or 0 for many tensors. Raises
    ValueError: tensors share memory, or they have moved while a CUDA graph is captured.
    """
    key = state.memory.data_ptr()
    tensors = (*gradients, *residuals, *new_residuals, values, indices)
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    addressed, before = POINTED.get(key, (False, ()))
    flat = len(gradients) == 1
    if before != addresses or addressed == flat:
        named = [("state", state.memory), ("values", values), ("indices", indices)]
        for name, given in (("gradient", gradients), ("residual", residuals), ("new_residual", new_residuals)):
            named += [(name if flat else f"{name}s[{i}]", tensor) for i, tensor in enumerate(given)]
        check_apart(named)
        if addressed == flat or not flat:
            _write(state, None if flat else (gradients, residuals, new_residuals))
        POINTED[key] = (not flat, addresses)
    return (addresses[0], addresses[1], addresses[2]) if flat else (0, 0, 0)


def _write(state: TopkState, tensors: Sequence[Sequence[Tensor]] | None) -> None:
    """Tell the device where segments lie: when that has changed, and not in every step."""
    memory = state.memory
    places = None
    if tensors is not None:
        rows = zip(*tensors, strict=True)
        places = [tuple(tensor.data_ptr() // tensor.element_size() for tensor in row) for row in rows]
    table = state.layout.table(places)
    here = state.part("segments").view(torch.int64).view(-1, WORDS_OF_SEGMENT)
    if memory.device.type != "cuda":
        here.copy_(table)
        return
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "gradients: found tensors that have moved since the last call, while a CUDA graph is captured; expected "
            "those of a call before the capture: make one with the same tensors first"
        )
    # From pinned memory: then the copy is queued on the stream, and the host does not wait.
    here.copy_(table.pin_memory(), non_blocking=True)


def _by_reference(
    state: TopkState, gradients: Sequence[Tensor], residuals: Sequence[Tensor], new_residuals: Sequence[Tensor],
    values: Tensor, indices: Tensor, swapped: Tensor | None, random_ties: bool, seed: int,
) -> None:  # fmt: skip
    if swapped is not None and bool(swapped):
        residuals, new_residuals = new_residuals, residuals
    sources: list[Sequence[Tensor]] = [gradients, residuals, new_residuals]
    if len(gradients) == 1:
        sources = [column[0].split(list(state.layout.elements)) for column in sources]
    layout = state.layout
    at = start = 0
    for i, (gradient, residual, new_residual) in enumerate(zip(*sources, strict=True)):
        kept = slice(at, at + layout.k[i])
        if random_ties:
            found = ms_topk_torch(gradient, residual, layout.k[i], seed=seed, segment=i)
        else:
            found = ef_topk_torch(gradient, residual, layout.k[i])
        values[kept], indices[kept] = found[0], found[1] + start
        new_residual.copy_(found[2])
        state.nonfinite[i] = int(not bool(found[0].isfinite().all()))
        at, start = kept.stop, start + gradient.numel()


@torch.library.custom_op("commplanner::unpack_", mutates_args=("sums",))
def unpack_operator(sums: Tensor, values: Tensor, indices: Tensor, factor: float) -> None:
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
    backend.launch(UNPACK, kernel, grid, _words([*words, sums.numel(), bits]))


@unpack_operator.register_fake
def _(*arguments: object) -> None:
    return None
