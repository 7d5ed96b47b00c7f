"""One comparison to the bit for all kinds of input; these are the benchmark's, which checks devices by them."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu_topk.inputs import FAMILIES, family, steady_residual
from runtime.kernels import TopkState, ef_topk_, ef_topk_torch
from runtime.kernels.backend import Backend, installed
from runtime.kernels.checks import FLOATS
from runtime.plan import CompressorSpec
from runtime.sparse.compressors.wire import Cut, WireCompressor, make_wire

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

GUARD = 64
"""Elements around what a kernel writes, which it must leave alone."""


def bits(tensor: Tensor) -> Tensor:
    """To compare −0 and NaN, too."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Bit for bit."""
    return all(torch.equal(bits(one), bits(other)) for one, other in zip(found, expected, strict=True))


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
        ef_topk_(gradient, residual, new_residual, values, indices, state, **options)  # type: ignore[arg-type]
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
    expected = _wire(compressor, parts, gradient, residual)
    with installed("cpu", backend):
        assert compressor.runs_on(gradient.device, compressor.cut(gradient.numel(), parts, torch.float32))
        found = _wire(compressor, parts, gradient, residual, torch.tensor([int(swapped)], dtype=torch.int32))
    assert same(found, expected)
    return found[1][GUARD:-GUARD]


def _wire(
    compressor: WireCompressor, parts: int, gradient: Tensor, residual: Tensor, swapped: Tensor | None = None
) -> tuple[Tensor, ...]:
    """All that is written, with what lies around it."""
    n, before = gradient.numel(), (gradient.clone(), residual.clone())
    cut = compressor.cut(n, parts, torch.float32)
    room, sums, decoded = (torch.full((count + 2 * GUARD,), 7.0) for count in (n, cut.share, n))
    around = [torch.full((count, cut.row_bytes + 16), 7, dtype=torch.uint8) for count in (parts, parts, 1, 1)]
    rows, plain, own, lossy = (bytes_[:, 8:-8] for bytes_ in around)
    # `plain` and `lossy` are what is sent where nothing is kept.
    mine, inside = slice(0, min(n, cut.share)), slice(GUARD, -GUARD)
    kept = (residual, room[inside])
    if swapped is not None and swapped:
        kept = (kept[1], kept[0])
    compressor.compress(gradient, *kept, rows, cut, 0, swapped=swapped)
    compressor.compress(gradient, None, None, plain, cut, 0)
    compressor.decode(rows, decoded[inside], cut)
    compressor.add_up(rows, sums[inside], cut)
    compressor.combine(rows, own, kept[0][mine], kept[1][mine], cut, mine.stop, 0, swapped=swapped)
    compressor.combine(rows, lossy, None, None, cut, mine.stop, 0)
    assert same((gradient, residual), before)
    for filled in (rows, plain, own, lossy):
        _forget_odd(filled, cut)
    return around[0], room, *(torch.where(t.isnan(), torch.nan, t) for t in (sums, decoded)), *around[1:]


def _forget_odd(rows: Tensor, cut: Cut) -> None:
    """Of what is not finite, codes do not count; every NaN is alike."""
    codes, scales = cut.codes(rows), cut.scales(rows)
    if scales is None:
        codes.masked_fill_(codes.isnan(), torch.nan)
    else:
        words = codes.view({1: torch.int8, 2: torch.int16}[codes.element_size()])
        words.view(*scales.shape, cut.width).masked_fill_(scales.isnan()[..., None], 0)
