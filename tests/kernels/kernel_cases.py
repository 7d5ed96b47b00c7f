"""One comparison to the bit for all kinds of input; these are the benchmark's, which checks devices by them."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.inputs import FAMILIES, family, steady_residual
from benchmarks.gpu.wire_results import GUARD, bits, same, wire_results
from runtime.kernels import TopkState, ef_topk_, ef_topk_torch
from runtime.kernels.backend import Backend, installed
from runtime.kernels.checks import FLOATS
from runtime.plan import CompressorSpec
from runtime.sparse.compressors.wire import make_wire

__all__ = [
    "FAMILIES",
    "FLOATS",
    "bits",
    "expect_equal",
    "expect_equal_wire",
    "family",
    "left_clean",
    "same",
    "select",
    "steady_residual",
]


def select(
    backend: Backend, state: TopkState, gradient: Tensor, residual: Tensor, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, new residual) by the kernel, which writes nowhere else."""
    rooms = [
        torch.full((count + 3 * GUARD,), 7, dtype=dtype)
        for count, dtype in ((state.k, residual.dtype), (state.k, torch.int32), (residual.numel(), residual.dtype))
    ]
    values, indices = (room[GUARD : GUARD + state.k] for room in rooms[:2])
    begin = GUARD + residual.data_ptr() // residual.element_size() % 4  # so that vectors may be read
    new_residual = rooms[2][begin : begin + residual.numel()]
    before = residual.clone(), gradient.clone()
    with installed("cpu", backend):
        ef_topk_(gradient, (residual, new_residual), (values, indices), state, **options)  # type: ignore[arg-type]
    assert same((residual, gradient), before)
    ends = (GUARD + state.k, GUARD + state.k, begin + residual.numel())
    starts = (GUARD, GUARD, begin)
    for room, start, end in zip(rooms, starts, ends, strict=True):
        assert bool((torch.cat((room[:start], room[end:])) == 7).all())
    return values, indices, new_residual


def left_clean(state: TopkState) -> bool:
    """Whether a call has left its room as the next one needs it."""
    return not any(state.part(name).any() for name in ("progress", "control", "histograms"))


def expect_equal(backend: Backend, state: TopkState, gradient: Tensor, residual: Tensor) -> Tensor:
    """Compares the kernel with the reference; returns the new residual."""
    found = select(backend, state, gradient, residual)
    assert same(found, ef_topk_torch(gradient, residual, state.k))
    assert left_clean(state)
    return found[2]


def expect_equal_wire(
    backend: Backend, spec: CompressorSpec, parts: int, gradient: Tensor, residual: Tensor, *, swapped: bool = False
) -> Tensor:
    """Compares kernels with torch, over all that `WireCompressor` does; returns the new residual."""
    compressor = make_wire(spec, parts)
    expected = wire_results(compressor, parts, gradient, residual)
    with installed("cpu", backend):
        assert compressor.runs_on(gradient.device, compressor.cut(gradient.numel(), parts, torch.float32))
        found = wire_results(compressor, parts, gradient, residual, torch.tensor([int(swapped)], dtype=torch.int32))
    assert same(found, expected)
    return found[1][GUARD:-GUARD]
