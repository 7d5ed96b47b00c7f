"""What it costs to choose the elements of a lossy bucket and pack them, and to add up those of all ranks, by selector.

Timed on all ranks at once, with the runtime's own buckets, over sizes and densities. The costs are lines over the
bucket's dense bytes, which every pass reads; how many elements are chosen matters little beside that.
"""

from __future__ import annotations

import statistics

import torch
from torch import nn

from planner.profile.document import Line
from planner.profile.links import sizes_up_to, slowest_line, timed_us
from planner.progress import Progress
from runtime.buckets import BucketBuffer, lay_out, make_slot
from runtime.compressors.sparse import SELECTORS
from runtime.layout import make_lossy
from runtime.plan import CompressorSpec
from runtime.world import World

SIZES = tuple(2**exponent for exponent in (16, 18, 20, 22, 24, 26))
"""Bytes of a bucket; none larger than the model. Beyond them the line goes on: no memory has to be found for more."""
DENSITIES = (0.001, 0.01)
WARM_UPS, REPEATS = 2, 5
"""Residuals fill in the first steps."""


def measure_selection(
    world: World, device: torch.device, model_bytes: int, progress: Progress
) -> tuple[dict[str, Line], dict[str, Line]]:
    """(select and pack, unpack) by selector, the same on all ranks."""
    sizes, what = sizes_up_to(SIZES, model_bytes), "comparing times of selection"
    chosen, added = {}, {}
    for selector in progress.track(list(SELECTORS), "selection"):
        times = [_time(world, device, selector, size) for size in sizes]
        chosen[selector], added[selector] = (
            slowest_line(world, sizes, column, what) for column in zip(*times, strict=True)
        )
    return chosen, added


def _time(world: World, device: torch.device, selector: str, size_bytes: int) -> tuple[float, float]:
    """Microseconds of this rank: (select and pack, unpack), the mean over densities of the medians over repeats."""
    found = []
    for density in DENSITIES:
        bucket = _bucket(size_bytes, device)
        lossy = make_lossy(bucket, CompressorSpec(name="topk", selector=selector, density=density), world.ranks)
        gradient = bucket.messages[0].flat
        packs, unpacks = [], []
        for step in range(WARM_UPS + REPEATS):
            gradient.normal_()
            packs.append(timed_us(lambda step=step, lossy=lossy: lossy.pack(step), device))  # type: ignore[misc]
            lossy.packed.gathered.copy_(lossy.packed.flat.repeat(world.ranks))
            unpacks.append(timed_us(lossy.unpack, device))
            lossy.commit(torch.tensor(True, device=device))
        found.append((statistics.median(packs[WARM_UPS:]), statistics.median(unpacks[WARM_UPS:])))
    packed, unpacked = (statistics.fmean(column) for column in zip(*found, strict=True))
    return packed, unpacked


def _bucket(size_bytes: int, device: torch.device) -> BucketBuffer:
    parameter = nn.Parameter(torch.zeros(max(1, size_bytes // 4), device=device))
    slots = [make_slot("parameter", 0, parameter)]
    return BucketBuffer(0, slots, lay_out(slots), f"a bucket of {size_bytes} bytes")
