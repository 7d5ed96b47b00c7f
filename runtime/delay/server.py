"""The shard of the global weights that a rank owns, as a parameter server would: gradients in, weights out.

Every bucket is cut into as many equal parts as there are owners: every rank is one, part r belongs to owner r. What is
owned lies flat, in the order of the bucket's gradients and the memory order of each, and `torch.optim.SGD` itself
updates it, so that the servers' arithmetic is the user's optimizer's.

Where the worker is a node of several ranks, owners are counted by place: the first ranks of all nodes, then the second
ones, and so on. So the rank with a place has, of the node's gradients, those that ranks with its place own, and pushes
these to them. Source: SSD-SGD (Xu et al., arXiv 2012.05396), Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.comm.topology import Topology
from runtime.comm.world import World
from runtime.core.buckets import BucketBuffer, Message, Part, Slot
from runtime.delay.pushes import NarrowedPush, Push, SelectedPush, WholePush, make_push
from runtime.errors import InputError
from runtime.plan import NO_COMPRESSION, CompressorSpec

HYPERPARAMETERS = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
"""Options of a parameter group that its owners need."""

Pieces = dict[str, dict[str, Any]]
"""A rank's part of each parameter: `start`, `weights` and `momentum` (None: none yet), 1-D in memory order, whose
`stride` it has."""

Rates = Sequence[Mapping[str, Any]]
"""The hyperparameters of each of the optimizer's groups, as they are at one step."""


def rates_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    found = []
    for group in optimizer.param_groups:
        values = {name: group[name] for name in HYPERPARAMETERS}
        found.append(values | {"lr": float(values["lr"])})  # schedulers may keep a tensor
    return found


@dataclass(frozen=True)
class Piece:
    """A part of one parameter that this rank owns."""

    slot: Slot
    start: int
    """First element, in the memory order of the parameter."""
    place: slice
    """Place in the shard."""
    weights: nn.Parameter
    """1-D; a part of the shard."""
    gradient: Tensor
    """1-D; its part of the sum of what was pushed."""

    @property
    def name(self) -> str:
        return self.slot.name


class Shard(Part):
    """This rank's part of one message of a bucket: of all gradients of one dtype."""

    def __init__(
        self,
        message: Message,
        rank: int,
        ranks: int,
        *,
        ranks_per_node: int = 1,
        compressor: CompressorSpec = NO_COMPRESSION,
        metadata_bytes: int = 0,
    ) -> None:
        """`rank` is this owner's number, of `ranks`; each worker has `ranks_per_node`. `metadata_bytes`: of what is
        sent behind the gradients.
        """
        super().__init__(message, rank, ranks)
        flat = message.flat
        self.node_share = ranks // ranks_per_node * self.share
        """Elements that owners with one place have together."""
        self.of_node = flat.new_zeros(self.node_share) if ranks_per_node > 1 else None
        """The node's gradients, of those that ranks with this place own. Shape (node_share,); None: all are pushed."""
        first = self.place.start
        self._mine = slice(first, max(first, min(first + self.node_share, self.numel)))
        """Elements that this rank pushes, in a vector of all parts."""
        self._per_node, self._metadata_bytes = ranks_per_node, metadata_bytes
        self.push = self._make_push(compressor)
        self.compresses = not isinstance(self.push, WholePush)
        self.by_magnitude = isinstance(self.push, SelectedPush) and self.push.by_magnitude
        self.total = flat.new_zeros(self.share)
        """The sum of what was pushed, in order of workers: the averaged gradient. Shape (share,)."""
        self.weights = self.flatten({slot.name: slot.parameter.detach() for slot in message.slots})
        """The global weights. Shape (share,)."""
        self.pieces = [
            Piece(slot, start, place, nn.Parameter(self.weights[place]), self.total[place])
            for slot, start, place in self.cuts()
        ]

    def _make_push(self, compressor: CompressorSpec) -> Push:
        flat, first, slot = self.message.flat, self._mine.start, self.message.slots[0]
        push = make_push(
            compressor, self._mine.stop - first, self.share, self.ranks // self._per_node, flat.dtype, flat.device,
            self._metadata_bytes, place=f"{self.rank}\n{slot.name}",
        )  # fmt: skip
        if isinstance(push, NarrowedPush):
            push.watch(slot.bucket, first, self.numel)
        return push

    def whole(self) -> Tensor:
        return self.total.new_zeros(self.ranks * self.share)

    @property
    def place(self) -> slice:
        """Parts of owners with this rank's place, in a vector of all parts."""
        first = self.rank * self.share // self.node_share * self.node_share if self.node_share else 0
        return slice(first, first + self.node_share)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return this rank's part of tensors by name, in the shapes of their parameters; missing ones are zero."""
        return self.joined(tensors)[self.rank * self.share : (self.rank + 1) * self.share].clone()

    def joined(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Return all parts of tensors by name. Shape (ranks · share,)."""
        whole = self.message.flat.new_zeros(self.ranks * self.share, dtype=dtype)
        for name, view in self.views(whole).items():
            if name in tensors:
                view.copy_(tensors[name])
        return whole

    def pack(self, scale: float, finite: Tensor, step: int = 0) -> None:
        """Pack `vector`, times `scale`, for the next push; see `Push`."""
        self.push.pack(self.vector, scale, finite, step)

    @property
    def vector(self) -> Tensor:
        """Vector to push: the bucket's gradients, or this rank's part of the node's. 1-D."""
        if self.of_node is None:
            return self.message.flat[: self.numel]
        return self.of_node[: self._mine.stop - self._mine.start]

    @property
    def k(self) -> int:
        """Number of elements that each worker pushes; 0 if they are not selected."""
        push = self.push
        return min(self.numel, self._per_node * push.selected) if isinstance(push, SelectedPush) else 0

    def sums(self, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Add up residuals and selections of all ranks (see `runtime.sparse.samples.Selecting`)."""
        push = self.push
        assert isinstance(push, SelectedPush)
        both = push.residual().new_zeros(2, self.numel)
        both[0, self._mine], both[1, self._mine] = push.residual(), push.sent()
        dist.all_reduce(both, group=group)
        return both[0], both[1]

    def push_as(self, compressor: CompressorSpec) -> None:
        """Push so from the next step on, where nothing is selected, and with it the residual; nothing may be on its
        way.
        """
        held, self.push = self.push.residual(), self._make_push(compressor)
        kept = self.push.residual()
        if isinstance(self.push, WholePush):
            self.push.pending = held
        elif held is not None and kept is not None:
            kept.copy_(held)

    def phases(self, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        yield from self.push.rows.phases(group)
        self.push.add_up(self.total)

    def residuals(self) -> dict[str, Tensor]:
        """Return this rank's residual by gradient, in its shape; zero where it is other ranks' of the node."""
        held = self.push.residual()
        if held is None:
            return {}
        whole = held.new_zeros(self.ranks * self.share)
        whole[self._mine] = held
        return self.views(whole)

    def put_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Take over the residual of its gradients; what belongs to other ranks of the node is left out."""
        held = self.push.residual()
        if held is not None:
            held.copy_(self.joined(residuals, held.dtype)[self._mine])


class Server:
    """One rank's shards of all buckets, and the optimizer that updates them."""

    def __init__(
        self, buckets: Sequence[BucketBuffer], optimizer: torch.optim.Optimizer, rank: int, workers: Topology,
        compressors: Sequence[CompressorSpec] | None = None, metadata_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Take over the parameters' weights and the optimizer's momentum, which are the same on all ranks.

        Args:
            compressors: of each bucket's pushes; default: none.
            metadata_bytes: what follows the last push.
        """
        self._owners, ranks = workers.owners, workers.num_nodes * workers.ranks_per_node
        last = buckets[-1].messages[-1]
        self.shards = [
            [
                Shard(
                    message, self._owners[rank], ranks, ranks_per_node=workers.ranks_per_node,
                    compressor=NO_COMPRESSION if compressors is None else compressors[bucket.index],
                    metadata_bytes=metadata_bytes if message is last else 0,
                )
                for message in bucket.messages
            ]
            for bucket in buckets
        ]  # fmt: skip
        """Shards by bucket and message."""
        self._sgd = self._make_optimizer(optimizer)
        for shard in self._all_shards:
            momenta = {
                slot.name: buffer
                for slot in shard.message.slots
                if (buffer := optimizer.state.get(slot.parameter, {}).get("momentum_buffer")) is not None
            }
            flat = shard.flatten(momenta)
            for piece in shard.pieces:
                # On a device all have one: a first step that is left out there leaves none undefined.
                if piece.name in momenta or piece.weights.device.type != "cpu":
                    self._set_momentum(piece, flat[piece.place])

    @property
    def pieces(self) -> Iterator[Piece]:
        return (piece for shard in self._all_shards for piece in shard.pieces)

    @property
    def _all_shards(self) -> Iterator[Shard]:
        return (shard for shards in self.shards for shard in shards)

    def _make_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.SGD | None:
        """Return what updates the pieces, with one group for each of the user's of which this rank owns something."""
        groups = {p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        owned: dict[int, list[nn.Parameter]] = {}
        for piece in self.pieces:
            piece.weights.grad = piece.gradient
            if piece.slot.parameter in groups:
                owned.setdefault(groups[piece.slot.parameter], []).append(piece.weights)
        self._mirrored = sorted(owned)
        listed = [{"params": owned[group]} for group in self._mirrored]
        # On a device the fused step alone looks at `found_inf`, without which the host would have to wait.
        on_device = any(piece.weights.device.type != "cpu" for piece in self.pieces)
        return torch.optim.SGD(listed, lr=0.0, fused=on_device or None) if listed else None

    def _momentum_of(self, piece: Piece) -> Tensor | None:
        return None if self._sgd is None else self._sgd.state.get(piece.weights, {}).get("momentum_buffer")

    def _set_momentum(self, piece: Piece, buffer: Tensor | None) -> None:
        if self._sgd is not None:
            kept = None if buffer is None else buffer.to(piece.weights.device, copy=True)
            self._sgd.state[piece.weights]["momentum_buffer"] = kept

    def momenta(self, shard: Shard) -> Tensor:
        """Return the momentum buffers of what is owned, zero where there is none yet. Shape (share,)."""
        flat = torch.zeros_like(shard.weights)
        for piece in shard.pieces:
            buffer = self._momentum_of(piece)
            if buffer is not None:
                flat[piece.place] = buffer
        return flat

    def gathered(self, part_of: Callable[[Shard], Tensor], world: World) -> dict[str, Tensor]:
        """Return what all owners have, by name, in the parameters' shapes; all ranks must call this."""
        found: dict[str, Tensor] = {}
        for shard in self._all_shards:
            whole, parts = shard.whole(), world.gather_parts(part_of(shard), "gathering the global weights")
            by_owner = whole.view(shard.ranks, -1)
            for owner, part in zip(self._owners, parts.view(shard.ranks, -1), strict=True):
                by_owner[owner] = part
            found |= shard.views(whole)
        return found

    def residuals(self) -> dict[str, Tensor]:
        """Return copies of this rank's residuals, by gradient, of buckets that do not push everything."""
        return {name: part.clone() for shard in self._all_shards for name, part in shard.residuals().items()}

    def put_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        for shard in self._all_shards:
            shard.put_residuals(residuals)

    def state(self) -> Pieces:
        """Return copies of what is owned, by parameter."""
        found: Pieces = {}
        for shard in self._all_shards:
            for piece in shard.pieces:
                buffer = self._momentum_of(piece)
                found[piece.name] = {
                    "start": piece.start,
                    "stride": piece.slot.view.stride(),
                    "weights": piece.weights.detach().clone(),
                    "momentum": None if buffer is None else buffer.clone(),
                }
        return found

    @torch.no_grad()
    def load(self, pieces: Pieces) -> None:
        """Continue from the same rank's `state`. Raises InputError where the parameters' memory formats were others."""
        for piece in self.pieces:
            saved = pieces[piece.name]
            if tuple(saved["stride"]) != piece.slot.view.stride():
                raise InputError(
                    f"found {piece.name} saved with the strides {tuple(saved['stride'])}, expected "
                    f"{piece.slot.view.stride()}: give the model the memory format that it had, before attach"
                )
            piece.weights.copy_(saved["weights"])
            self._set_momentum(piece, saved["momentum"])

    def update(self, rates: Rates, finite: Tensor, used: Tensor) -> None:
        """Make a step of momentum SGD with weight decay, with the averaged gradients that have come.

        Args:
            rates: hyperparameters of the user's groups.
            finite: 0-d; whether to make the step at all. The host does not wait for a device to know it.
            used: whether any rank has a gradient, of each in order of readiness; without one, and where no residual
                comes, nothing happens to a parameter. On a device, where the host would have to wait for
                this, it counts as used.
        """
        if self._sgd is None:
            return
        if used.device.type == "cpu":
            for shard in self._all_shards:
                for piece in shard.pieces:
                    comes = bool(used[piece.slot.index]) or (shard.compresses and bool(piece.gradient.any()))
                    piece.weights.grad = piece.gradient if comes else None
        for group, index in zip(self._sgd.param_groups, self._mirrored, strict=True):
            group.update(rates[index])
        if finite.device.type == "cpu":
            if finite:
                self._sgd.step()
            return
        self._sgd.found_inf = 1.0 - finite.float()  # type: ignore[attr-defined]  # the fused step looks at it
        self._sgd.step()
