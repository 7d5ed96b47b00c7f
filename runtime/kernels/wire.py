"""Vectors in narrow codes, on a device: residual + gradient encoded in one pass over memory, and rows added up in one.

Results are those of `runtime.sparse.compressors.wire` on a CPU, bit for bit, but for codes of a block that is not
finite: its scale is NaN. `bfloat16` has no scales. No operator allocates, waits for the host, or has a reference of its
own: without kernels, `WireCompressor` does it in torch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import EnvironmentFailure
from runtime.kernels.backend import backend_for
from runtime.kernels.checks import FLOATS, check_apart, check_tensor
from runtime.kernels.source import WIRE
from runtime.kernels.state import MAX_ELEMENTS


@dataclass(frozen=True)
class WireLayout:
    """How a vector lies in rows of bytes, and what the format is, in numbers."""

    code: torch.dtype
    """One of `WIRE_CODES`."""
    share: int
    """Elements in a row."""
    width: int
    """Of a block, `WIRE_MOST` at most; without scales, what a warp works on at a time."""
    scales_at: int
    """Byte of a row where scales (float32) begin."""
    row_bytes: int
    """At least."""
    largest: float
    """What the largest code stands for, without its scale; of bfloat16, what is sent of all above."""
    scales: tuple[int, float, float] = (0, 0.0, 0.0)
    """(bits of a scale that are 0, as a mask, smallest scale, largest scale)."""

    def numbers(self) -> list[int]:
        """The last words of the kernels' arguments."""
        dropped, low, high = self.scales
        return [self.share, self.width, self.scales_at, _bits(self.largest), _bits(low), _bits(high), dropped]

    @property
    def name(self) -> str:
        return str(self.code).removeprefix("torch.")


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def wire_encode_(
    gradient: Tensor, residual: Tensor | None, new_residual: Tensor | None, rows: Tensor, layout: WireLayout, *,
    swapped: Tensor | None = None,
) -> None:  # fmt: skip
    """Encode residual + gradient; what that loses is the new residual.

    Args:
        gradient: 1-D, float32 or bfloat16; unchanged.
        residual: as many elements, float32; unchanged. None: nothing is kept.
        new_residual: likewise; becomes what codes lose.
        rows: bytes, shape (parts, layout.row_bytes), each row contiguous; what no element has a place in stays.
        layout: of the vector.
        swapped: one int32; where it is not 0, `residual` and `new_residual` change places.

    Raises:
        ValueError: names the argument that does not fit, or that shares memory with another.
        EnvironmentFailure: no kernels run on the device.
    """
    if gradient.dtype not in FLOATS:
        raise ValueError(f"gradient: found {gradient.dtype}; expected {' or '.join(map(str, FLOATS))}")
    check_tensor("gradient", gradient, gradient.numel(), gradient.dtype, rows.device)
    _check_rows("rows", rows, layout, gradient.numel())
    _check_kept(residual, new_residual, swapped, gradient.numel(), [("gradient", gradient), ("rows", rows)])
    wire_encode_operator(gradient, residual, new_residual, rows, swapped, layout.name, layout.numbers())


def wire_combine_(
    received: Tensor, residual: Tensor | None, new_residual: Tensor | None, own: Tensor, elements: int,
    layout: WireLayout, *, swapped: Tensor | None = None,
) -> None:  # fmt: skip
    """Add up what rows of one part hold, in their order, and encode the sum; what that loses is added to the new
    residual.

    Args:
        received: bytes, shape (ranks, layout.row_bytes), each row contiguous; unchanged.
        residual, new_residual, swapped: as with `wire_encode_`, of the part.
        own: bytes, shape (1, layout.row_bytes); filled.
        elements: of the part; `layout.share` or fewer.
        layout: of the vector.

    Raises:
        ValueError, EnvironmentFailure: as with `wire_encode_`.
    """
    for name, rows in (("received", received), ("own", own)):
        _check_rows(name, rows, layout, elements)
    _check_part(elements, layout)
    _check_kept(residual, new_residual, swapped, elements, [("received", received), ("own", own)])
    wire_combine_operator(received, residual, new_residual, own, swapped, elements, layout.name, layout.numbers())


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
    residual: Tensor | None, new_residual: Tensor | None, swapped: Tensor | None, elements: int,
    others: list[tuple[str, Tensor]],
) -> None:  # fmt: skip
    device = others[0][1].device
    if (residual is None) != (new_residual is None):
        raise ValueError("residual: found one without the other; expected residual and new_residual, or neither")
    if residual is not None and new_residual is not None:
        others += [("residual", residual), ("new_residual", new_residual)]
        for name, tensor in others[-2:]:
            check_tensor(name, tensor, elements, torch.float32, device)
    if swapped is not None:
        check_tensor("swapped", swapped, 1, torch.int32, device)
    check_apart(others)


@torch.library.custom_op("commplanner::wire_encode_", mutates_args=("residual", "new_residual", "rows"))
def wire_encode_operator(
    gradient: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    rows: Tensor,
    swapped: Tensor | None,
    code: str,
    numbers: Sequence[int],
) -> None:
    """See `wire_encode_`; a layout comes as its numbers."""
    what = str(gradient.dtype).removeprefix("torch.")
    at = [*map(_address, (gradient, residual, new_residual, swapped, rows)), 0, 0, _stride(rows), 0]
    _launch(f"wire_{code}_{what}", at, gradient.numel(), numbers, rows.device)


@torch.library.custom_op("commplanner::wire_combine_", mutates_args=("residual", "new_residual", "own"))
def wire_combine_operator(
    received: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    own: Tensor,
    swapped: Tensor | None,
    elements: int,
    code: str,
    numbers: Sequence[int],
) -> None:
    """See `wire_combine_`."""
    at = [*map(_address, (received, residual, new_residual, swapped, own)), 0]
    strides = [_stride(received), _stride(own), len(received)]
    _launch(f"wire_{code}_combine", at + strides, elements, numbers, own.device)


@torch.library.custom_op("commplanner::wire_decode_", mutates_args=("sums",))
def wire_decode_operator(rows: Tensor, sums: Tensor, add_up: bool, code: str, numbers: Sequence[int]) -> None:
    """See `wire_decode_`."""
    ranks = len(rows) if add_up else 1
    at = [rows.data_ptr(), 0, 0, 0, 0, sums.data_ptr(), _stride(rows), 0, ranks]
    _launch(f"wire_{code}_decode", at, sums.numel(), numbers, rows.device, no_minus_zero=not add_up)


for _operator in (wire_encode_operator, wire_combine_operator, wire_decode_operator):
    _operator.register_fake(lambda *arguments: None)


def _stride(rows: Tensor) -> int:
    return rows.stride(0) if len(rows) > 1 else 0


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _launch(
    kernel: str, at: list[int], elements: int, numbers: Sequence[int], device: torch.device, *,
    no_minus_zero: bool = False,
) -> None:  # fmt: skip
    """`at`: the first words of the arguments, up to the number of ranks."""
    if not elements:
        return
    backend = backend_for(device)
    if backend is None:
        raise EnvironmentFailure(f"kernels: found the device {device}, expected cuda: WireCompressor does it in torch")
    share, width, *others = numbers
    blocks = -(-elements // share) * -(-share // width)
    grid = min(backend.blocks(WIRE, kernel), -(-blocks // (WIRE.shape.threads // 32)))
    words = [*at, elements, share, width, others[0], int(no_minus_zero), *others[1:]]
    backend.launch(WIRE, kernel, grid, (ctypes.c_uint64 * len(words))(*words))
