"""A rank's own work under delayed synchronization (SSD-SGD): packing pushes, local updates, taking pulled weights.

Timed on all ranks at once, with what the runtime does, as lines over bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from planner.documents.profile import Line
from planner.profile.bench import Bench, Run, fit, median_of_slowest, sizes_up_to
from planner.profile.links import make_shard
from runtime.delay.local_weights import LocalWeights
from runtime.modes.distance_guard import DistanceGuard
from runtime.plan import DelaySpec
from runtime.sparse.compressed import all_finite

SIZES = tuple(2**exponent for exponent in (16, 20, 22, 24, 26))
"""Bytes of a push; none is larger than the model."""
SHARES = (0.25, 0.5, 1.0)
"""Shares of a model's tensors, up to the largest of those sizes: each tensor costs calls of its own, however small."""
WARM_UPS, REPEATS = 2, 5
RATES = {"lr": 0.0, "momentum": 0.9, "weight_decay": 1e-4}


def measure_delay(bench: Bench, numels: Sequence[int]) -> dict[str, Line]:
    """Return the cluster's lines by field, the same on all ranks.

    `push_pack` is over the bytes of a push, `local_update` and `pull_take` are over those of all weights.

    Args:
        bench: the ranks.
        numels: number of elements of each of the model's tensors.
    """

    def line(make: Callable[[list[int]], Run], timed: Sequence[list[int]], what: str) -> Line:
        return fit(
            [
                (4.0 * sum(tensors), *median_of_slowest(bench.times_us([make(tensors)], REPEATS, what, WARM_UPS)))
                for tensors in timed
            ]
        )

    def pack(tensors: list[int]) -> Run:
        shard = make_shard(bench, 4 * sum(tensors))
        return lambda: shard.pack(1.0 / bench.world.ranks, all_finite(shard.vector))

    def update(tensors: list[int]) -> Run:
        weights, own = _weights(bench.device, tensors)
        gradients = {id(weight): torch.ones_like(weight) for weight in weights.values()}
        return torch.no_grad()(lambda: own.update(gradients, [RATES], [1.0]))

    def take(tensors: list[int]) -> Run:
        weights, own = _weights(bench.device, tensors)
        pulled = {name: torch.ones_like(weight) for name, weight in weights.items()}
        guard = DistanceGuard()

        def run() -> None:
            guard.measure(weights, pulled, 1.0)
            own.take(pulled)
            own.overwrite(pulled)

        return run

    pushes = [[size_bytes // 4] for size_bytes in sizes_up_to(SIZES, 4 * sum(numels))]
    return {
        "push_pack": line(pack, pushes, "packing pushes"),
        "local_update": line(update, _parts(numels), "local updates"),
        "pull_take": line(take, _parts(numels), "taking pulled weights"),
    }


def _parts(numels: Sequence[int]) -> list[list[int]]:
    """Return the first tensors of a model, fewer and all, none with more bytes than are timed."""
    left, tensors = SIZES[-1] // 4, []
    for numel in numels:
        tensors.append(max(1, min(numel, left)))
        left -= tensors[-1]
        if left <= 0:
            break
    return [tensors[:count] for count in sorted({max(1, round(share * len(tensors))) for share in SHARES})]


def _weights(device: torch.device, numels: Sequence[int]) -> tuple[dict[str, nn.Parameter], LocalWeights]:
    weights = {str(place): nn.Parameter(torch.ones(numel, device=device)) for place, numel in enumerate(numels)}
    own = LocalWeights(DelaySpec(steps=1), weights, [list(weights.items())])
    own.begin()
    return weights, own
