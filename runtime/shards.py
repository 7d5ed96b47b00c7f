"""The shard of the global weights that a rank owns, as a parameter server would: gradients in, weights out.

Every bucket is cut into as many equal parts as there are ranks; part r belongs to rank r. What is owned lies flat, in
the order of the bucket's gradients and the memory order of each, and `torch.optim.SGD` itself updates it, so that the
servers' arithmetic is the user's optimizer's. Source: SSD-SGD (Xu et al., arXiv 2012.05396), Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.buckets import BucketBuffer, Message, Slot, view_of
from runtime.collectives.delayed import push
from runtime.errors import InputError
from runtime.torch_compat import all_gather_single
from runtime.world import World

HYPERPARAMETERS = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
"""Of a parameter group, what its owners need."""

Pieces = dict[str, dict[str, Any]]
"""What a rank owns of each parameter: `start`, `weights` and `momentum` (None: none yet), 1-D in memory order, whose
`stride` it has."""

Rates = Sequence[Mapping[str, Any]]
"""The hyperparameters of each of the optimizer's groups, as they are at one step."""


def rates_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The hyperparameters that are in force now."""
    found = []
    for group in optimizer.param_groups:
        values = {name: group[name] for name in HYPERPARAMETERS}
        found.append(values | {"lr": float(values["lr"])})  # schedulers may keep a tensor
    return found


@dataclass(frozen=True)
class Piece:
    """A part of one parameter that this rank owns."""

    slot: Slot
    """Of the parameter."""
    start: int
    """In the parameter's elements, in memory order."""
    place: slice
    """In the shard."""
    weights: nn.Parameter
    """1-D; a part of the shard."""
    gradient: Tensor
    """Likewise, of the sum of what was pushed."""

    @property
    def name(self) -> str:
        return self.slot.name


class Part:
    """What one rank has of a message of a bucket, cut into as many equal parts as there are ranks."""

    def __init__(self, message: Message, rank: int, ranks: int) -> None:
        self.message, self.rank, self.ranks = message, rank, ranks
        self.numel = sum(slot.parameter.numel() for slot in message.slots)
        self.share = -(-self.numel // ranks)
        """Elements of a part; the last one may be shorter, and is filled up."""

    def cuts(self) -> Iterator[tuple[Slot, int, slice]]:
        """(parameter, first of its elements in memory order, where they lie in this rank's part) of what is in it."""
        first, offset = self.rank * self.share, 0
        for slot in self.message.slots:
            start, stop = max(offset, first), min(offset + slot.parameter.numel(), first + self.share)
            if start < stop:
                yield slot, start - offset, slice(start - first, stop - first)
            offset += slot.parameter.numel()

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """The gradients' or weights' places in a vector of all parts. Shapes as the parameters'."""
        found, offset = {}, 0
        for slot in self.message.slots:  # laid out as gradients are, whatever becomes of the parameter's own layout
            found[slot.name] = view_of(whole, offset, slot.view)
            offset += slot.parameter.numel()
        return found


class Shard(Part):
    """This rank's part of one message of a bucket: of all gradients of one dtype."""

    def __init__(self, message: Message, rank: int, ranks: int) -> None:
        super().__init__(message, rank, ranks)
        flat = message.flat
        self.pushed = flat.new_zeros(ranks * self.share)
        """What this rank sends: part r goes to rank r. Shape (ranks · share,)."""
        self.received = flat.new_zeros(ranks * self.share)
        """Every rank's push to this one. Shape (ranks · share,)."""
        self.total = flat.new_zeros(self.share)
        """Their sum, in order of rank: the averaged gradient. Shape (share,)."""
        self.weights = self.flatten({slot.name: slot.parameter.detach() for slot in message.slots})
        """The global weights. Shape (share,)."""
        self.pieces = [
            Piece(slot, start, place, nn.Parameter(self.weights[place]), self.total[place])
            for slot, start, place in self.cuts()
        ]

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """This rank's part of tensors by name, in the shapes of their parameters; missing ones are zero."""
        whole = self.message.flat.new_zeros(self.ranks * self.share)
        for name, view in self.views(whole).items():
            if name in tensors:
                view.copy_(tensors[name])
        return whole[self.rank * self.share : (self.rank + 1) * self.share].clone()

    def pack(self, scale: float) -> None:
        """The bucket's gradients, times `scale`, are what is pushed."""
        torch.mul(self.message.flat[: self.numel], scale, out=self.pushed[: self.numel])

    def phases(self, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """See `Collective.run`."""
        return push(self, group)

    def add_up(self) -> None:
        """All pushes have come."""
        add_in_order(self.received, self.total)


def add_in_order(received: Tensor, total: Tensor) -> None:
    """`total` (n,) becomes the sum of what came from every rank (ranks · n,), always in the same order."""
    parts = received.view(-1, total.numel()) if total.numel() else received.view(1, 0)
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)


class Server:
    """What one rank owns of all buckets, and the optimizer that updates it."""

    def __init__(
        self, buckets: Sequence[BucketBuffer], optimizer: torch.optim.Optimizer, rank: int, ranks: int
    ) -> None:
        """Takes over the parameters' weights and the optimizer's momentum, which are the same on all ranks."""
        self.shards = [[Shard(message, rank, ranks) for message in bucket.messages] for bucket in buckets]
        """By bucket and message."""
        groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        parameters = {slot.name: slot.parameter for bucket in buckets for slot in bucket.slots}
        self._sgd = self._make_optimizer(parameters, groups)
        momenta = {name: optimizer.state.get(p, {}).get("momentum_buffer") for name, p in parameters.items()}
        self.set_momenta({name: buffer for name, buffer in momenta.items() if buffer is not None})

    @property
    def pieces(self) -> Iterator[Piece]:
        """Of all parameters."""
        return (piece for shard in self._all_shards for piece in shard.pieces)

    @property
    def _all_shards(self) -> Iterator[Shard]:
        return (shard for shards in self.shards for shard in shards)

    def _make_optimizer(
        self, parameters: Mapping[str, nn.Parameter], groups: Mapping[int, int]
    ) -> torch.optim.SGD | None:
        """One group for each of the user's of which this rank owns something."""
        owned: dict[int, list[nn.Parameter]] = {}
        for piece in self.pieces:
            piece.weights.grad = piece.gradient
            group = groups.get(id(parameters[piece.name]))
            if group is not None:
                owned.setdefault(group, []).append(piece.weights)
        self._mirrored = sorted(owned)
        listed = [{"params": owned[group]} for group in self._mirrored]
        on_device = any(piece.weights.device.type != "cpu" for piece in self.pieces)
        return torch.optim.SGD(listed, lr=0.0, fused=on_device or None) if listed else None

    def set_momenta(self, momenta: Mapping[str, Tensor]) -> None:
        """Goes on with momentum buffers by name, in the shapes of their parameters."""
        for shard in self._all_shards:
            flat = shard.flatten(momenta)
            for piece in shard.pieces:
                # On a device all have one: a first step that is left out there leaves none undefined.
                if piece.name in momenta or piece.weights.device.type != "cpu":
                    self._set_momentum(piece, flat[piece.place])

    def _momentum_of(self, piece: Piece) -> Tensor | None:
        return None if self._sgd is None else self._sgd.state.get(piece.weights, {}).get("momentum_buffer")

    def _set_momentum(self, piece: Piece, buffer: Tensor | None) -> None:
        if self._sgd is not None:
            kept = None if buffer is None else buffer.to(piece.weights.device, copy=True)
            self._sgd.state[piece.weights]["momentum_buffer"] = kept

    def momenta(self, shard: Shard) -> Tensor:
        """The momentum buffers of what is owned, zero where there is none yet. Shape (share,)."""
        flat = torch.zeros_like(shard.weights)
        for piece in shard.pieces:
            buffer = self._momentum_of(piece)
            if buffer is not None:
                flat[piece.place] = buffer
        return flat

    def gathered(self, part_of: Callable[[Shard], Tensor], world: World) -> dict[str, Tensor]:
        """What all owners have, by name, in the parameters' shapes; all ranks must call this.

        Raises:
            CommunicationError: a rank did not come within the deadline.
        """
        found: dict[str, Tensor] = {}
        for shard in self._all_shards:
            whole = torch.zeros_like(shard.pushed)
            with world.naming("gathering the global weights"):
                all_gather_single(whole.view(torch.uint8), part_of(shard).view(torch.uint8), group=world.group)
            found |= shard.views(whole)
        return found

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Goes on with weights by name, in the shapes of their parameters."""
        for shard in self._all_shards:
            shard.weights.copy_(shard.flatten(weights))

    def state(self) -> Pieces:
        """Copies of what is owned, by parameter."""
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
        """Goes on from the `state` of the same rank of as many.

        Raises:
            InputError: the parameters were laid out in memory in another way.
        """
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
        """One step of momentum SGD with weight decay, with the averaged gradients that have come.

        Args:
            rates: hyperparameters of the user's groups.
            finite: 0-d; whether to make the step at all. The host does not wait for a device to know it.
            used: whether any rank has a gradient, of each in order of readiness; without one nothing happens to a
                parameter. On a device, where the host would have to wait for this, it counts as used.
        """
        if self._sgd is None:
            return
        if used.device.type == "cpu":
            for piece in self.pieces:
                piece.weights.grad = piece.gradient if used[piece.slot.index] else None
        for group, index in zip(self._sgd.param_groups, self._mirrored, strict=True):
            group.update(rates[index])
        if finite.device.type == "cpu":
            if finite:
                self._sgd.step()
            return
        self._sgd.found_inf = 1.0 - finite.float()  # type: ignore[attr-defined]  # the fused step looks at it
        self._sgd.step()
