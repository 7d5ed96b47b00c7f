"""Times: on a device of CUDA graphs that go through several sets of buffers, so that nothing is left in the L2 cache;
on a CPU of plain calls.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

SAMPLES, FEWEST = 200, 15
COLD_BYTES = 256 << 20
"""All sets of buffers together take at least so much, several times the L2 cache."""


@dataclass(frozen=True)
class Times:
    """Of one call: the median with its 95 % interval, and the 95th percentile."""

    median_us: float
    low_us: float
    high_us: float
    p95_us: float

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> Times:
        """The interval by order statistics: it holds whatever the distribution."""
        found, count = sorted(samples_us), len(samples_us)
        half = 0.98 * math.sqrt(count)
        low, high = max(0, int(count / 2 - half)), min(count - 1, math.ceil(count / 2 + half))
        return cls(statistics.median(found), found[low], found[high], found[int(0.95 * (count - 1))])

    def __str__(self) -> str:
        return f"{self.median_us:.1f} ({self.low_us:.1f} to {self.high_us:.1f})"


def sets_of(call_bytes: int, device: torch.device) -> int:
    """How many sets of buffers there have to be for one call to find nothing of the last one on the same set."""
    return max(1, -(-COLD_BYTES // call_bytes)) if device.type == "cuda" else 1


def captured(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """A CUDA graph of some work that has been done before; on a CPU the work itself."""
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def timed(
    steps: Sequence[Callable[[int], object]], device: torch.device, budget_s: float, *, graph: bool = True
) -> Times:
    """One call of one of `steps`, each on buffers of its own: all of them twice, with 0 and with 1, in one graph that
    is replayed, or as plain calls where they cannot be captured; the first replays are not counted.
    """

    def twice() -> None:
        for parity in (0, 1):
            for step in steps:
                step(parity)

    twice()  # whatever is compiled or allocated
    replay, calls = captured(twice, device) if graph else twice, 2 * len(steps)
    for _ in range(3 if device.type == "cuda" else 1):
        replay()
    first_s = _elapsed_us(replay, device) / 1e6
    samples = max(FEWEST if device.type == "cuda" else 3, min(SAMPLES, int(budget_s / max(first_s, 1e-6))))
    return Times.of([_elapsed_us(replay, device) / calls for _ in range(samples)])


def _elapsed_us(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def copy_bytes_per_us(device: torch.device) -> float:
    """What the device reads and writes in a copy of 512 MiB (on a CPU of 4 MiB)."""
    source = torch.empty((128 if device.type == "cuda" else 1) << 20, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed([lambda parity: target.copy_(source)], device, 1.0).median_us
