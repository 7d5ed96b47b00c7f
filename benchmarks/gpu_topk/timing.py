"""Times on a device: CUDA graphs that go through several sets of buffers, so that nothing is left in the L2 cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu_topk.checks import captured

SAMPLES = 200
BUDGET_MS = 2500.0
"""For one row; fewer samples where that is not enough, 15 at least."""
COLD_BYTES = 256 << 20
"""All sets of buffers together take at least so much, several times the L2 cache."""


@dataclass(frozen=True)
class Times:
    """Of one call."""

    median_us: float
    p95_us: float


def sets_of(call_bytes: int) -> int:
    """How many sets of buffers there have to be for one call to find nothing of the last one on the same set."""
    return max(1, -(-COLD_BYTES // call_bytes))


def timed(steps: Sequence[Callable[[int], None]]) -> Times:
    """One call of one of `steps`, each on buffers of its own: all of them twice in one graph, replayed."""

    def twice() -> None:
        for parity in (0, 1):
            for step in steps:
                step(parity)

    twice()  # whatever is compiled or allocated
    replay, calls = captured(twice), 2 * len(steps)
    for _ in range(3):
        replay()
    first_ms = _elapsed_ms(replay)
    samples = max(15, min(SAMPLES, int(BUDGET_MS / max(first_ms, 1e-3))))
    found = sorted(_elapsed_ms(replay) * 1e3 / calls for _ in range(samples))
    return Times(statistics.median(found), found[int(0.95 * (len(found) - 1))])


def _elapsed_ms(work: Callable[[], None]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def copy_bytes_per_us(device: torch.device) -> float:
    """What the device reads and writes in a copy of 512 MiB."""
    source = torch.empty(128 << 20, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / timed([lambda parity: target.copy_(source)]).median_us  # type: ignore[list-item]
