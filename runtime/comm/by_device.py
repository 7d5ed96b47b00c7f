"""The communicator for a device and its backend."""

from __future__ import annotations

import torch

from runtime.comm.collectives import Collective
from runtime.comm.communicator import (
    THROUGH_HOST,
    Communicator,
    HostCommunicator,
    NullCommunicator,
    StreamCommunicator,
)
from runtime.comm.staged_communicator import DeviceLane, StagedCommunicator
from runtime.comm.traced import traced
from runtime.comm.world import World
from runtime.torch_compat import backend_of


def make_communicator(
    world: World, collectives: list[Collective], device: torch.device, whole: World | None = None, *,
    across_steps: bool = False,
) -> Communicator:  # fmt: skip
    """Make the communicator of one process group.

    Args:
        world: the ranks that communicate.
        collectives: that of each bucket, by its index.
        device: where the messages are.
        whole: the world of which `world` is a part; errors name this rank by its number there. Default: `world`.
        across_steps: whether messages may be in flight when a step ends.
    """
    if world.group is None:
        return NullCommunicator()
    made: Communicator
    if device.type != "cuda":
        made = HostCommunicator(world, collectives, whole, across_steps=across_steps)
    elif backend_of(world.group, device) == THROUGH_HOST:
        made = StagedCommunicator(world, collectives, DeviceLane(device), DeviceLane(device), whole)
    else:
        made = StreamCommunicator(world, collectives, device, whole)
    return traced(made, (whole or world).rank)
