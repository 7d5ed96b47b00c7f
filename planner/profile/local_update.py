"""What it costs a rank to update its own weights between two pulls of the global ones (SSD-SGD's h_loc).

Timed on all ranks at once, with the runtime's own update, as a line over the bytes of the weights.
"""

from __future__ import annotations

import statistics

import torch

from planner.profile.document import Line
from planner.profile.links import sizes_up_to, slowest_line, timed_us
from planner.progress import Progress
from runtime.local_updates import LocalStep, glu
from runtime.plan import DelaySpec
from runtime.world import World

SIZES = tuple(2**exponent for exponent in (16, 20, 22, 24, 26))
"""Bytes of weights; none larger than the model."""
WARM_UPS, REPEATS = 2, 5


def measure_local_update(world: World, device: torch.device, model_bytes: int, progress: Progress) -> Line:
    """The line, the same on all ranks."""
    sizes = sizes_up_to(SIZES, model_bytes)
    times_us = [_time_us(size, device) for size in progress.track(sizes, "local updates")]
    return slowest_line(world, sizes, times_us, "comparing times of local updates")


def _time_us(size_bytes: int, device: torch.device) -> float:
    weights, gradients, before = (torch.ones(max(1, size_bytes // 4), device=device) for _ in range(3))
    rates = {"lr": 0.0, "momentum": 0.9, "weight_decay": 1e-4}
    step = LocalStep(["weights"], [weights], [gradients], [before], rates, 1.0, DelaySpec(steps=1))
    times = [timed_us(lambda: glu(step), device) for _ in range(WARM_UPS + REPEATS)]
    return statistics.median(times[WARM_UPS:])
