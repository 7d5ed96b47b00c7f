"""What the norms of layers take that LARS and LAMB need: each layer's share of the time of all of them.

Timed on all ranks at once, as every rank computes all of them, on the weights and gradients of the last step. Layers
are timed one by one and all together; a small one alone takes longer than beside others, and what a rank takes now and
then for something else hits all of them, so the sum is that of all together.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch
from torch import nn

from planner.documents.profile import ComputeProfile, LayerNorm, NormProfile
from planner.profile.links import timed_us
from planner.profile.progress import Progress
from runtime.comm.world import World
from runtime.optimizers import LayerwiseOptimizer
from runtime.optimizers.norms import Pair, norm_dtype, pair_norms

WARM_UPS, REPEATS = 1, 9


def measure_norms(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    compute: ComputeProfile,
    world: World,
    device: torch.device,
    progress: Progress,
) -> NormProfile | None:
    """Time the norms of the adapted layers that got a gradient, the same on all ranks; None where there are none."""
    if not isinstance(optimizer, LayerwiseOptimizer):
        return None
    adapted = {id(layer) for layer in optimizer.adapted()}
    layers = {g.name: parameters[g.name] for g in compute.gradients if id(parameters[g.name]) in adapted}
    if not layers:
        return None
    dtype = norm_dtype(optimizer.adapted())
    # Each with its gradient, or something of its size.
    pairs: list[Pair] = [
        (layer.detach(), torch.ones_like(layer) if layer.grad is None else layer.grad) for layer in layers.values()
    ]
    together_us: list[float] = []
    alone_us: list[list[float]] = []
    for _ in progress.track(range(WARM_UPS + REPEATS), "norms of layers"):
        world.gather(None, "beginning to time norms")
        together_us.append(timed_us(lambda: pair_norms(pairs, dtype), device))
        world.gather(None, "beginning to time norms")
        alone_us.append([timed_us(lambda pair=pair: pair_norms([pair], dtype), device) for pair in pairs])  # type: ignore[misc]
    medians_us = [statistics.median(column) for column in zip(*alone_us[WARM_UPS:], strict=True)]
    mine = together_us[WARM_UPS:], medians_us
    everyone: list[tuple[list[float], list[float]]] = world.gather(mine, "comparing times of norms")
    # Others wait for the straggler at the next message.
    total_us = statistics.median(max(column) for column in zip(*(totals for totals, _ in everyone), strict=True))
    each_us = [statistics.median(column) for column in zip(*(singles for _, singles in everyone), strict=True)]
    share = total_us / max(sum(each_us), 1e-9)
    return NormProfile(
        optimizer=type(optimizer).__name__,
        row_bytes=2 * dtype.itemsize,
        layers=tuple(
            LayerNorm(name=name, norm_us=round(time_us * share, 3))
            for name, time_us in zip(layers, each_us, strict=True)
        ),
    )
