"""Buckets of a 2D torus that are dense inside a node, and in fewer bytes between nodes (`wire` with links "inter").

Between nodes the ranks of one place add up their shard in two shots, as all ranks do the whole bucket where all links
are narrow; each rank's residual is that of its shard.
"""

from __future__ import annotations

from torch import Tensor

from runtime.comm.topology import Topology
from runtime.sparse.compressed import BucketResidual, TwoShots
from runtime.sparse.compressors.wire import WireCompressor
from runtime.sparse.samples import Rounding
from runtime.sparse.shards import ShardBucket


class NarrowTorusBucket(ShardBucket):
    """See `runtime.sparse.compressed.CompressedBucket`."""

    def __init__(
        self, feedback: BucketResidual, compressor: WireCompressor, topology: Topology, rank: int, tail: Tensor | None
    ) -> None:
        """`compressor` narrows a shard; `feedback` and `tail`: see `ShardBucket`."""
        place = topology.local_rank(rank)
        super().__init__(feedback, topology.ranks_per_node, place, tail)
        self.k = self.elements
        self.watched = Rounding(feedback.bucket, feedback=compressor.error_feedback)
        group = topology.cross_node_groups[place]
        self._shots = TwoShots(
            feedback, compressor, self.share, len(group), group.index(rank), self.tail_elements, seed=rank
        )
        self.packed = self.send(self._shots.message, self._summed.new_zeros(self.share))

    def pack(self, step: int) -> None:
        self.watched.keep(self.feedback.gradient(), self.feedback.unsent, step)
        super().pack(step)

    def fill(self) -> None:
        tail = None if self._tail is None else self.packed.tails.sum(dim=0)
        self._shots.encode(self._summed, tail, self._step)

    def add_nodes(self) -> None:
        self._shots.decode(self.packed.own, self._tail)

    def unpack(self) -> Tensor:
        """See `CompressedBucket.unpack`."""
        sums = self.packed.whole[: self.elements]
        self.watched.arrived(sums)
        self.feedback.give(sums)
        return self.feedback.finite()
