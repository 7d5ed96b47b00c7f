"""The buckets of the sharded optimizer step: each rank gets the average of its part of every gradient.

    bucket complete   ─▶ part r of it goes to rank r, which adds up what comes, always in order of rank
    end of backward   ─▶ behind the last bucket ranks tell each other which gradients came on any of them; every `.grad`
                         is a `ShardedGradient`, whose numbers are this rank's part of the bucket
    optimizer.step()  ─▶ `runtime.sharded.step`: updates the part, then weights are gathered

A gradient is scaled and summed as in an all-reduce, so equal orders of summation give equal bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.comm.by_device import make_communicator
from runtime.comm.collectives.direct import by_message
from runtime.comm.topology import Topology
from runtime.comm.world import World
from runtime.core.buckets import BucketBuffer, SavedGrad, Slot, view_of
from runtime.core.exchange import Exchange, Launcher
from runtime.errors import InputError
from runtime.modes.base import Host
from runtime.plan import Plan, PlanBucket
from runtime.sharded.gradient import ShardedGradient, whole_norms
from runtime.sharded.narrow import CarriedUsage, NarrowPart
from runtime.sharded.part import OwnPart
from runtime.sparse.compressors.wire import make_wire
from runtime.sparse.residuals import ErrorFeedbackState
from runtime.torch_compat import OUTSIDE, current_backward_id


class ReduceScatter(Launcher):
    """Launcher of the sharded optimizer step, and owner of the parts of sharded gradients (`Owned`)."""

    usage: CarriedUsage

    def __init__(self, plan: Plan, buckets: Sequence[BucketBuffer], host: Host, world: World) -> None:
        """Lay out memory for weights; of the plan's `buckets` every message is as long as `padded_length` says.

        Args:
            plan: which weights are rounded, which have owners, and how buckets are sent.
            buckets: of the plan.
            host: the session, whose loss scale and learning rate residuals follow.
            world: the ranks over which the step is sharded.
        """
        self.world, self.scale, self._recorder, device = world, 1.0 / world.ranks, host.recorder, host.device
        self.communicator = make_communicator(world, [by_message] * len(buckets), device, host.world)
        self.slots = [slot for bucket in buckets for slot in bucket.slots]
        rounded = plan.rounds_weights
        nodes = world.topology.nodes if isinstance(world.topology, Topology) else ()
        self.parts_of: list[list[OwnPart]] = []
        narrow: dict[int, NarrowPart] = {}
        for bucket, planned in zip(buckets, plan.buckets, strict=True):
            if not planned.dense:
                compressor = make_wire(planned.compressor, ranks=1)  # nothing is added up in the wire's dtype
                narrow[bucket.index] = NarrowPart(bucket, world.rank, world.ranks, compressor, rounded=rounded)
                self.parts_of.append([narrow[bucket.index]])
            else:
                plain = [
                    OwnPart(one, world.rank, world.ranks, rounded=rounded, owners=plan.owners, nodes=nodes)
                    for one in bucket.messages
                ]
                self.parts_of.append(plain)
            bucket.payload.messages = list(self.parts_of[-1])
        # One for all messages: they are sent one at a time.
        needed = max(max(one.received_bytes, one.narrow_weights_bytes, one.updates_bytes) for one in self.parts)
        scratch = torch.empty(needed, dtype=torch.uint8, device=device)
        for part in self.parts:
            part.scratch = scratch
        options = host.options
        self.carried = ErrorFeedbackState(buckets, narrow, options.loss_scale, learning_rate=options.learning_rate)
        self.usage = CarriedUsage(len(self.slots), world.ranks, device, self.parts, self.carried)
        buckets[-1].payload.messages = [*self.parts_of[-1], self.usage]
        self._part_of = {slot.index: part for part in self.parts for slot in part.message.slots}
        self._gradients = [ShardedGradient.of(slot.parameter, slot.name, slot.index, self) for slot in self.slots]
        self._before: dict[int, Tensor] = {}
        """This rank's parts of the averages of gradients that this backward did not produce."""
        self._norms: dict[float, tuple[Any, Tensor]] = {}

    @property
    def parts(self) -> list[OwnPart]:
        return [part for parts in self.parts_of for part in parts]

    # One step, in the order in which it happens.

    def before_added(self, slot: Slot, exchange: weakref.ref[Exchange]) -> Callable[[Any], None]:
        return partial(_make_room, exchange, slot)

    def detaches_grads(self, hooks_may_read: bool, kept: Callable[[], bool]) -> bool:
        """See `Launcher.detaches_grads`. A kept sharded gradient has no memory that a script could look at."""
        return hooks_may_read

    def missing(self, slot: Slot) -> None:
        """See `Launcher.missing`: of an average that is still there each rank gives its part."""
        gradient = slot.parameter.grad
        if isinstance(gradient, ShardedGradient):
            self._before[slot.index] = gradient.part.clone()
            slot.parameter.grad = self.local_share(slot.index)

    def set_aside(self, slot: Slot) -> SavedGrad:
        """See `Launcher.set_aside`: of an average each rank has its part."""
        gradient = slot.parameter.grad
        if isinstance(gradient, ShardedGradient):
            self._before[slot.index] = gradient.part.clone()
            slot.parameter.grad = None
        return super().set_aside(slot)

    def launch(self, bucket: BucketBuffer) -> None:
        self.communicator.launch(
            bucket.payload, self._recorder.sent(bucket.index), partial(self.carried.add_to, bucket)
        )

    def settle(self, missing: Sequence[SavedGrad], *, separate: bool) -> None:
        """See `Launcher.settle`: every `.grad` is the average, but those that no rank used stay what they were. What a
        residual brings is added to these.
        """
        carries = self.carried.active
        self.wait()
        factor = self.correction()  # raises where nothing counts, before anything counts as sent
        if carries:
            self.carried.count(self.usage.finite())
        if factor != 1.0:
            for part in self.parts:
                part.total.mul_(factor)
        used = self.usage.used_somewhere() if missing else set()
        came = self.usage.came() if missing and carries else set()
        earlier = {one.slot.index: one for one in missing}
        kept = {index: one for index, one in earlier.items() if index not in used}
        for slot, gradient in zip(self.slots, self._gradients, strict=True):
            before, saved = self._before.get(slot.index), kept.get(slot.index)
            if saved is None or slot.index in came:
                gradient.zeroed = False
                if self.weighted or self.carried.compresses(slot.bucket):  # nothing of what was there was sent
                    saved = earlier.get(slot.index) if self.weighted else saved
                    if before is not None:
                        gradient.part.add_(before)
                    elif saved is not None and (whole := saved.values_before) is not None:
                        gradient.part.add_(self._part_of_whole(slot, whole))
            elif before is not None:
                gradient.part.copy_(before)
            else:
                saved.give_back()
                continue
            slot.parameter.grad = gradient
        self._before.clear()
        self._norms.clear()

    def abort_backward(self) -> None:
        self._before.clear()

    # What sharded gradients and the optimizer's step ask for.

    def part(self, index: int) -> Tensor:
        part = self._part_of[index]
        found = part.places.get(index)
        return part.total[:0] if found is None else part.total[found[1]]

    def local_share(self, index: int) -> Tensor | None:
        if self._gradients[index].zeroed:
            return None
        part, slot = self._part_of[index], self.slots[index]
        flat = part.whole.new_zeros(slot.parameter.numel())
        if index in part.places:
            start, place = part.places[index]
            torch.mul(part.total[place], self.world.ranks, out=flat[start : start + place.stop - place.start])
        return view_of(flat, 0, slot.view)

    def _part_of_whole(self, slot: Slot, gradient: Tensor) -> Tensor:
        """Return this rank's part of a gradient that a script has put in place. 1-D."""
        part = self._part_of[slot.index]
        flat = gradient.new_zeros(slot.parameter.numel())
        view_of(flat, 0, slot.view).copy_(gradient)
        start, place = part.places.get(slot.index, (0, slice(0, 0)))
        return flat[start : start + place.stop - place.start]

    def norms(self, order: float) -> Tensor:
        """See `Owned.norms`; nothing is sent before anything has changed. Raises InputError in a backward."""
        if current_backward_id() != OUTSIDE:
            raise InputError(
                "norms of gradients were asked for while a backward runs, but ranks share the optimizer's step and "
                "have not added them up yet; expected them after backward: ask then, or plan without sharing (`planner "
                "optimize` without --allow sharded-step)"
            )
        # In-place changes count up a tensor's version, whoever makes them.
        versions = tuple((part.message.flat.data_ptr(), part.message.flat._version) for part in self.parts)
        known = self._norms.get(order)
        if known is None or known[0] != versions:
            device = self.parts[0].whole.device
            known = versions, whole_norms([self.part(slot.index) for slot in self.slots], order, self.world, device)
            self._norms[order] = known
        return known[1]

    def gradient_of(self, slot: Slot) -> Tensor | None:
        """Return this rank's part of `.grad`, as `OwnPart.shaped`, or None; what a script has put there is the whole
        gradient.
        """
        gradient = slot.parameter.grad
        if gradient is None:
            return None
        if gradient is not self._gradients[slot.index] and gradient is not slot.view:
            slot.view.copy_(gradient.detach())
        return self._part_of[slot.index].shaped(self.part(slot.index), slot)

    def release(self) -> None:
        # Cycles, whose memory would wait for the garbage collector.
        self._gradients.clear()


def padded_length(ranks: int, planned: PlanBucket, elements: int) -> int:
    """Return the length of a flat buffer of a bucket's `elements`, for as many equal parts as there are ranks."""
    if planned.dense:
        return -(-elements // ranks) * ranks
    return ranks * make_wire(planned.compressor, ranks=1).cut(elements, ranks, torch.float32).share


def _make_room(exchange: weakref.ref[Exchange], slot: Slot, _gradients: Any) -> None:
    """Put this rank's share of an average that is still there in its place, for a gradient that is about to be added.
    Raises InputError where hooks would see the sum, of which this rank has a part alone; the other ranks raise, too.
    """
    gradient = slot.parameter.grad
    if not isinstance(gradient, ShardedGradient):
        return
    share, here = gradient.owner.local_share(gradient.place), exchange()
    if share is not None and here is not None and here.onlookers(slot):
        here.give_up()
        raise InputError(
            f"found a hook that runs after the gradient of {slot.name} has been added to the average of an earlier "
            f"step, but ranks share the optimizer's step, so that each has its own part of that average alone; "
            f"expected gradients that are zeroed before each backward, or no such hook: zero them, use "
            f"register_hook, or plan without sharing (`planner optimize` without --allow sharded-step)"
        )
    slot.parameter.grad = share
