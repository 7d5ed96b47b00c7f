"""Which exchange a plan needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from runtime.comm.collectives import collective_of, has_phases
from runtime.comm.communicator import Communicator, NullCommunicator, make_communicator
from runtime.comm.topology import Position
from runtime.comm.world import World
from runtime.core.exchange import Exchange
from runtime.monitor.recorder import Recorder
from runtime.plan import Plan
from runtime.sharded.exchange import ShardedExchange


def make_exchange(
    plan: Plan, parameters: Mapping[str, nn.Parameter], world: World, recorder: Recorder, device: torch.device,
    position: Position, *, communicate: bool, loss_scale: Callable[[], float] | None,
) -> Exchange:  # fmt: skip
    """The buckets of any plan, not yet hooked; see `Exchange` and `Session`."""
    if plan.sharded and communicate and world.ranks > 1:
        return ShardedExchange(plan, parameters, world, recorder, device)
    communicator: Communicator = NullCommunicator()
    if communicate and not has_phases(plan):
        communicator = make_communicator(world, [collective_of(bucket) for bucket in plan.buckets], device)
    return Exchange(
        plan, parameters, world.ranks, communicator, recorder, exchanges=world.ranks > 1 or not communicate,
        loss_scale=loss_scale, position=position,
    )  # fmt: skip
