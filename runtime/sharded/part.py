"""One rank's part of a message in the sharded optimizer step: of its averaged gradients, and of its weights.

All ranks compute with the same weights, which lie in `whole`. What the optimizer updates is this rank's part of it; or,
where weights are gathered in bfloat16, a float32 copy of that part, the master weights, of which everybody, its owner
too, has the rounded ones (as in mixed-precision training: Micikevicius et al., ICLR 2018).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.collectives.exchange import all_gather, all_gather_parts
from runtime.comm.collectives.phases import Works, reduce_scatter
from runtime.comm.topology import Rows
from runtime.comm.world import World
from runtime.core.buckets import Message, Part, Slot

ROUNDED, MASTER = torch.bfloat16, torch.float32
"""Weights as they are gathered where they are rounded, and as they are kept then; others are gathered as they are."""


class OwnPart(Part):
    """One message: its gradients, of which this rank's part becomes the average, and its weights."""

    scratch: Tensor
    """Bytes (uint8), `received_bytes` or more, that this message is received in, and others at other times."""

    def __init__(
        self, message: Message, rank: int, ranks: int, *, rounded: bool = False,
        owners: Mapping[str, int] | None = None, nodes: Rows = (),
    ) -> None:  # fmt: skip
        """Weights stay where they are for now.

        Args:
            message: the gradients; of owners, in their order.
            rank: this one.
            ranks: number of ranks.
            rounded: weights are gathered in bfloat16, if they are float32.
            owners: rank of each parameter, by name: parts are whole parameters, and a rank may have none; default:
                parts are as long as each other.
            nodes: ranks by node; default: not known.
        """
        self.sizes = [message.flat.numel() // ranks] * ranks
        """Elements of each rank's part."""
        self.by_parameter = owners is not None and all(slot.name in owners for slot in message.slots)
        """Whether parts are whole parameters."""
        if owners is not None and self.by_parameter:
            self.sizes = [0] * ranks
            for slot in message.slots:
                self.sizes[owners[slot.name]] += slot.parameter.numel()
        sent = max((sum(self.sizes[one] for one in node) * (ranks - len(node)) for node in nodes), default=0)
        self._padded = len(set(self.sizes)) > 1 and sent > (ranks - 1) * max(self.sizes)
        """Whether parts are gathered padded to one length: the library's ring then takes the links between nodes less
        than a message of each rank to each other one does."""
        start, stop = list(accumulate(self.sizes, initial=0))[rank : rank + 2]
        super().__init__(message, rank, ranks, stop - start, start)
        self.own = slice(start, stop)
        self.whole = torch.zeros_like(message.flat)
        """All weights, where parameters lie during the sharded mode; of the message's shape."""
        rounded = rounded and self.whole.dtype == MASTER
        self.master = torch.zeros_like(self.whole[self.own]) if rounded else None
        """This rank's weights before they are rounded. Shape (share,)."""
        empty = [slot for slot in message.slots if not slot.parameter.numel()]
        if owners is not None and self.by_parameter:
            empty = [slot for slot in empty if owners[slot.name] == rank]
        nothing = {slot.index: (0, slice(0, 0)) for slot in empty}
        self.places = {slot.index: (start, place) for slot, start, place in self.cuts()} | nothing
        """Gradients of which this rank has a part, by place in the plan: the first of its elements in memory order, and
        where they are in `total`. Every rank has those without elements, but for those with an owner.
        """

    def shaped(self, values: Tensor, slot: Slot) -> Tensor:
        """Return values of this rank's elements of a parameter (1-D) in the form in which the optimizer has them: as
        they are, or, of a whole parameter, in its shape, with its strides in the buffer.
        """
        if not self.by_parameter:
            return values
        return values.as_strided(slot.view.shape, slot.view.stride(), values.storage_offset())

    @property
    def weights(self) -> Tensor:
        """Weights of this rank, which the optimizer updates. Shape (share,)."""
        return self.whole[self.own] if self.master is None else self.master

    @property
    def total(self) -> Tensor:
        """Part of this rank of the averaged gradients. Shape (share,)."""
        return self.message.flat[self.own]

    @property
    def narrow_weights_bytes(self) -> int:
        """Bytes of `scratch` that gathering rounded weights needs."""
        return 0 if self.master is None else self.ranks * self.sent_weights_bytes

    @property
    def updates_bytes(self) -> int:
        """Bytes of `scratch` that gathering updates of at most 16 bits needs."""
        return self.whole.numel() * ROUNDED.itemsize if self.by_parameter else 0

    @property
    def received_bytes(self) -> int:
        return self.ranks * self.share * self.message.flat.itemsize

    def phases(self, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """Reduce-scatter the gradients: `total` becomes the sum, in order of rank."""
        flat = self.message.flat
        received = self.scratch[: self.received_bytes].view(flat.dtype).view(self.ranks, self.share)
        return reduce_scatter(flat[: sum(self.sizes)], received, self.total, group, self.sizes)

    def gather_phases(self, group: dist.ProcessGroup) -> Works:
        """Gather weights that are not rounded; see `gather_weights`."""
        return self._gather(self.whole[: sum(self.sizes)], self.weights, group)

    def _gather(self, whole: Tensor, own: Tensor, group: dist.ProcessGroup) -> Works:
        """Fill `whole` with every rank's vector, of `sizes` elements."""
        if not self._padded:
            yield all_gather_parts(whole, own, self.sizes, group)
            return
        rows = own.new_zeros(self.ranks, max(self.sizes))
        rows[self.rank, : own.numel()] = own
        yield all_gather(rows.view(-1), rows[self.rank], group)
        for row, place in zip(rows, whole.split(self.sizes), strict=True):
            place.copy_(row[: place.numel()])

    def gathered(self, world: World, own: Tensor, doing: str, out: Tensor | None = None) -> Tensor:
        """Return every rank's vector of as many elements as its part has, one after the other; all ranks call this."""
        if len(set(self.sizes)) == 1:
            return world.gather_parts(own, doing, out)
        whole = own.new_empty(sum(self.sizes)) if out is None else out
        with world.error_context(doing):
            for work in self._gather(whole, own.contiguous(), world.process_group):
                work.get_future()  # else sends and receives end where a slice of the wait does
                world.wait(work, doing, own.device)
        return whole

    def gather_weights(self, world: World, doing: str) -> None:
        """Give every rank all parts, of which each has this one's in `weights`; rounded, where it has master weights.
        All ranks must call this; `doing`: see `World.error_context`.
        """
        if self.master is None:
            self.gathered(world, self.weights, doing, self.whole[: sum(self.sizes)])
            return
        gathered = self.scratch[: self.narrow_weights_bytes]
        world.gather_parts(self.sent_weights(), doing, out=gathered)
        self.take_weights(gathered.view(self.ranks, self.sent_weights_bytes))

    @property
    def sent_weights_bytes(self) -> int:
        """Bytes that this rank sends of its weights."""
        return self.share * (self.whole.dtype if self.master is None else ROUNDED).itemsize

    def sent_weights(self) -> Tensor:
        """Return this rank's weights as others get them. Shape (sent_weights_bytes,), uint8."""
        return (self.weights if self.master is None else self.master.to(ROUNDED)).view(torch.uint8)

    def take_weights(self, rows: Tensor) -> None:
        """Let `whole` be what all ranks have sent. `rows`: uint8, shape (ranks, sent_weights_bytes)."""
        if self.master is None:
            self.whole.view(torch.uint8).view(self.ranks, -1).copy_(rows)
        elif self.share:  # rows without bytes have no stride of two
            self.whole.view(self.ranks, self.share).copy_(rows.view(ROUNDED))

    # Of master weights.

    def begin_master(self) -> None:
        """Keep this rank's weights as they are, and round all."""
        if self.master is not None:
            self.master.copy_(self.whole[self.own])
            self.whole.copy_(self.whole.to(ROUNDED))

    def round_own(self) -> None:
        """Let this rank's weights be its masters, rounded, before others have them."""
        if self.master is not None:
            self.whole[self.own] = self.master.to(ROUNDED)

    def collect_changes(self) -> None:
        """Take over weights that are not what their masters round to: a script has changed them."""
        if self.master is not None:
            shown = self.whole[self.own]
            torch.where(shown == self.master.to(ROUNDED), self.master, shown, out=self.master)

    def gather_master(self, world: World) -> None:
        """Let `whole` be the weights before rounding; all ranks must call this."""
        if self.master is not None:
            world.gather_parts(self.master, "gathering the weights that ranks round", out=self.whole)
