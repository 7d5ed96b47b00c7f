"""Matrices as products of two thin ones: low rank with error feedback and a warm start.

Of a matrix M (rows, columns) every rank sends two factors, each added up over ranks before the next line:

    left  = start · Mᵀ      (rank, rows), then made orthonormal, which is the same on all ranks
    right = left · M        (rank, columns)

All gradients become leftᵀ · right, the sum of what ranks have sent of their own: leftᵀ · (left · M), which is M
projected. The rest of M is the new residual, so that sent + new residual = residual + gradient up to rounding, on each
rank. The next `start` is this `right`, made orthonormal: a matrix that stays the same is sent better and better, until
as well as any product of this rank can be. The first one is drawn, from the gradient's name. Where factors would be no
fewer elements than the matrix, it is sent as it is, as vectors are: a third message, in another dtype, would cost more
than such few elements do.

Factors and sums have the residual's dtype. Matrix products are torch's: where float32 products are allowed to round
their factors (`torch.set_float32_matmul_precision`), that much of what is sent is lost. Ranks need the same kind of
processor, or their last bits may differ.

Where a matrix is not finite on one rank, its `left` and all that follows is not, on all ranks.

Source: PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019), Algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.errors import InputError
from runtime.plan import CompressorSpec
from runtime.plan.document import LARGEST_RANK
from runtime.sparse.compressors.magnitudes import seed_of

PIECE = 1 << 14
"""Elements that are added up at once: torch divides no sum of so few among threads, whose number would show in it."""

RIDGE = 2.0**-43
"""Part of a row's square that is added to it: float64 sums are that exact, and float32 rows half as exact as that."""

Shape = tuple[int, int]
"""(rows, columns)."""


def matrix_shape(gradient: Tensor) -> Shape:
    """Return the matrix that a gradient's memory is, which has no gaps: rows are the slowest of its dimensions that
    have several elements (the first one, unless it is laid out in another order), columns all the others.
    """
    if not gradient.numel():
        return 0, 0
    dimensions = zip(gradient.stride(), gradient.shape, strict=True)
    _, rows = max(((stride, size) for stride, size in dimensions if size > 1), default=(0, 1))
    return rows, gradient.numel() // rows


class Stacks:
    """Factors that lie one after the other in a vector, those of one length together."""

    def __init__(self, rank: int, lengths: Sequence[int]) -> None:
        """`lengths`: of the rows of each factor, in order of the matrices."""
        self._rank, members = rank, dict[int, list[int]]()
        for index, length in enumerate(lengths):
            members.setdefault(length, []).append(index)
        self._members = members
        self.elements = rank * sum(lengths)

    def together(self, vector: Tensor) -> Iterator[Tensor]:
        """Yield the factors of each length. Shapes (factors, rank, length)."""
        start = 0
        for length, members in self._members.items():
            stop = start + len(members) * self._rank * length
            yield vector[start:stop].view(len(members), self._rank, length)
            start = stop

    def each(self, vector: Tensor) -> list[Tensor]:
        """Return the factors in order of the matrices. Shapes (rank, length)."""
        found = {
            index: factor
            for members, stack in zip(self._members.values(), self.together(vector), strict=True)
            for index, factor in zip(members, stack, strict=True)
        }
        return [found[index] for index in range(len(found))]


class Place(NamedTuple):
    """The place of a matrix in the vector of all gradients."""

    start: int
    rows: int
    columns: int


class Factors:
    """One vector of gradients as matrices with factors, and the rest."""

    def __init__(self, rank: int, shapes: Sequence[Shape]) -> None:
        """`shapes`: of the gradients, which fill the vector in order."""
        self.members: list[int] = []
        """Places of the gradients that are sent as factors."""
        self.whole: list[slice] = []
        """Runs of all other elements."""
        self._places: list[Place] = []
        start = 0
        for index, (rows, columns) in enumerate(shapes):
            stop = start + rows * columns
            if rank * (rows + columns) < rows * columns:
                self.members.append(index)
                self._places.append(Place(start, rows, columns))
            elif self.whole and self.whole[-1].stop == start:
                self.whole[-1] = slice(self.whole[-1].start, stop)
            else:
                self.whole.append(slice(start, stop))
            start = stop
        self.left = Stacks(rank, [place.rows for place in self._places])
        self.right = Stacks(rank, [place.columns for place in self._places])

    def matrices(self, vector: Tensor) -> list[Tensor]:
        """Shapes (rows, columns)."""
        return [vector[start : start + rows * columns].view(rows, columns) for start, rows, columns in self._places]

    def _parts(self, vector: Tensor, left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield each matrix with its left and its right factor."""
        return zip(self.matrices(vector), self.left.each(left), self.right.each(right), strict=True)

    def seeds(self, names: Sequence[str], like: Tensor) -> Tensor:
        """Draw what the first step starts from, and later ones where nothing has come: a vector of right factors, of
        the dtype and on the device of `like`. `names`: of the gradients.
        """
        drawn = torch.empty(self.right.elements, dtype=torch.float32, device="cpu")
        for index, factor in zip(self.members, self.right.each(drawn), strict=True):
            chance = torch.Generator("cpu").manual_seed(seed_of(names[index], 0))
            factor.copy_(torch.randn(factor.shape, generator=chance, dtype=torch.float32, device="cpu"))
        drawn = drawn.to(like.device, like.dtype)
        orthonormalize(self.right, drawn)
        return drawn

    def begin(self, total: Tensor, start: Tensor, seeds: Tensor, left: Tensor) -> None:
        """Fill `left` (1-D) with the left factors of `total`'s matrices; `start`: the last step's right ones, or 0."""
        start = start.clone()
        orthonormalize(self.right, start)
        for factors, drawn in zip(self.right.together(start), self.right.together(seeds), strict=True):
            lost = torch.linalg.vector_norm(factors, dim=-1, keepdim=True) < 0.5
            factors.copy_(torch.where(lost, drawn, factors))
        for matrix, out, factor in self._parts(total, left, start):
            torch.mm(factor, matrix.t(), out=out)  # with `out`, for autocast leaves that alone

    def project(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Make the sum of all ranks' left factors orthonormal, and fill `right` (1-D) with the right ones."""
        orthonormalize(self.left, left)
        for matrix, factor, out in self._parts(total, left, right):
            torch.mm(factor, matrix, out=out)

    def subtract(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Take what these factors stand for from `total`'s matrices."""
        for matrix, one, other in self._parts(total, left, right):
            matrix.addmm_(one.t(), other, alpha=-1.0)

    def multiply(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Fill `out`'s matrices with what these factors stand for."""
        for matrix, one, other in self._parts(out, left, right):
            torch.mm(one.t(), other, out=matrix)


@dataclass(frozen=True)
class LowRankCompressor:
    """Sends residual + gradient as factors of `rank` rows."""

    rank: int

    def factors(self, gradients: Sequence[Tensor]) -> Factors:
        """Say how gradients, whose memory follows one another without gaps, are sent."""
        return Factors(self.rank, [matrix_shape(gradient) for gradient in gradients])


def orthonormalize(stacks: Stacks, vector: Tensor) -> None:
    """Make the rows of each factor in a vector orthonormal, in place, with the same bits on all ranks.

    By Cholesky's decomposition of the products of rows, in float64. It has few steps for all factors of a length, and
    no step whose result depends on the number of threads, which the backend's own thread may have another one of:
    products are added up in pieces. Rows are first made of one length, and a little is added to each one's square:
    what rounding alone has left of a row that depends on those above may become shorter than 1, so that a projection
    sends too little of it, never too much. A row of zeros stays. What is not finite stays so.
    """
    for factors in stacks.together(vector):
        rows = factors.to(torch.float64, copy=True)
        lengths = _added(rows * rows).sqrt_().unsqueeze(-1)
        rows.div_(lengths.masked_fill_(lengths == 0.0, 1.0))
        products = torch.stack([_added(rows * rows[:, row : row + 1]) for row in range(rows.shape[1])], -1)
        one = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
        # Not checked: with what is added it fails only where something is not finite, and then that is in `rows`, too.
        triangle = torch.linalg.cholesky_ex(products + RIDGE * one).L
        inverse = torch.linalg.solve_triangular(triangle, one.expand_as(triangle), upper=False)
        factors.copy_(inverse @ rows)


def _added(products: Tensor) -> Tensor:
    """Sum over the last dimension, in an order that only its length decides."""
    if products.shape[-1] <= PIECE:
        return products.sum(-1)
    return torch.stack([piece.sum(-1) for piece in products.split(PIECE, -1)], -1).sum(-1)


def make_low_rank(spec: CompressorSpec) -> LowRankCompressor:
    """Raises InputError: no rank, or one that is none."""
    if spec.rank is None:
        raise InputError(
            f"the compressor {spec.name} has no rank; expected one from 1 to {LARGEST_RANK}: give it one, such as 4"
        )
    if not isinstance(spec.rank, int) or isinstance(spec.rank, bool) or not 1 <= spec.rank <= LARGEST_RANK:
        raise InputError(
            f"{spec.name}: rank: found {spec.rank!r}, expected a whole number from 1 to {LARGEST_RANK}: give it a "
            f"smaller one, such as 4, or leave the compressor out"
        )
    return LowRankCompressor(spec.rank)
