"""Gradients that are reduce-scattered in fewer bytes for the sharded optimizer step, and their residuals.

    bucket complete   ─▶ residual + gradient is encoded, each owner's part into one row of bytes
    rows have come    ─▶ the owner adds them up in a wider dtype, in order of rank; the sum is not encoded again
    behind the last   ─▶ ranks tell each other whether the sums that they own are finite, so that the step counts for
                         all residuals or for none, on all ranks alike

Each rank keeps one residual, of what it sends: this is the first shot of `runtime.sparse.narrowing.TwoShots` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.collectives.phases import all_to_all
from runtime.core.buckets import BucketBuffer
from runtime.core.usage import GatheredUsage
from runtime.sharded.part import OwnPart
from runtime.sparse.compressed import BucketResidual, NoResidual, all_finite
from runtime.sparse.compressors.wire import WireCompressor
from runtime.sparse.narrowing import NarrowEncoder
from runtime.sparse.residuals import ErrorFeedbackState


class NarrowPart(OwnPart):
    """The one message of a bucket that is sent in a narrow format: a `CompressedBucket`, too."""

    def __init__(
        self, bucket: BucketBuffer, rank: int, ranks: int, compressor: WireCompressor, *, rounded: bool = False
    ) -> None:
        """Encode a bucket whose gradients have one dtype, and lie in as many parts as there are ranks, as long as rows
        are.
        """
        super().__init__(bucket.messages[0], rank, ranks, rounded=rounded)
        self.feedback = BucketResidual(bucket) if compressor.error_feedback else NoResidual(bucket)
        self._compressor, self._cut = compressor, compressor.cut(self.numel, ranks, self.feedback.dtype)
        self._encoder = NarrowEncoder(self.feedback, compressor, self._cut, rank)
        self._rows = torch.zeros(ranks, self._cut.row_bytes, dtype=torch.uint8, device=self.feedback.device)
        """Encoded gradients: row r goes to rank r."""
        self.watched, self.k = self._encoder.watched(self.numel), self.numel

    @property
    def received_bytes(self) -> int:
        return max(self._rows.nbytes, self.narrow_weights_bytes)

    def pack(self, step: int) -> None:
        gradient = self.message.flat[: self.numel]
        self.watched.keep(gradient, self.feedback.unsent, step)
        self._encoder.encode_rows(gradient, self._rows, step)

    def phases(self, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """Reduce-scatter encoded gradients; see `OwnPart.phases`."""
        received = self.scratch[: self._rows.nbytes].view_as(self._rows)
        yield from all_to_all(received.view(-1), self._rows.view(-1), group)
        start = min(self.numel, self.own.start)
        total = self.total[: min(self.numel, self.own.stop) - start]
        if not total.numel():
            return
        wide = self.feedback.dtype
        sums = total if total.dtype == wide else torch.empty_like(total, dtype=wide)
        self._compressor.add_up(received, sums, self._cut)
        if sums is not total:
            total.copy_(sums)
        self.watched.part_arrived(sums, start)

    def unpack(self) -> Tensor:
        """See `CompressedBucket.unpack`, of this rank's part: sums are there; other ranks hear by `CarriedUsage`."""
        return all_finite(self.total)


class CarriedUsage(GatheredUsage):
    """Usage flags that also report, while residuals are carried, for which unused gradients a residual was summed in
    the parts that a rank owns, and whether these parts are finite.
    """

    CAME, NOT_FINITE = 2, 2

    def __init__(
        self, gradients: int, ranks: int, device: torch.device, parts: Sequence[OwnPart], carried: ErrorFeedbackState
    ) -> None:
        """`parts`: this rank's of all messages."""
        super().__init__(gradients, ranks, device)
        self._parts, self._carried = parts, carried
        self._unused: Sequence[int] | None = None

    def write(self, unused: Sequence[int]) -> None:
        super().write(unused)
        self._unused = unused

    def write_given_up(self) -> None:
        super().write_given_up()
        self._unused = None

    def phases(self, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        if self._unused is not None and self._carried.active:  # all messages before this one have come
            self._look(set(self._unused))
        yield from super().phases(group)

    def _look(self, unused: set[int]) -> None:
        finite = torch.stack([all_finite(part.total) for part in self._parts]).all()
        self._own[-1] = finite.logical_not() * self.NOT_FINITE
        for part in self._parts if unused else ():
            for slot in part.message.slots:
                if slot.index in unused & part.places.keys() and self._carried.brings(slot):
                    self._own[slot.index] = part.total[part.places[slot.index][1]].any() * self.CAME

    def given_up(self) -> int:
        return int((self._told[:, -1] == 1).sum())

    def finite(self) -> Tensor:
        """Return, after the message has come, whether all averages are (0-d)."""
        return (self._told[:, -1] != self.NOT_FINITE).all()

    def came(self) -> set[int]:
        """Return, after the message has come, the gradients that a rank did not use and for whose part of it something
        came. Waits for the device.
        """
        return self._reported(self.CAME)
