"""What delayed synchronization (SSD-SGD) asks of a rank itself: packing pushes, local updates, taking what is pulled.

Timed on all ranks at once, with what the runtime does, as lines over bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from planner.documents.profile import Line
from planner.profile.links import make_shard, sizes_up_to, slowest_line, timed_us
from planner.profile.progress import Progress
from runtime.comm.world import World
from runtime.delay.local_weights import LocalWeights
from runtime.delay.staleness import Staleness
from runtime.plan import DelaySpec
from runtime.sparse.compressed import all_finite

SIZES = tuple(2**exponent for exponent in (16, 20, 22, 24, 26))
"""Bytes; none larger than the model."""
WARM_UPS, REPEATS = 2, 5
RATES = {"lr": 0.0, "momentum": 0.9, "weight_decay": 1e-4}


def measure_delay(world: World, device: torch.device, model_bytes: int, progress: Progress) -> dict[str, Line]:
    """Return the cluster's lines by field, the same on all ranks: `push_pack` over the bytes of a push, `local_update`
    and `pull_take` over those of all weights.
    """

    def line(make: Callable[[int], Callable[[], object]], what: str) -> Line:
        sizes = sizes_up_to(SIZES, model_bytes)
        times_us = []
        for size in progress.track(sizes, what):
            run = make(size)
            world.gather(None, f"beginning to time {what}")
            times_us.append([timed_us(run, device) for _ in range(WARM_UPS + REPEATS)][WARM_UPS:])
        return slowest_line(world, sizes, times_us, f"comparing times of {what}")

    def pack(size_bytes: int) -> Callable[[], None]:
        shard = make_shard(world, device, size_bytes)
        return lambda: shard.pack(1.0 / world.ranks, all_finite(shard.vector))

    def update(size_bytes: int) -> Callable[[], None]:
        weight, own = _weights(device, size_bytes)
        gradients = {id(weight): torch.ones_like(weight)}
        return torch.no_grad()(lambda: own.update(gradients, [RATES], [1.0]))

    def take(size_bytes: int) -> Callable[[], None]:
        weight, own = _weights(device, size_bytes)
        pulled, staleness = {"weight": torch.ones_like(weight)}, Staleness()

        def run() -> None:
            staleness.measure({"weight": weight}, pulled, 1.0)
            own.take(pulled)
            own.overwrite(pulled)

        return run

    return {
        "push_pack": line(pack, "packing pushes"),
        "local_update": line(update, "local updates"),
        "pull_take": line(take, "taking pulled weights"),
    }


def _weights(device: torch.device, size_bytes: int) -> tuple[nn.Parameter, LocalWeights]:
    weight = nn.Parameter(torch.ones(max(1, size_bytes // 4), device=device))
    own = LocalWeights(DelaySpec(steps=1), {"weight": weight}, [[("weight", weight)]])
    own.begin()
    return weight, own
