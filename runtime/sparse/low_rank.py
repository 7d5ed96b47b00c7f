"""Buckets of low rank: factors of matrices are all-reduced, and the error of their product is sent later.

See `runtime.sparse.compressors.powersgd` for what is sent. Besides the residual a bucket keeps the right factors that
the next step starts from, which is the same on all ranks; it counts when the step's residuals do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from runtime.comm.collectives.direct import Factored
from runtime.core.buckets import BucketBuffer
from runtime.sparse.compressed import BucketResidual
from runtime.sparse.compressors.magnitudes import accumulate
from runtime.sparse.compressors.powersgd import LowRankCompressor


class WarmResidual(BucketResidual):
    """A bucket's gradients and residual, and the right factors of its last step."""

    def __init__(self, bucket: BucketBuffer, compressor: LowRankCompressor) -> None:
        super().__init__(bucket)
        self.factors = compressor.factors([slot.view for slot in bucket.slots])
        self._names = [slot.name for slot in bucket.slots]
        self.seeds = self.factors.seeds(self._names, self.residual)
        self.start = torch.zeros_like(self.seeds)
        """Shape (elements of all right factors,), as `following_start`; 0: the next step starts from seeds."""
        self.following_start = torch.zeros_like(self.start)

    def commit(self, finite: Tensor) -> None:
        super().commit(finite)
        if finite.device.type != "cpu":
            torch.where(finite, self.following_start, self.start, out=self.start)
        elif finite:
            self.start.copy_(self.following_start)

    def starts(self) -> dict[str, Tensor]:
        """Shapes (rank, columns)."""
        names = [self._names[index] for index in self.factors.members]
        return dict(zip(names, self.factors.right.each(self.start), strict=True))

    def put_starts(self, starts: Mapping[str, Tensor]) -> None:
        for name, start in self.starts().items():
            found = starts.get(name)
            start.copy_(found) if found is not None and found.shape == start.shape else start.zero_()


class LowRankEncoding:
    """`Encoding` of matrices as factors. What is no matrix is sent with the right factors."""

    def __init__(self, feedback: WarmResidual, tail_elements: int) -> None:
        """Lay out the message; the tail (float32) has `tail_elements` and is sent behind all else."""
        self._feedback, self._factors = feedback, feedback.factors
        sizes = [place.stop - place.start for place in self._factors.whole]
        right, whole = self._factors.right.elements, sum(sizes)
        new = feedback.residual.new_zeros
        self._own = new(right)
        """This rank's right factors."""
        self.message = Factored(
            new(self._factors.left.elements), new(right + whole + tail_elements), self._project, self._subtract
        )
        feedback.following_start = self.message.right[:right]
        self._whole = self.message.right[right : right + whole].split(sizes)
        self._tail = self.message.right[right + whole :]
        self.k = self.message.left.numel() + right + whole

    def watched(self, k: int) -> None:
        """Return None: what is left out says little of what training loses by it."""

    def encode(self, vector: Tensor, tail: Tensor | None, step: int) -> None:
        """Fill the left factors; see `Encoding.encode`."""
        feedback = self._feedback
        following = accumulate(feedback.residual, vector, feedback.following)
        self._factors.begin(following, feedback.start, feedback.seeds, self.message.left)
        for place, sent in zip(self._factors.whole, self._whole, strict=True):
            sent.copy_(following[place])
            following[place] = 0.0
        if tail is not None:
            self._tail.copy_(tail)

    def _project(self) -> None:
        self._factors.project(self._feedback.following, self.message.left, self._own)
        self._feedback.following_start.copy_(self._own)

    def _subtract(self) -> None:
        self._factors.subtract(self._feedback.following, self.message.left, self._own)

    def decode(self, sums: Tensor, tail: Tensor | None) -> None:
        """Multiply the summed factors; see `Encoding.decode`."""
        self._factors.multiply(self.message.left, self._feedback.following_start, sums)
        for place, summed in zip(self._factors.whole, self._whole, strict=True):
            sums[place] = summed
        if tail is not None:
            tail.copy_(self._tail)
