"""Compute times and memory of each rank by its samples: steps of two batch sizes, interleaved, on all ranks at once.

Ranks wait for each other before each step, and not in it: so each has its own times. The difference of two sizes is
the time of samples, and what is left of a step does not grow with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from planner.documents.profile import RankCompute
from planner.frontend.call import map_leaves
from planner.profile.bench import Bench, Run, memory_bytes
from planner.profile.compute import Training
from runtime.errors import InputError
from runtime.local_async.job import samples_of
from runtime.monitor.preserve import preserved
from runtime.optimizers.kinds import each_of

BatchStep = Callable[[Any, Callable[[], None]], object]
WARM_UPS, LEAST_REPEATS, MOST_REPEATS = 1, 3, 15
BATCHES_S = 4.0
"""Seconds that all repeats may take, once there are the fewest."""
ALIKE = 0.05
"""Share of a step by which times of ranks may differ that count as equal: so much they do from one profile to the
next."""


def measure_batches(
    training: Training, step: BatchStep, batch: Any, samples: int | None, step_us: float, bench: Bench
) -> tuple[int, tuple[RankCompute, ...]]:
    """Time steps of a whole and of half a batch; every rank calls it.

    Args:
        training: the model and its optimizer, which are left as found.
        step: one forward and backward of a batch; calls its other argument between them.
        batch: of this rank, on the device.
        samples: of the batch; None: the first dimension of its first tensor.
        step_us: time of a step of it, in microseconds.
        bench: the ranks.

    Returns:
        The samples of the slowest rank's batch, times and memory of each rank, the same on all ranks; no samples and no
        ranks where the samples of a batch are not known. Where a step of half a batch is not possible on every rank,
        all of a step grows with its samples.
    """
    rows, optimizers = samples_of(batch), each_of(training.optimizer)
    samples, batches = samples or rows, [batch, first_rows(batch, rows, rows // 2)]

    def from_zero(of: Any) -> None:
        training.model.zero_grad(set_to_none=True)
        step(of, lambda: None)

    def update() -> None:
        for one in optimizers:
            one.step()

    with preserved(training.model, optimizers):
        halved = rows > 1 and _works(from_zero, batches[1])
        kept = _sample_bytes(step, batches, samples * (rows - rows // 2) / rows) if halved else None
        mine = (samples, rows, halved, memory_bytes(bench.device), kept)
        everyone: list[tuple[int, int, bool, int | None, int | None]] = bench.world.gather(mine, "comparing batches")
        if not all(count for count, *_ in everyone):
            return 0, ()
        if not all(works for _, _, works, *_ in everyone):
            del batches[1]
        runs: list[Run] = [*(partial(from_zero, one) for one in batches), update]
        repeats = int(min(MOST_REPEATS, max(LEAST_REPEATS, BATCHES_S * 1e6 / max(1.0, 2.0 * step_us))))
        times_us = np.median(bench.times_us(runs, repeats, "steps by batch size", WARM_UPS), axis=1)
    counts = np.array([count for count, *_ in everyone], dtype=np.float64)
    parts = counts * np.array([(count // 2) / max(1, count) for _, count, *_ in everyone])
    found = by_samples(counts, parts if len(batches) > 1 else None, times_us)
    slowest = int((times_us[:, 0] + times_us[:, -1]).argmax())
    return int(counts[slowest]), tuple(
        replace(rank, memory_bytes=memory, sample_bytes=size)
        for rank, (*_, memory, size) in zip(found, everyone, strict=True)
    )


def _sample_bytes(step: BatchStep, batches: Sequence[Any], samples: float) -> int | None:
    """Return the bytes that forward keeps for backward of one sample; None if they cannot be counted.

    Args:
        step: as of `measure_batches`.
        batches: the whole, and a part of it.
        samples: by which they differ.
    """
    sizes: dict[int, int] = {}
    kept: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    try:
        for batch in batches:
            sizes.clear()
            with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                step(batch, lambda: kept.append(sum(sizes.values())))
    except (InputError, RuntimeError, TypeError):  # not every kind of tensor says where it lies
        return None
    return max(0, round((kept[0] - kept[1]) / samples))  # weights and the batch itself are kept in both


def by_samples(
    whole: NDArray[np.float64], part: NDArray[np.float64] | None, times_us: NDArray[np.float64]
) -> tuple[RankCompute, ...]:
    """Return the times of each rank by its samples.

    Args:
        whole: samples of each rank's batch. Shape (ranks,).
        part: samples of its part that was timed as well; None: there is none.
        times_us: forward and backward of the batch, those of the part where there is one, and the update, in
            microseconds. Shape (ranks, 2 or 3).
    """
    whole_us, update_us = times_us[:, 0], times_us[:, -1]
    sample_us = whole_us / whole
    if part is not None:  # a part takes no less than nothing, and no longer than the whole
        slope_us = (whole_us - times_us[:, 1]) / (whole - part)
        sample_us = np.clip(slope_us, 1e-3 * sample_us, sample_us)
    fixed_us = whole_us - whole * sample_us
    steps_us = whole_us + update_us
    if len(set(whole)) == 1 and steps_us.max() <= (1.0 + ALIKE) * steps_us.min():
        fixed_us, sample_us, update_us = (np.full(len(whole), one.mean()) for one in (fixed_us, sample_us, update_us))
    rows = np.column_stack([np.maximum(fixed_us, 0.0), np.maximum(sample_us, 1e-3), update_us]).round(3).tolist()
    return tuple(RankCompute(fixed_us=fixed, sample_us=sample, update_us=update) for fixed, sample, update in rows)


def first_rows(batch: Any, rows: int, count: int) -> Any:
    """Return a batch of `count` of its `rows` samples: the first ones of each tensor that has them as first rows."""

    def has_rows(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows

    return map_leaves(batch, has_rows, lambda leaf: leaf[:count])


def _works(step: Callable[[Any], None], batch: Any) -> bool:
    try:
        step(batch)
    except (InputError, RuntimeError):
        return False
    return True
