"""The shard of the global weights that a rank owns, as a parameter server would: gradients in, weights out.

Every bucket is cut into as many equal parts as there are ranks; part r belongs to rank r. What is owned lies flat, in
the order of the bucket's gradients and the memory order of each, and `torch.optim.SGD` itself updates it, so that the
servers' arithmetic is the user's optimizer's. Source: SSD-SGD (Xu et al., arXiv 2012.05396), Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.buckets import BucketBuffer, Message, view_of
from runtime.collectives.delayed import push
from runtime.errors import InputError
from runtime.plan import DelaySpec

HYPERPARAMETERS = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
"""Of a parameter group, what its owners need."""

Pieces = dict[str, dict[str, Any]]
"""What a rank owns of each parameter: `start`, `weights` and `momentum` (None: none yet), 1-D in memory order."""

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

    name: str
    start: int
    """In the parameter's elements, in memory order."""
    weights: nn.Parameter
    """1-D; a part of the shard."""
    gradient: Tensor
    """Likewise, of the sum of what was pushed."""


class Shard:
    """This rank's part of one message of a bucket: of all gradients of one dtype."""

    def __init__(self, message: Message, rank: int, ranks: int) -> None:
        self.message, self.rank, self.ranks = message, rank, ranks
        self.numel = sum(slot.parameter.numel() for slot in message.slots)
        self.share = -(-self.numel // ranks)
        flat = message.flat
        self.pushed = flat.new_zeros(ranks * self.share)
        """What this rank sends: part r goes to rank r. Shape (ranks · share,)."""
        self.received = flat.new_zeros(ranks * self.share)
        """Every rank's push to this one. Shape (ranks · share,)."""
        self.total = flat.new_zeros(self.share)
        """Their sum, in order of rank: the averaged gradient. Shape (share,)."""
        self.weights = self.flatten({slot.name: slot.parameter.detach() for slot in message.slots})
        """The global weights. Shape (share,)."""
        self.pieces = list(self._pieces())

    def _pieces(self) -> Iterator[Piece]:
        first, offset = self.rank * self.share, 0
        for slot in self.message.slots:
            start, stop = max(offset, first), min(offset + slot.parameter.numel(), first + self.share)
            if start < stop:
                part = slice(start - first, stop - first)
                yield Piece(slot.name, start - offset, nn.Parameter(self.weights[part]), self.total[part])
            offset += slot.parameter.numel()

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """This rank's part of tensors by name, in the shapes of their parameters; missing ones are zero."""
        whole = self.message.flat.new_zeros(self.ranks * self.share)
        for name, view in self.views(whole).items():
            if name in tensors:
                view.copy_(tensors[name])
        return whole[self.rank * self.share : (self.rank + 1) * self.share].clone()

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """The gradients' or weights' places in a vector of all parts. Shapes as the parameters'."""
        found, offset = {}, 0
        for slot in self.message.slots:
            found[slot.name] = view_of(whole, offset, slot.parameter)
            offset += slot.parameter.numel()
        return found

    def pack(self, scale: float) -> None:
        """The bucket's gradients, times `scale`, are what is pushed."""
        torch.mul(self.message.flat[: self.numel], scale, out=self.pushed[: self.numel])

    def phases(self, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """See `Collective.run`."""
        return push(self, group)

    def add_up(self) -> None:
        """All pushes have come."""
        parts = self.received.view(self.ranks, -1)
        self.total.copy_(parts[0])
        for rank in range(1, self.ranks):  # one after the other: the order of summation is fixed
            self.total.add_(parts[rank])


class Server:
    """What one rank owns of all buckets, and the optimizer that updates it."""

    def __init__(
        self, buckets: Sequence[BucketBuffer], optimizer: torch.optim.Optimizer, rank: int, ranks: int
    ) -> None:
        """Takes over the parameters' weights and the optimizer's momentum, which are the same on all ranks."""
        self.shards = [[Shard(message, rank, ranks) for message in bucket.messages] for bucket in buckets]
        """By bucket and message."""
        self._groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        parameters = {slot.name: slot.parameter for bucket in buckets for slot in bucket.slots}
        self._sgd = self._make_optimizer(parameters, len(optimizer.param_groups))
        momenta = {name: optimizer.state[p].get("momentum_buffer") for name, p in parameters.items()}
        self.set_momenta({name: buffer for name, buffer in momenta.items() if buffer is not None})

    @property
    def pieces(self) -> Iterator[Piece]:
        """Of all parameters."""
        return (piece for shards in self.shards for shard in shards for piece in shard.pieces)

    def _make_optimizer(self, parameters: Mapping[str, nn.Parameter], groups: int) -> torch.optim.SGD | None:
        """One group for each of the user's of which this rank owns something."""
        owned: dict[int, list[nn.Parameter]] = {}
        for piece in self.pieces:
            piece.weights.grad = piece.gradient
            group = self._groups.get(id(parameters[piece.name]))
            if group is not None:
                owned.setdefault(group, []).append(piece.weights)
        self._mirrored = [group for group in range(groups) if group in owned]
        listed = [{"params": owned[group]} for group in self._mirrored]
        on_device = any(piece.weights.device.type != "cpu" for piece in self.pieces)
        return torch.optim.SGD(listed, lr=0.0, fused=on_device or None) if listed else None

    def set_momenta(self, momenta: Mapping[str, Tensor]) -> None:
        """Goes on with momentum buffers by name, in the shapes of their parameters."""
        for shard in (shard for shards in self.shards for shard in shards):
            flat, start = shard.flatten(momenta), 0
            for piece in shard.pieces:
                stop = start + piece.weights.numel()
                if piece.name in momenta:
                    self._set_momentum(piece, flat[start:stop])
                start = stop

    def _momentum_of(self, piece: Piece) -> Tensor | None:
        return None if self._sgd is None else self._sgd.state.get(piece.weights, {}).get("momentum_buffer")

    def _set_momentum(self, piece: Piece, buffer: Tensor | None) -> None:
        if self._sgd is not None:
            kept = None if buffer is None else buffer.to(piece.weights.device, copy=True)
            self._sgd.state[piece.weights]["momentum_buffer"] = kept

    def momenta(self, shard: Shard) -> Tensor:
        """The momentum buffers of what is owned, zero where there is none yet. Shape (share,)."""
        flat, start = torch.zeros_like(shard.weights), 0
        for piece in shard.pieces:  # they lie one behind the other, from the shard's beginning
            buffer, stop = self._momentum_of(piece), start + piece.weights.numel()
            if buffer is not None:
                flat[start:stop] = buffer
            start = stop
        return flat

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Goes on with weights by name, in the shapes of their parameters."""
        for shard in (shard for shards in self.shards for shard in shards):
            shard.weights.copy_(shard.flatten(weights))

    def state(self) -> Pieces:
        """Copies of what is owned, by parameter."""
        found: Pieces = {}
        for shard in (shard for shards in self.shards for shard in shards):
            momenta, start = self.momenta(shard), 0
            for piece in shard.pieces:
                stop = start + piece.weights.numel()
                has = self._momentum_of(piece) is not None
                found[piece.name] = {
                    "start": piece.start,
                    "weights": piece.weights.detach().clone(),
                    "momentum": momenta[start:stop].clone() if has else None,
                }
                start = stop
        return found

    @torch.no_grad()
    def load(self, pieces: Pieces) -> None:
        """Goes on from the `state` of the same rank of as many."""
        for piece in self.pieces:
            saved = pieces[piece.name]
            piece.weights.copy_(saved["weights"])
            self._set_momentum(piece, saved["momentum"])

    def update(self, rates: Rates, finite: Tensor) -> None:
        """One step of momentum SGD with weight decay, with the averaged gradients that have come.

        Args:
            rates: hyperparameters of the user's groups.
            finite: 0-d; whether to make the step at all. The host does not wait for a device to know it.
        """
        if self._sgd is None:
            return
        for group, index in zip(self._sgd.param_groups, self._mirrored, strict=True):
            group.update(rates[index])
        if finite.device.type == "cpu":
            if finite:
                self._sgd.step()
            return
        self._sgd.found_inf = 1.0 - finite.float()  # type: ignore[attr-defined]  # the fused step looks at it
        self._sgd.step()


def joined(
    owned: Sequence[Pieces], parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights, momenta) by name, in the parameters' shapes, from what all ranks of a run owned."""
    weights: dict[str, Tensor] = {}
    momenta: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        pieces = sorted((one[name] for one in owned if name in one), key=lambda piece: int(piece["start"]))
        empty = parameter.detach().new_empty(0)  # a parameter without elements has no owner
        flat = torch.cat([empty.cpu(), *(piece["weights"].cpu() for piece in pieces)]).to(parameter.device)
        weights[name] = view_of(flat, 0, parameter)
        buffers = [piece["momentum"] for piece in pieces]
        if buffers and all(buffer is not None for buffer in buffers):
            momenta[name] = view_of(torch.cat(buffers).to(parameter.device), 0, parameter)
    return weights, momenta


KEYS = {"spec", "stage", "step", "steps", "rates", "staleness"}
DELAYED_KEYS = KEYS | {"pieces", "weights", "buffers", "pre_weight", "pulls", "told", "words", "memory"}


def check_state(state: Any, spec: DelaySpec, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises InputError where it is no state of a run with this delay and this model."""
    keys = set(state) if isinstance(state, Mapping) else set()
    if keys not in (KEYS, DELAYED_KEYS):
        raise InputError("found no state of a run with delay, expected what Session.state_dict() returned of one")
    if state["spec"] != asdict(spec):
        raise InputError(
            f"found the state of a run with the delay {state['spec']}, expected {asdict(spec)}: go on with the plan "
            f"that the run began with"
        )
    shapes = {name: tuple(weight.shape) for name, weight in state.get("weights", {}).items()}
    expected = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if keys == DELAYED_KEYS and shapes != expected:
        odd = next(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
        raise InputError(
            f"found weights of {odd} with the shape {shapes.get(odd)}, expected {expected.get(odd)}: load the "
            f"checkpoint of this model"
        )
