"""Times of loading a job's samples with DataCache: from their storage, from the local disk, and from memory."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from runtime.comm.shared_memory import available_bytes
from runtime.comm.world import World
from runtime.datacache import CachedDataset
from runtime.datacache.memory import overhead_bytes
from runtime.datacache.node import node_name
from runtime.datacache.samples import pack
from runtime.errors import InputError
from runtime.local_async.job import samples_of
from runtime.plan.predicted import Loading

TIMED = 64
"""Number of samples that are timed on each rank."""
LONGEST_S = 20.0
"""Seconds after which no more are timed, as on very slow storage, but for the fewest."""
FEWEST = 4


def batch_samples(batch: Any) -> int:
    """Return the first dimension of a batch's first tensor. Raises InputError if no tensor has one."""
    samples = samples_of(batch)
    if not samples:
        raise InputError(
            "batch(0, rank): found no tensor with a first dimension, expected samples; say how many there are: "
            "TrainingJob(batch_samples=…)"
        )
    return samples


def measure_loading(dataset: Any, batch: int, world: World) -> Loading:
    """Time single samples, in one process of each rank, on all ranks at once; the slowest rank's medians count.

    Each rank has caches and samples of its own, as if it were a node. The operating system keeps what it has read, so
    `cold_us` is that of a first epoch only where these samples were not read lately. A step has `batch` samples.

    Raises:
        InputError: the dataset cannot be cached, or ranks have different ones.
        CommunicationError: a rank died or missed the deadline.
    """
    folder = Path(tempfile.mkdtemp(prefix="planner-loading-"))
    make = partial(CachedDataset, node=f"rank {world.rank}", group=world.group, timeout_s=world.timeout_s)
    try:
        on_disk = make(dataset, local_dir=folder, name="timed")
        # Samples of this rank's part, in random order, so that the storage does not read ahead.
        part = on_disk.partition.part(on_disk.partition.node_of_rank[on_disk.rank])
        if not len(part):  # fewer samples than ranks
            part = np.arange(len(on_disk))
        chosen: list[int] = np.random.default_rng(on_disk.rank).permutation(part)[:TIMED].tolist()
        cold_us = _times_us(on_disk, chosen)
        chosen = chosen[: len(cold_us)]
        on_disk.flush()
        disk_us = _times_us(on_disk, chosen)
        sizes_bytes = [pack(on_disk[index]).numel() for index in chosen[:FEWEST]]
        room_bytes = overhead_bytes(len(on_disk)) + 2 * len(chosen) * max(sizes_bytes)
        in_memory = make(on_disk, memory_bytes=room_bytes, probe=False)
        _times_us(in_memory, chosen)
        memory_us = _times_us(in_memory, chosen)
        on_disk.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    times = median(cold_us), median(disk_us), median(memory_us), fmean(sizes_bytes)
    found = (*times, on_disk.raw_bytes, available_bytes(), node_name(None))
    everyone: list[tuple[Any, ...]] = world.gather(found, "comparing times of loading")
    cold, disk, memory, decoded, raw, available, names = zip(*everyone, strict=True)
    return Loading(
        samples=len(on_disk),
        batch_samples=batch,
        cold_us=max(cold),
        disk_us=max(disk),
        memory_us=max(memory),
        raw_bytes=max(1, *raw),
        decoded_bytes=int(fmean(decoded)),
        nodes=len(set(names)),
        memory_available_bytes=min(available),
    )


def _times_us(dataset: CachedDataset, indices: Sequence[int]) -> list[float]:
    """Time the samples, one by one, until the time is over."""
    times_us: list[float] = []
    began = last = time.perf_counter()
    for index in indices:
        dataset[index]
        now = time.perf_counter()
        times_us.append((now - last) * 1e6)
        if now - began > LONGEST_S and len(times_us) >= FEWEST:
            break
        last = now
    return times_us
