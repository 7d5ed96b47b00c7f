"""Pushes of a vector of gradients to the owners of its parts: whole, selected or narrowed, and metadata behind it.

Every peer owns one part of the vector, and all parts but the last ones are equally long. A worker sends each peer as
many bytes, so that sizes need not be sent: of a bucket that selects, the largest elements of each owner's part by
itself. The residual stays with the worker, in units of the averaged gradient: what is sent and the residual are
together what there was, bit for bit. `make_push` is the only list of ways.

What a step's owners have to know of all workers is metadata behind its last vector: no message of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.collectives.phases import add_up, all_to_all
from runtime.core.buckets import BucketBuffer
from runtime.plan import CompressorSpec
from runtime.sparse.compressed import ResidualBuffers
from runtime.sparse.compressors import make_compressor
from runtime.sparse.compressors.magnitudes import seed_of
from runtime.sparse.compressors.sparse import SparseCompressor
from runtime.sparse.compressors.wire import NO_RESIDUAL, StepResidual, WireCompressor
from runtime.sparse.samples import Rounding

WORD_BYTES = 8
"""Rows begin at multiples of it, so that any dtype may lie in them."""
INDEX = torch.int32


class Rows:
    """The bytes that a rank sends to each of its peers, and receives from each: a body and metadata behind it."""

    def __init__(self, peers: int, body_bytes: int, metadata_bytes: int, device: torch.device) -> None:
        self._body = _rounded(body_bytes)
        self.sent = torch.zeros(peers, self._body + _rounded(metadata_bytes), dtype=torch.uint8, device=device)
        """Shape (peers, bytes)."""
        self.received = torch.zeros_like(self.sent)
        """Rows received from every peer. Shape (peers, bytes)."""

    def body(self, of: Tensor, dtype: torch.dtype, elements: int, begin_bytes: int = 0) -> Tensor:
        """Return a part of the body of `sent` or `received`. Shape (peers, elements)."""
        if not elements:
            return of.new_empty(len(of), 0, dtype=dtype)
        return of[:, begin_bytes : begin_bytes + elements * dtype.itemsize].view(dtype)

    def metadata(self, of: Tensor) -> Tensor:
        """Return the metadata of `sent` or `received`. Shape (peers, bytes)."""
        return of[:, self._body :]

    def put_metadata(self, metadata: Tensor) -> None:
        """Send the same metadata to every peer. Shape (bytes or fewer,)."""
        self.metadata(self.sent)[:, : metadata.numel()] = metadata

    def phases(self, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        return all_to_all(self.received.view(-1), self.sent.view(-1), group)


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // WORD_BYTES) * WORD_BYTES


def copy_into_rows(rows: Tensor, vector: Tensor, scale: float | None = None) -> None:
    """Write a vector (1-D), times `scale`, into rows (2-D) of another memory layout, one after the other."""
    width = rows.shape[1]
    full = vector.numel() // width if width else 0
    rest = vector.numel() - full * width
    parts = [(vector[: full * width].view(full, width), rows[:full])] if full else []
    parts += [(vector[full * width :], rows[full, :rest])] if rest else []
    for part, place in parts:
        if scale is None:
            place.copy_(part)
        else:
            torch.mul(part, scale, out=place)


class Push(Protocol):
    """One vector's way to its owners."""

    rows: Rows

    def pack(self, vector: Tensor, scale: float, finite: Tensor, step: int) -> None:
        """Fill what is sent with a vector (1-D, up to peers · share elements) times `scale`, which makes it this
        worker's part of the averaged gradient. Where it is not `finite` (0-d), nothing of it counts as sent.
        """
        ...

    def add_up(self, total: Tensor) -> None:
        """Add up the parts of all peers, which have come, in order of rank, into `total`. Shape (share,)."""
        ...

    def residual(self) -> Tensor | None:
        """Return the residual, 1-D as the vector; None where everything is sent."""
        ...


class WholePush:
    """All elements as they are."""

    def __init__(self, share: int, peers: int, dtype: torch.dtype, device: torch.device, metadata_bytes: int) -> None:
        self.rows = Rows(peers, share * dtype.itemsize, metadata_bytes, device)
        self._sent, self._received = (self.rows.body(of, dtype, share) for of in (self.rows.sent, self.rows.received))

        self.pending: Tensor | None = None
        """The residual from before everything was pushed: it is sent with the next vector that is finite."""

    def pack(self, vector: Tensor, scale: float, finite: Tensor, step: int) -> None:
        if self.pending is None:
            copy_into_rows(self._sent, vector, scale)
            return
        copy_into_rows(self._sent, torch.mul(vector.to(self.pending.dtype), scale).add_(self.pending))
        if finite:  # once: the host may wait for it
            self.pending = None

    def add_up(self, total: Tensor) -> None:
        add_up(list(self._received), total)

    def residual(self) -> Tensor | None:
        return self.pending


class _WithResidual:
    """A push with a residual."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.held = ResidualBuffers(elements, self.dtype, device, on_device=False)
        self._addend = torch.zeros(elements, dtype=self.dtype, device=device)

    def scaled(self, vector: Tensor, scale: float) -> Tensor:
        """Return the vector, scaled, in the dtype that is added up in."""
        return torch.mul(vector.to(self.dtype), scale, out=self._addend)


class SelectedPush(_WithResidual):
    """A push of some elements of each owner's part: values, and their places within the part."""

    def __init__(
        self, compressor: SparseCompressor, elements: int, share: int, peers: int, dtype: torch.dtype,
        device: torch.device, metadata_bytes: int,
    ) -> None:  # fmt: skip
        """`compressor` selects from each owner's part by itself."""
        super().__init__(elements, dtype, device)
        self._share, self._peers, self._compressor = share, peers, compressor
        self.by_magnitude = compressor.by_magnitude
        self.k = max((segment.k for segment in compressor.segments), default=0)
        """Elements that go to each owner, at most: a shorter part has fewer, and nothing in their place."""
        values_bytes = self.k * self.dtype.itemsize
        self.rows = Rows(peers, values_bytes + self.k * INDEX.itemsize, metadata_bytes, device)
        self._values, self._indices = (
            [self.rows.body(of, dtype, self.k, begin) for of in (self.rows.sent, self.rows.received)]
            for dtype, begin in ((self.dtype, 0), (INDEX, values_bytes))
        )

    def residual(self) -> Tensor:
        return self.held.residual

    @property
    def selected(self) -> int:
        return self._compressor.k

    def sent(self) -> Tensor:
        """Return what was sent last, zero elsewhere. Shape as the residual's."""
        whole = self.held.residual.new_zeros(self._peers, self._share)
        for part, values, indices in zip(whole, self._values[0], self._indices[0], strict=True):
            part.index_add_(0, indices, values)
        return whole.view(-1)[: self._addend.numel()]

    def pack(self, vector: Tensor, scale: float, finite: Tensor, step: int) -> None:
        addend = self.scaled(vector, scale)
        values, indices = self._compressor.compress(addend, self.held.residual, self.held.following, step)
        copy_into_rows(self._values[0], values)
        copy_into_rows(self._indices[0], indices % self._share if self._share else indices)
        self.held.commit(finite)

    def add_up(self, total: Tensor) -> None:
        # In the residual's dtype: gradients in half precision are not added up in it.
        sums = total.zero_() if total.dtype == self.dtype else torch.zeros_like(total, dtype=self.dtype)
        for values, indices in zip(self._values[1], self._indices[1], strict=True):
            sums.index_add_(0, indices, values)
        if sums is not total:
            total.copy_(sums)


class NarrowedPush(_WithResidual):
    """A push of all elements in fewer bytes, added up in a wider dtype."""

    def __init__(
        self, compressor: WireCompressor, elements: int, share: int, peers: int, dtype: torch.dtype,
        device: torch.device, metadata_bytes: int, place: str,
    ) -> None:  # fmt: skip
        super().__init__(elements, dtype, device)
        self._compressor = compressor
        self._cut, self._share, self._place = self._compressor.cut(share, 1, self.dtype), share, place
        self.rows = Rows(peers, self._cut.row_bytes, metadata_bytes, device)
        self._sent, self._received = (of[:, : self._cut.row_bytes] for of in (self.rows.sent, self.rows.received))
        self.watched: Rounding | None = None
        self._first, self._elements = 0, elements

    def watch(self, bucket: BucketBuffer, first: int, elements: int) -> None:
        """Let the bucket be sampled, of whose elements these are the ones from number `first` on."""
        self.watched = Rounding(bucket, feedback=self._compressor.error_feedback)
        self._first, self._elements = first, elements

    def residual(self) -> Tensor | None:
        return self.held.residual if self._compressor.error_feedback else None

    def sent(self) -> Tensor:
        """Return what was sent last. Shape as the residual's."""
        whole = torch.zeros_like(self._addend)
        for peer, part in enumerate(whole.split(self._share) if self._share else ()):
            self._compressor.decode(self._sent[peer : peer + 1], part, self._cut)
        return whole

    def pack(self, vector: Tensor, scale: float, finite: Tensor, step: int) -> None:
        addend, old, new = self.scaled(vector, scale), self.held.residual, self.held.following
        watched = self.watched if self.watched is not None and self.watched.expected else None
        if watched is not None:
            watched.keep(addend, lambda: old, step, start=self._first, elements=self._elements)
        for peer in range(len(self._sent)):
            part = slice(peer * self._share, (peer + 1) * self._share)
            kept = StepResidual(old[part], new[part]) if self._compressor.error_feedback else NO_RESIDUAL
            seed = seed_of(f"{self._place}\n{peer}", step)
            self._compressor.compress(addend[part], kept, self._sent[peer : peer + 1], self._cut, seed)
        if watched is not None:  # now, for no rank waits until the sums have come
            watched.part_arrived(self.sent(), self._first)
        self.held.commit(finite)

    def add_up(self, total: Tensor) -> None:
        sums = total if total.dtype == self.dtype else torch.empty_like(total, dtype=self.dtype)
        self._compressor.add_up(self._received, sums, self._cut)
        if sums is not total:
            total.copy_(sums)


def make_push(
    spec: CompressorSpec, elements: int, share: int, peers: int, dtype: torch.dtype, device: torch.device,
    metadata_bytes: int = 0, place: str = "",
) -> Push:  # fmt: skip
    """Return how one vector is pushed: of so many elements, of which each of the `peers` owns a part of `share`. `spec`
    is what the plan says of its bucket; of those that select, with one density. `metadata_bytes`: of what is sent
    behind it. `place`: names rank and bucket, so that no two of them round alike where they round by chance.
    """
    parts = [(f"part {p}", max(0, min(share, elements - p * share))) for p in range(peers)]
    # Each owner adds up wider numbers than the wire's, so that sums of several ranks need no room in its dtype.
    by_part = spec if spec.density is None else replace(spec, scope="layer")
    compressor = make_compressor(by_part, parts, ranks=1)
    if compressor is None:
        return WholePush(share, peers, dtype, device, metadata_bytes)
    if isinstance(compressor, WireCompressor):
        return NarrowedPush(compressor, elements, share, peers, dtype, device, metadata_bytes, place)
    assert isinstance(compressor, SparseCompressor)
    return SelectedPush(compressor, elements, share, peers, dtype, device, metadata_bytes)
