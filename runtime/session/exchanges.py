"""Which exchange a plan needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from runtime.comm.collectives import collective_of, has_phases
from runtime.comm.communicator import Communicator, NullCommunicator, make_communicator
from runtime.comm.topology import Position
from runtime.comm.world import World
from runtime.core.all_reduce import AllReduce
from runtime.core.buckets import BucketBuffer
from runtime.core.exchange import Exchange
from runtime.core.layout import make_plain_buckets
from runtime.monitor.recorder import Recorder
from runtime.plan import Plan
from runtime.sharded.exchange import ReduceScatter
from runtime.sparse.layout import make_buckets
from runtime.sparse.residuals import Carried


def make_exchange(
    plan: Plan, parameters: Mapping[str, nn.Parameter], world: World, recorder: Recorder, device: torch.device,
    position: Position, *, communicate: bool, loss_scale: Callable[[], float] | None,
) -> Exchange:  # fmt: skip
    """The buckets of any plan, not yet hooked; see `Session`.

    Args:
        position: where this rank is, for buckets of HiTopKComm.
        communicate: whether gradients are exchanged at all (for measuring).
        loss_scale: gives the factor of the losses, where they are scaled.
    """
    buckets: list[BucketBuffer] = []
    if plan.sharded and communicate and world.ranks > 1:
        buckets = make_plain_buckets(plan, parameters, parts=world.ranks)
        sharded = ReduceScatter(buckets, world, recorder, device)
        return Exchange(plan, parameters, buckets, sharded, Carried(), recorder)
    communicator: Communicator = NullCommunicator()
    if communicate and not has_phases(plan):
        communicator = make_communicator(world, [collective_of(bucket) for bucket in plan.buckets], device)
    flags, carried = None, Carried(loss_scale=loss_scale)
    if world.ranks > 1 or not communicate:
        buckets, flags, lossy = make_buckets(plan, parameters, world.ranks, position)
        carried = Carried(buckets, lossy, loss_scale)
    launcher = AllReduce(
        buckets, flags, communicator, carried, parameters, recorder, ranks=world.ranks, exact=plan.accuracy == "exact"
    )
    return Exchange(plan, parameters, buckets, launcher, carried, recorder)
