"""Checks of a plan against the backend that is to carry it out on a device."""

from __future__ import annotations

import torch

from runtime.comm.communicator import THROUGH_HOST
from runtime.comm.world import World
from runtime.plan import Plan
from runtime.torch_compat import backend_of


def check_backend(plan: Plan, world: World, device: torch.device) -> str | None:
    """Return why the world's backend cannot carry the plan's buckets from this device, or None."""
    if world.group is None:
        return None
    try:
        backend = backend_of(world.group, device)
    except RuntimeError:  # torch has no other way to say so
        return (
            f"the process group is of {world.backend}, which carries nothing from {device}, where the parameters are; "
            f"expected a backend that does: nccl or gloo for cuda, gloo for cpu, or torch's default, which has both"
        )
    if device.type == "cpu" or backend != THROUGH_HOST:
        return None
    for index, bucket in enumerate(plan.buckets):
        if bucket.transport.point_to_point:
            return (
                f"bucket {index} is sent by {bucket.transport}, from rank to rank, which {THROUGH_HOST} does "
                f"on CPUs alone, and parameters are on {device}; expected nccl there, or another algorithm: start "
                f"torch.distributed with nccl, or plan without it"
            )
    return check_backend(plan.fallback, world, device) if plan.fallback is not None else None
