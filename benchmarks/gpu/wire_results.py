"""Everything that a wire format computes of one vector, to be compared with the same of elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.sparse.compressors.wire import NO_RESIDUAL, Cut, StepResidual, WireCompressor

GUARD = 64
"""Elements around what is written, which have to stay."""


def bits(tensor: Tensor) -> Tensor:
    """To compare −0 and NaN, too."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Bit for bit."""
    return all(torch.equal(bits(one), bits(other)) for one, other in zip(found, expected, strict=True))


def wire_results(
    compressor: WireCompressor, parts: int, gradient: Tensor, residual: Tensor, swapped: Tensor | None = None
) -> tuple[Tensor, ...]:
    """All that is written, with what lies around it. `swapped`: see `StepResidual`."""
    n, before, device = gradient.numel(), (gradient.clone(), residual.clone()), gradient.device
    cut = compressor.cut(n, parts, torch.float32)
    room, sums, decoded = (torch.full((count + 2 * GUARD,), 7.0, device=device) for count in (n, cut.share, n))
    around = [
        torch.full((count, cut.row_bytes + 16), 7, dtype=torch.uint8, device=device) for count in (parts, parts, 1, 1)
    ]
    rows, plain, own, lossy = (bytes_[:, 8:-8] for bytes_ in around)
    # `plain` and `lossy` are what is sent where nothing is kept.
    mine, inside = slice(0, min(n, cut.share)), slice(GUARD, -GUARD)
    one, other = (room[inside], residual) if swapped is not None and swapped else (residual, room[inside])
    kept = StepResidual(one, other, swapped)
    compressor.compress(gradient, kept, rows, cut, 0)
    compressor.compress(gradient, NO_RESIDUAL, plain, cut, 0)
    compressor.decode(rows, decoded[inside], cut)
    compressor.add_up(rows, sums[inside], cut)
    compressor.combine(rows, own, kept.part(mine), cut, mine.stop, 0)
    compressor.combine(rows, lossy, NO_RESIDUAL, cut, mine.stop, 0)
    if not same((gradient, residual), before):
        raise AssertionError("encoding has changed what it was given")
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
