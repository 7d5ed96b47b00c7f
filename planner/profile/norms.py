"""The times of the layer norms of LARS and LAMB: each layer's share of the time of all of them.

Timed on all ranks at once, as every rank computes all of them, on the weights and gradients of the last step. Layers
are timed one by one and all together. A small one alone takes longer than among others, and disturbances hit all of
them, so the sum is that of all together.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from planner.documents.profile import ComputeProfile, LayerNorm, NormProfile
from planner.profile.bench import Bench, Run, median_of_slowest
from planner.profile.compute import Training
from runtime.optimizers import LayerwiseOptimizer
from runtime.optimizers.kinds import each_of
from runtime.optimizers.norms import Pair, norm_dtype, pair_norms

WARM_UPS, REPEATS = 1, 9


def measure_norms(training: Training, bench: Bench, compute: ComputeProfile) -> NormProfile | None:
    """Time the norms of the adapted layers that got a gradient, the same on all ranks; None if there are none."""
    parameters = training.parameters
    optimizer = next((one for one in each_of(training.optimizer) if isinstance(one, LayerwiseOptimizer)), None)
    if optimizer is None:
        return None
    adapted = {id(layer) for layer in optimizer.adapted()}
    layers = {g.name: parameters[g.name] for g in compute.gradients if id(parameters[g.name]) in adapted}
    if not layers:
        return None
    dtype = norm_dtype(optimizer.adapted())
    # Each with its gradient, or a tensor of its size.
    pairs: list[Pair] = [
        (layer.detach(), torch.ones_like(layer) if layer.grad is None else layer.grad) for layer in layers.values()
    ]
    alone_us: list[list[float]] = []

    def one_by_one() -> None:
        alone_us.append([bench.timed_us(partial(pair_norms, [pair], dtype)) for pair in pairs])

    runs: list[Run] = [partial(pair_norms, pairs, dtype), one_by_one]
    # Others wait for the straggler at the next message.
    total_us = median_of_slowest(bench.times_us(runs, REPEATS, "norms of layers", WARM_UPS))[0]
    mine_us = np.median(alone_us[WARM_UPS:], axis=0)
    each_us = np.median(bench.world.gather(mine_us, "comparing times of norms"), axis=0)
    share = total_us / max(each_us.sum(), 1e-9)
    return NormProfile(
        optimizer=type(optimizer).__name__,
        row_bytes=2 * dtype.itemsize,
        layers=tuple(
            LayerNorm(name=name, norm_us=round(float(time_us * share), 3))
            for name, time_us in zip(layers, each_us, strict=True)
        ),
    )
