"""All elements in fewer bytes; what rounding loses is kept for the next step.

A vector is cut into parts, one for each owner, and each part is encoded into one row of bytes: codes, then scales, then
room for what else is sent. `bfloat16` has no scales. In the other formats a scale is common to a block: a part is cut
evenly into blocks of at most `block` elements, and

    scale = (largest magnitude of the block / largest code), rounded up: for int8 to 7 bits less than the dtype has,
            so that code · scale is exact, else to a power of two
    code  = (element / scale), rounded to the format

With the nearest code, sent + new residual is residual + gradient, bit for bit (−0 may become 0): the difference of an
element and code · scale is a multiple of the element's last place (a step of the codes times the last place of the
scale is no finer), and no larger than the element. With stochastic rounding, or from summing what both encodings have
lost, the residual is that difference rounded once.

Where an element of a block is NaN or ±Inf, its scale is NaN, so that the whole block is on all ranks, and nothing of it
enters a residual. Blocks as in "8-bit Optimizers via Block-wise Quantization" (Dettmers et al., ICLR 2022).
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from runtime.errors import InputError
from runtime.kernels import WireLayout, wire_combine_, wire_decode_, wire_encode_
from runtime.kernels.checks import FLOATS
from runtime.kernels.source import WIRE_CODES, WIRE_MOST
from runtime.plan import NO_COMPRESSION, CompressorSpec
from runtime.sparse.compressors.magnitudes import accumulate
from runtime.sparse.compressors.options import choose
from runtime.sparse.compressors.sparse import has_kernels

WIRE_DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn,
}  # fmt: skip
EIGHT_BITS = tuple(name for name, dtype in WIRE_DTYPES.items() if dtype.itemsize == 1)
NATIVE = ("bfloat16", "float16")
"""Formats that backends add up themselves."""

BLOCK, LEAST_BLOCK, LARGEST_BLOCK = 256, 64, 512
"""Elements with one scale: by default (with float16 always), and what a plan may ask for."""

ROUNDINGS: Mapping[str, bool] = {"nearest": False, "stochastic": True}

ALL_LINKS, BETWEEN_NODES = "all", "inter"
"""Links on which a bucket is encoded; which of them goes with which collective is checked elsewhere."""

CHUNK = 1 << 18
"""Elements that are encoded together on a CPU: few enough for its caches, enough to outweigh the calls."""

ALIGNMENT = 8
"""Alignment in bytes of codes, scales and the tail of a row."""

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


class Piece(NamedTuple):
    """Elements that are encoded together."""

    elements: slice
    """Slice of the vector."""
    rows: slice
    codes: slice
    """Slice of each of the rows, as `scales`."""
    scales: slice
    shape: tuple[int, int, int]
    """(rows, blocks of each, elements of a block)."""


@dataclass(frozen=True)
class Cut:
    """The layout of a vector in rows of bytes."""

    share: int
    """Elements in a row: all have room for as many, and the last rows may be filled in part, or not at all."""
    width: int
    """Elements with one scale; 1 where there are no scales."""
    code: torch.dtype
    wide: torch.dtype
    """Dtype of sums and of scales."""
    scaled: bool
    tail: int
    """Numbers (float32) behind them."""

    @property
    def scales_at(self) -> int:
        return _aligned(self.share * self.code.itemsize)

    @property
    def _tail_at(self) -> int:
        return _aligned(self.scales_at + self.share // self.width * self.wide.itemsize * self.scaled)

    @property
    def row_bytes(self) -> int:
        return _aligned(self._tail_at + 4 * self.tail)

    def codes(self, rows: Tensor) -> Tensor:
        """Shape (rows, share)."""
        return rows[:, : self.share * self.code.itemsize].view(self.code)

    def scales(self, rows: Tensor) -> Tensor | None:
        """Shape (rows, blocks of each)."""
        if not self.scaled:
            return None
        return rows[:, self.scales_at :][:, : self.share // self.width * self.wide.itemsize].view(self.wide)

    def tails(self, rows: Tensor) -> Tensor:
        """Shape (rows, tail); there is one."""
        return rows[:, self._tail_at :][:, : 4 * self.tail].view(torch.float32)

    def pieces(self, elements: int, at_once: int) -> Iterator[Piece]:
        """Yield the pieces of a vector, each of about `at_once` elements or fewer: whole rows, or blocks of one row."""
        start = 0
        while start < elements:
            row, inside = divmod(start, self.share)
            left = elements - start
            rows = max(1, min(at_once, left) // self.share) if not inside else 1
            room = min(self.share - inside, left) if rows == 1 else self.share
            if rows == 1 and room > self.width:  # blocks, of which the vector's last one may be shorter
                room = min(room, max(1, at_once // self.width) * self.width) // self.width * self.width
            width = min(self.width, room)
            first = inside // self.width
            blocks = slice(first, first + room // width)
            shape = (rows, room // width, width)
            yield Piece(
                slice(start, start + rows * room), slice(row, row + rows), slice(inside, inside + room), blocks, shape
            )
            start += rows * room


class StepResidual(NamedTuple):
    """The residual that a step reads and the one that it writes, 1-D; None: no residual is kept."""

    residual: Tensor | None = None
    """Earlier steps' part that has not been sent, in the dtype of sums; unchanged."""
    following: Tensor | None = None
    """Memory for the next residual; other memory than `residual` and the gradient."""
    swapped: Tensor | None = None
    """Flag for kernels, one int32 on the device: if it is not 0, the two have changed places."""

    def part(self, elements: slice) -> StepResidual:
        """Return the residual of some elements."""
        if self.residual is None or self.following is None:
            return self
        return StepResidual(self.residual[elements], self.following[elements], self.swapped)

    def as_of_step(self, total: Tensor) -> Tensor:
        """Add to a sum of what ranks have sent what encoding has kept of this rank's, and take from it what was kept
        before; in place.
        """
        if self.residual is None or self.following is None:
            return total
        kept = self.following - self.residual
        return total.add_(kept if self.swapped is None else torch.where(self.swapped.bool(), -kept, kept))


NO_RESIDUAL = StepResidual()


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


class Coded(NamedTuple):
    """Encoded elements."""

    codes: Tensor
    """Shape (rows, blocks, elements of a block); of a whole vector (rows, elements)."""
    scales: Tensor | None
    """Shape (rows, blocks, 1); of a whole vector (rows, blocks). None: the format has none."""


class Format(Protocol):
    """Encoding of a number."""

    dtype: torch.dtype
    block: int | None
    """Maximum number of elements with one scale; None: there are no scales."""

    def encode(self, total: Tensor, to: Coded, work: Tensor, noise: torch.Generator | None, *, keep: bool) -> None:
        """Fill codes and scales.

        Args:
            total: numbers, of the shape of the codes; with `keep` they become the rounding errors, else they stay.
            to: filled.
            work: memory to compute in, twice as much as `total`, of its dtype.
            noise: of stochastic rounding; None: round to the nearest.
            keep: whether rounding errors are kept.
        """
        ...

    def decode(self, coded: Coded, out: Tensor, work: Tensor, *, add: bool = False) -> None:
        """Fill `out` with decoded numbers, or add them to it; shapes as with `encode`."""
        ...

    def for_kernels(self, cut: Cut) -> WireLayout | None:
        """Return the layout of a vector in this format for kernels; None: there are none."""
        ...


class WireCompressor:
    """Sends residual + gradient in a format."""

    def __init__(self, form: Format, *, error_feedback: bool = True, stochastic: bool = False) -> None:
        self.format, self.dtype = form, form.dtype
        self.error_feedback, self.stochastic = error_feedback, stochastic

    def cut(self, elements: int, parts: int, wide: torch.dtype, tail: int = 0) -> Cut:
        """Return the layout of a vector of elements of the dtype `wide` in one row for each of `parts` owners."""
        share, most = -(-elements // parts), self.format.block
        if most is None:
            return Cut(share, 1, self.dtype, wide, False, tail)
        blocks = max(1, -(-share // most))
        width = max(1, -(-share // blocks))
        return Cut(width * blocks if share else 0, width, self.dtype, wide, True, tail)

    def runs_on(self, device: torch.device, cut: Cut, gradient: torch.dtype = torch.float32) -> bool:
        """Tell whether kernels of the device do all this: then arguments named `swapped` count."""
        return self._layout(device, cut, gradient) is not None

    def _layout(self, device: torch.device, cut: Cut, gradient: torch.dtype = torch.float32) -> WireLayout | None:
        known = not self.stochastic and cut.wide == torch.float32 and gradient in FLOATS and cut.share > 0
        return self.format.for_kernels(cut) if known and has_kernels(device, cut.wide) else None

    def compress(self, gradient: Tensor, kept: StepResidual, rows: Tensor, cut: Cut, seed: int) -> None:
        """Encode residual + gradient.

        Args:
            gradient: 1-D, in any floating dtype; unchanged.
            kept: of the vector; `kept.following` becomes what this step does not send.
            rows: bytes of shape (parts, cut.row_bytes); unchanged beyond the elements of the vector.
            cut: of this vector.
            seed: of stochastic rounding; another one in each step and on each rank.
        """
        layout, (residual, new_residual, swapped) = self._layout(rows.device, cut, gradient.dtype), kept
        if layout is not None:
            pair = None if residual is None or new_residual is None else (residual, new_residual)
            wire_encode_(gradient, pair, rows, layout, swapped=swapped)
            return
        coded, noise = _open(rows, cut), self._noise(seed, rows.device)
        for piece, work in _pieces(cut, gradient.numel(), rows.device):
            part = piece.elements
            if residual is None or new_residual is None:
                total = gradient[part].to(cut.wide)
            else:
                total = accumulate(residual[part], gradient[part], new_residual[part])
            place = _at(piece, coded, piece.rows)
            self.format.encode(total.view(piece.shape), place, work, noise, keep=new_residual is not None)

    def combine(self, rows: Tensor, own: Tensor, kept: StepResidual, cut: Cut, elements: int, seed: int) -> None:
        """Add up what rows of one part hold, in their order, and encode the sum.

        Args:
            rows: bytes of shape (ranks, cut.row_bytes).
            own: bytes of shape (1, cut.row_bytes), filled with the sum's codes and scales.
            kept: shape (elements,); the rounding error of the sum is added to `kept.following`.
            cut: of the vector.
            elements: number of elements of the part; `cut.share` or fewer.
            seed: see `compress`.
        """
        layout, (residual, new_residual, swapped) = self._layout(rows.device, cut), kept
        if layout is not None:
            pair = None if residual is None or new_residual is None else (residual, new_residual)
            wire_combine_(rows, pair, own, elements, layout, swapped=swapped)
            return
        received, coded, noise = _open(rows, cut), _open(own, cut), self._noise(seed, rows.device)
        for piece, work in _pieces(cut, elements, rows.device):
            total = work[2]
            self._add_up(received, piece, total, work)
            place = _at(piece, coded, piece.rows)
            self.format.encode(total, place, work, noise, keep=new_residual is not None)
            if new_residual is not None:
                new_residual[piece.elements].add_(total.view(-1))

    def add_up(self, rows: Tensor, total: Tensor, cut: Cut) -> None:
        """Make `total` (1-D) the sum of what rows of one part hold, in their order and in its dtype."""
        layout = self._layout(rows.device, cut)
        if layout is not None:
            wire_decode_(rows, total, layout, add_up=True)
            return
        received = _open(rows, cut)
        for piece, work in _pieces(cut, total.numel(), rows.device):
            self._add_up(received, piece, total[piece.elements].view(piece.shape), work)

    def decode(self, rows: Tensor, out: Tensor, cut: Cut) -> None:
        """Fill `out` (1-D) with what the rows of all parts hold; −0 becomes 0, as where elements are selected."""
        layout = self._layout(rows.device, cut)
        if layout is not None:
            wire_decode_(rows, out, layout, add_up=False)
            return
        coded = _open(rows, cut)
        for piece, work in _pieces(cut, out.numel(), rows.device):
            place = out[piece.elements].view(piece.shape)
            self.format.decode(_at(piece, coded, piece.rows), place, work)
            place.add_(0.0)

    def _add_up(self, coded: Coded, piece: Piece, out: Tensor, work: Tensor) -> None:
        for rank in range(len(coded.codes)):
            self.format.decode(_at(piece, coded, slice(rank, rank + 1)), out, work, add=rank > 0)

    def _noise(self, seed: int, device: torch.device) -> torch.Generator | None:
        return torch.Generator(device).manual_seed(seed) if self.stochastic else None


def _open(rows: Tensor, cut: Cut) -> Coded:
    """Return codes and scales, with a row for each of `rows`."""
    return Coded(cut.codes(rows), cut.scales(rows)) if cut.share else Coded(rows, rows)


def _pieces(cut: Cut, elements: int, device: torch.device) -> Iterator[tuple[Piece, Tensor]]:
    """Yield what is worked on at a time of a vector, and memory for that: shape (3, *piece.shape)."""
    if not elements:
        return
    at_once = min(elements, max(CHUNK, cut.width)) if device.type == "cpu" else elements
    work = _memory(at_once, cut.wide, device)
    for piece in cut.pieces(elements, at_once):
        yield piece, work[:, : math.prod(piece.shape)].view(3, *piece.shape)


_of_thread = threading.local()


def _memory(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory of shape (3, elements), on a CPU the same in each call of a thread: what is new to the process
    costs more to touch than to compute.
    """
    if device.type != "cpu":
        return torch.empty(3, elements, dtype=dtype, device=device)
    size_bytes = 3 * elements * dtype.itemsize
    memory: Tensor | None = getattr(_of_thread, "memory", None)
    if memory is None or memory.numel() < size_bytes:
        with torch.inference_mode(False):  # or it could be written to in that mode alone
            memory = _of_thread.memory = torch.empty(size_bytes, dtype=torch.uint8)
    return memory[:size_bytes].view(dtype).view(3, elements)


def _at(piece: Piece, coded: Coded, rows: slice) -> Coded:
    """Return a piece's codes and scales in some rows."""
    found, scales = coded.codes[rows, piece.codes].view(piece.shape), coded.scales
    return Coded(found, None if scales is None else scales[rows, piece.scales].unsqueeze(-1))


class Rounded(Format):
    """Elements rounded to `dtype`, without scales.

    Finite values stay finite, also in a sum over all ranks in the wire's dtype: they saturate at its largest number /
    ranks, for more than two ranks at half of that, since adding x may raise a rounded sum by 2x. The rest stays in the
    residual. NaN and ±Inf are sent as they are, so that all ranks see them.

    Sent + new residual is residual + gradient bit for bit (−0 may become 0), though each is rounded. Below saturation
    the difference of a number and its rounded self is a multiple of the number's last place and smaller, so it is
    exact. So is number − limit while the number's last place (ulp) divides the limit. Above that, number − limit is
    rounded by less than half an ulp, and adding the limit rounds back, but for one case: the limit is an odd multiple
    of ulp/2, where the rounding may go either way. There the limit without its last bit is sent, which the ulp
    divides.
    """

    def __init__(self, dtype: torch.dtype, ranks: int) -> None:
        self.dtype, self.block = dtype, None
        self.limit = _round_down(torch.finfo(dtype).max / (ranks if ranks <= 2 else 2 * ranks), dtype)
        """The largest finite magnitude that is sent."""
        self._last_bit = _lowest_bit(self.limit)

    def encode(self, total: Tensor, to: Coded, work: Tensor, noise: torch.Generator | None, *, keep: bool) -> None:
        codes, _ = to
        rounded = total if noise is None else _dithered(total.clone(), self.dtype, noise)
        if total.device.type == "cpu":
            low, high = torch.aminmax(total)
            if bool(low >= -self.limit) and bool(high <= self.limit):  # not where it is NaN
                codes.copy_(rounded)
                if noise is not None:  # what is near the limit may have been raised above it
                    codes.clamp_(-self.limit, self.limit)
                if keep:
                    total.sub_(work[0].copy_(codes))
                return
        total_magnitude = total.abs()
        first = self._last_bit / torch.finfo(total.dtype).eps * 2
        doubtful = (total_magnitude >= first) & (total_magnitude < 2 * first)
        limit = torch.where(doubtful, self.limit - self._last_bit, self.limit).to(total.dtype)
        codes.copy_(torch.where(total.isfinite(), rounded.clamp(-limit, limit), total))
        if keep:
            total.sub_(codes).nan_to_num_(nan=0.0)  # Inf − Inf: it is sent, nothing is left

    def decode(self, coded: Coded, out: Tensor, work: Tensor, *, add: bool = False) -> None:
        if add:
            out.add_(work[0].copy_(coded.codes))
        else:
            out.copy_(coded.codes)

    def for_kernels(self, cut: Cut) -> WireLayout | None:
        if self.dtype != torch.bfloat16:
            return None
        # float32 has no number whose ulp is twice the limit's last bit.
        return WireLayout(self.dtype, cut.share, WIRE_MOST, 0, cut.share * self.dtype.itemsize, self.limit)


class Scaled(Format):
    """Elements with a scale for each block: int8, float8_e4m3fn or float16."""

    def __init__(self, dtype: torch.dtype, block: int) -> None:
        self.dtype, self.block = dtype, block
        self._largest = 127.0 if dtype == torch.int8 else float(torch.finfo(dtype).max)

    def encode(self, total: Tensor, to: Coded, work: Tensor, noise: torch.Generator | None, *, keep: bool) -> None:
        codes, scales = to
        assert scales is not None
        scale = torch.maximum(total.amax(-1, keepdim=True), total.amin(-1, keepdim=True).neg_())
        # Whether the largest code reaches all elements; not where one is NaN.
        reached = total.device.type == "cpu" and bool(scale.amax() < torch.finfo(total.dtype).max / 4)
        odd = None if reached else scale.isfinite().logical_not_()
        self._to_scales(scale)
        if odd is not None:
            scale.masked_fill_(odd, math.nan)
        scales.copy_(scale)
        values = torch.mul(total, scale.reciprocal(), out=work[0])
        if noise is not None:
            _dithered(values, self.dtype, noise)
        elif self.dtype == torch.int8:
            values.round_()
        if noise is not None or not reached:
            values.clamp_(-self._largest, self._largest)  # casts to float8 may give NaN above
        codes.copy_(values)
        if not keep:
            return
        if self.dtype != torch.int8:
            scale *= self._values(codes, values, work[1])
        total.addcmul_(values, scale, value=-1.0)
        if odd is not None:
            total.masked_fill_(odd, 0.0)

    def _to_scales(self, largest: Tensor) -> None:
        """Turn magnitudes into scales, in place."""
        words, (dropped, low, high) = _INTEGERS[largest.dtype], scale_bounds(self.dtype, largest.dtype)
        largest.div_(self._largest).clamp_(low, high).view(words).add_(dropped).bitwise_and_(~dropped)

    def _values(self, codes: Tensor, out: Tensor, words: Tensor) -> float:
        """Fill `out` with numbers that, times the one returned, are what codes stand for; `words`: memory."""
        if self.dtype != torch.float8_e4m3fn:
            out.copy_(codes)
            return 1.0
        # The bits of an e4m3 are those of a float16, whose exponent has one bit more: several times as fast as a cast.
        halves = words.view(-1).view(torch.int16)[: codes.numel()].view(codes.shape).copy_(codes.view(torch.int8))
        out.copy_(halves.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16))
        return 256.0

    def decode(self, coded: Coded, out: Tensor, work: Tensor, *, add: bool = False) -> None:
        codes, scales = coded
        assert scales is not None
        values = work[0] if add else out
        unit = self._values(codes, values, work[1])
        scale = scales if unit == 1.0 else scales * unit
        if add:
            out.addcmul_(values, scale)  # code · scale is exact, so that one rounding or two are the same
        else:
            values.mul_(scale)

    def for_kernels(self, cut: Cut) -> WireLayout | None:
        layout = WireLayout(
            self.dtype, cut.share, cut.width, cut.scales_at, cut.row_bytes, self._largest,
            scales=scale_bounds(self.dtype, torch.float32),
        )  # fmt: skip
        return layout if layout.name in WIRE_CODES else None


@functools.cache
def scale_bounds(code: torch.dtype, wide: torch.dtype) -> tuple[int, float, float]:
    """Return (bits of a scale that are 0, as a mask, smallest scale, largest scale). At either end of the range of
    `wide` neither code · scale nor 1 / scale leaves it: tiny elements are left to the residual, and of huge ones what
    the largest code does not reach.
    """
    limits = torch.finfo(wide)
    largest, bits = (127.0, 7) if code == torch.int8 else (torch.finfo(code).max, _bits_of(wide) - 1)
    dropped = (1 << bits) - 1
    high = torch.tensor(limits.max / largest, dtype=wide)
    high.view(_INTEGERS[wide]).bitwise_and_(~dropped)
    return dropped, limits.tiny * 2.0**16, float(high)


def _dithered(values: Tensor, dtype: torch.dtype, noise: torch.Generator) -> Tensor:
    """Round values, in place, to one of the two neighbouring numbers of a dtype, the likelier the nearer it is."""
    whole = dtype == torch.int8
    bits = min(16, 23 - (7 if whole else _bits_of(dtype)))  # few enough that numbers of the dtype stay what they are
    words = torch.empty(-(-values.numel() // 4), dtype=torch.int64, device=values.device)
    words.random_(-(2**63), None, generator=noise)
    draws = words.view(torch.int16)[: values.numel()].view(values.shape)
    draws.bitwise_right_shift_(16 - bits)
    shift = draws.to(values.dtype).mul_(2.0**-bits).add_(0.5 + 2.0 ** -(bits + 1))
    if whole:
        return values.add_(shift).floor_()
    limits = torch.finfo(dtype)
    exponents = values.abs().view(_INTEGERS[values.dtype])
    exponents.bitwise_and_(torch.tensor(math.inf, dtype=values.dtype).view(_INTEGERS[values.dtype]).item())
    places = exponents.view(values.dtype).clamp_(min=limits.smallest_normal).mul_(limits.eps)
    return values.div_(places).add_(shift).floor_().mul_(places)


def _bits_of(dtype: torch.dtype) -> int:
    """Return how many bits a number of a floating dtype has, the leading one among them."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def _round_down(value: float, dtype: torch.dtype) -> float:
    rounded = torch.tensor(value, dtype=torch.float64).to(dtype)
    if float(rounded) > value:
        rounded = torch.nextafter(rounded, torch.zeros_like(rounded))
    return float(rounded)


def _lowest_bit(value: float) -> float:
    """Return the largest power of two that divides a number."""
    numerator, denominator = value.as_integer_ratio()
    return math.ldexp(1.0, (numerator & -numerator).bit_length() - 1) / denominator


def wider(spec: CompressorSpec) -> CompressorSpec:
    """Return the next wider format: bfloat16 after 8 bits, after 16 the elements as they are. The other 8 bits would be
    no wider, and after float16 comes no bfloat16, which has fewer digits.
    """
    return replace(spec, dtype="bfloat16", block=None) if spec.dtype in EIGHT_BITS else NO_COMPRESSION


def make_wire(spec: CompressorSpec, ranks: int, *, native: bool = False) -> WireCompressor:
    """Make the compressor of a bucket that `ranks` ranks add up; `native`: the backend does, in the wire's dtype.

    Raises InputError: an unknown name, or options that do not go together.
    """
    if spec.dtype is None:
        known = ", ".join(WIRE_DTYPES)
        raise InputError(f"the compressor wire has no dtype; expected one of {known}: give it one")
    dtype = choose("wire: dtype", spec.dtype, WIRE_DTYPES)
    stochastic = choose("wire: rounding", spec.rounding or "nearest", ROUNDINGS)
    choose("wire: links", spec.links or ALL_LINKS, dict.fromkeys((ALL_LINKS, BETWEEN_NODES)))
    if spec.block is not None and (native or spec.dtype not in EIGHT_BITS):
        raise InputError(
            f"wire: block: found {spec.block} with the dtype {spec.dtype}; expected it with {' or '.join(EIGHT_BITS)} "
            f"alone (float16 has a scale for each {BLOCK} elements, bfloat16 needs none): leave block out"
        )
    block = BLOCK if spec.block is None else spec.block
    if not LEAST_BLOCK <= block <= LARGEST_BLOCK:
        raise InputError(
            f"wire: block: found {block}, expected {LEAST_BLOCK} to {LARGEST_BLOCK} elements with one scale: give it "
            f"{BLOCK}, or leave it out"
        )
    if native and spec.dtype not in NATIVE:
        raise InputError(
            f"wire: dtype: found {spec.dtype} with the algorithm native, whose sums the backend makes; expected one of "
            f"{', '.join(NATIVE)} there: send it by two_shot"
        )
    form: Format = Rounded(dtype, ranks) if native or dtype == torch.bfloat16 else Scaled(dtype, block)
    return WireCompressor(form, error_feedback=spec.error_feedback is not False, stochastic=stochastic)
