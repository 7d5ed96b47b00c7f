"""Vectors in narrow codes, on a device: residual + gradient encoded in one pass over memory, and rows added up in one.

Results are those of `runtime.sparse.compressors.wire` on a CPU, bit for bit, but for codes of a block that is not
finite: its scale is NaN. `bfloat16` has no scales. No operator allocates, waits for the host, or has a reference of its
own: without kernels, `WireCompressor` does it in torch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import EnvironmentFailure
from runtime.kernels.backend import backend_for
from runtime.kernels.checks import RESIDUALS, Pair, check_apart, check_float, check_residuals, check_tensor
from runtime.kernels.operators import as_words
from runtime.kernels.source import WIRE
from runtime.kernels.state import MAX_ELEMENTS


@dataclass(frozen=True)
class WireLayout:
    """Places of a vector in rows of bytes, and the numbers of the format."""

    code: torch.dtype
    """One of `WIRE_CODES`."""
    share: int
    """Elements in a row."""
    width: int
    """Elements of a block, `WIRE_MOST` at most; without scales, those that a warp works on at a time."""
    scales_at: int
    """Byte of a row where scales (float32) begin."""
    row_bytes: int
    """Least bytes of a row."""
    largest: float
    """Value of the largest code, without its scale; of bfloat16, what is sent of all above."""
    scales: tuple[int, float, float] = (0, 0.0, 0.0)
    """(bits of a scale that are 0, as a mask, smallest scale, largest scale)."""

    def numbers(self) -> list[int]:
        """Return the last words of the kernels' arguments."""
        dropped, low, high = self.scales
        return [self.share, self.width, self.scales_at, _bits(self.largest), _bits(low), _bits(high), dropped]

    @property
    def name(self) -> str:
        return str(self.code).removeprefix("torch.")


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def wire_encode_(
    gradient: Tensor, residuals: Pair | None, rows: Tensor, layout: WireLayout, *, swapped: Tensor | None = None
) -> None:
    """Encode residual + gradient; what that loses is the new residual.

    Args:
        gradient: 1-D, float32 or bfloat16; unchanged.
        residuals: (residual, new residual), each with as many elements, float32. The first is unchanged, the second
            becomes what codes lose. None: nothing is kept.
        rows: bytes, shape (parts, layout.row_bytes), each row contiguous; bytes in which no element has a place stay.
        layout: of the vector.
        swapped: one int32; if it is not 0, the two residuals change places.

    Raises:
        ValueError: a tensor does not fit, or shares memory with another; names it.
        EnvironmentFailure: no kernels run on the device.
    """
    check_float("gradient", gradient.dtype)
    check_tensor("gradient", gradient, gradient.numel(), gradient.dtype, rows.device)
    _check_rows("rows", rows, layout, gradient.numel())
    _check_kept(residuals, swapped, gradient.numel(), [("gradient", gradient), ("rows", rows)])
    wire_encode_operator(gradient, list(residuals or ()), swapped, rows, layout.name, layout.numbers())


def wire_combine_(
    received: Tensor, residuals: Pair | None, own: Tensor, elements: int, layout: WireLayout, *,
    swapped: Tensor | None = None,
) -> None:  # fmt: skip
    """Add up the rows of one part, in their order, and encode the sum; what that loses is added to the new residual.

    Args:
        received: bytes, shape (ranks, layout.row_bytes), each row contiguous; unchanged.
        residuals, swapped: as with `wire_encode_`, of the part.
        own: bytes, shape (1, layout.row_bytes); filled.
        elements: of the part; `layout.share` or fewer.
        layout: of the vector.

    Raises:
        ValueError, EnvironmentFailure: as with `wire_encode_`.
    """
    for name, rows in (("received", received), ("own", own)):
        _check_rows(name, rows, layout, elements)
    _check_part(elements, layout)
    _check_kept(residuals, swapped, elements, [("received", received), ("own", own)])
    numbers = [elements, *layout.numbers()]
    wire_combine_operator(received, list(residuals or ()), swapped, own, layout.name, numbers)


def wire_decode_(rows: Tensor, sums: Tensor, layout: WireLayout, *, add_up: bool) -> None:
    """Fill `sums` (1-D, float32) with what rows, shape (parts, layout.row_bytes), hold, where −0 becomes 0; or, with
    `add_up`, with the sum of rows of one part, in their order. Every NaN is the quiet one without payload.

    Raises:
        ValueError, EnvironmentFailure: as with `wire_encode_`.
    """
    check_tensor("sums", sums, sums.numel(), torch.float32, rows.device)
    _check_rows("rows", rows, layout, 0 if add_up else sums.numel())
    if add_up:
        _check_part(sums.numel(), layout)
    check_apart([("rows", rows), ("sums", sums)])
    wire_decode_operator(rows, sums, add_up, layout.name, layout.numbers())


def _check_rows(name: str, rows: Tensor, layout: WireLayout, elements: int) -> None:
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] < layout.row_bytes or rows.stride(1) != 1:
        raise ValueError(
            f"{name}: found {rows.dtype} of the shape {tuple(rows.shape)} and strides {rows.stride()}; expected bytes "
            f"(uint8) of the shape (rows, {layout.row_bytes} or more), each row contiguous"
        )
    if rows.data_ptr() % 4 or _stride(rows) % 4:
        raise ValueError(f"{name}: found a row at an address that is no multiple of 4; expected one for its scales")
    if len(rows) * layout.share < elements:
        raise ValueError(f"{name}: found {len(rows)} rows of {layout.share} elements; expected room for {elements}")
    if max(elements, len(rows) * layout.share) > MAX_ELEMENTS:
        raise ValueError(f"{name}: found {len(rows)} × {layout.share} elements; expected at most {MAX_ELEMENTS}")


def _check_part(elements: int, layout: WireLayout) -> None:
    if elements > layout.share:
        raise ValueError(f"elements: found {elements}; expected at most {layout.share}, those of one part")


def _check_kept(
    residuals: Pair | None, swapped: Tensor | None, elements: int, others: list[tuple[str, Tensor]]
) -> None:
    check_residuals(residuals, swapped, elements, torch.float32, others[0][1].device)
    check_apart([*others, *zip(RESIDUALS, residuals or (), strict=False)])


@torch.library.custom_op("commplanner::wire_encode_", mutates_args=("residuals", "rows"))
def wire_encode_operator(
    gradient: Tensor,
    residuals: Sequence[Tensor],
    swapped: Tensor | None,
    rows: Tensor,
    code: str,
    numbers: Sequence[int],
) -> None:
    """Encode as `wire_encode_` does; a layout comes as its numbers, residuals that are not kept as an empty list."""
    what = str(gradient.dtype).removeprefix("torch.")
    at = [gradient.data_ptr(), *_addresses(residuals, swapped), rows.data_ptr(), 0, 0, _stride(rows), 0]
    _launch(f"wire_{code}_{what}", at, gradient.numel(), numbers, rows.device)


@torch.library.custom_op("commplanner::wire_combine_", mutates_args=("residuals", "own"))
def wire_combine_operator(
    received: Tensor,
    residuals: Sequence[Tensor],
    swapped: Tensor | None,
    own: Tensor,
    code: str,
    numbers: Sequence[int],
) -> None:
    """Combine as `wire_combine_` does; `numbers`: the elements, and those of the layout."""
    at = [received.data_ptr(), *_addresses(residuals, swapped), own.data_ptr(), 0]
    strides = [_stride(received), _stride(own), len(received)]
    _launch(f"wire_{code}_combine", at + strides, numbers[0], numbers[1:], own.device)


@torch.library.custom_op("commplanner::wire_decode_", mutates_args=("sums",))
def wire_decode_operator(rows: Tensor, sums: Tensor, add_up: bool, code: str, numbers: Sequence[int]) -> None:
    """Decode as `wire_decode_` does."""
    ranks = len(rows) if add_up else 1
    at = [rows.data_ptr(), 0, 0, 0, 0, sums.data_ptr(), _stride(rows), 0, ranks]
    _launch(f"wire_{code}_decode", at, sums.numel(), numbers, rows.device, no_minus_zero=not add_up)


for _operator in (wire_encode_operator, wire_combine_operator, wire_decode_operator):
    _operator.register_fake(lambda *arguments: None)


def _stride(rows: Tensor) -> int:
    return rows.stride(0) if len(rows) > 1 else 0


def _addresses(residuals: Sequence[Tensor], swapped: Tensor | None) -> list[int]:
    """Return the addresses of the two residuals and of the flag that exchanges them; 0 for what there is not."""
    kept = [tensor.data_ptr() for tensor in residuals] or [0, 0]
    return [*kept, 0 if swapped is None else swapped.data_ptr()]


def _launch(
    kernel: str, at: list[int], elements: int, numbers: Sequence[int], device: torch.device, *,
    no_minus_zero: bool = False,
) -> None:  # fmt: skip
    """Launch a kernel; `at`: the first words of its argument, up to the number of ranks."""
    if not elements:
        return
    backend = backend_for(device)
    if backend is None:
        raise EnvironmentFailure(f"kernels: found the device {device}, expected cuda: WireCompressor does it in torch")
    share, width, *others = numbers
    blocks = -(-elements // share) * -(-share // width)
    grid = min(backend.blocks(WIRE, kernel), -(-blocks // (WIRE.shape.threads // 32)))
    words = [*at, elements, share, width, others[0], int(no_minus_zero), *others[1:]]
    backend.launch(WIRE, kernel, grid, as_words(words))
