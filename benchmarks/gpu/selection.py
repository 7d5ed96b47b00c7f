"""Times of selecting the largest elements with error feedback, as a share of what a copy moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.contestants import Buffers, Rounds, Unpacking, resnet50_like
from benchmarks.gpu.setting import Found, Setting, table
from benchmarks.gpu.timing import Times, copy_bytes_per_us, sets_of, timed

DENSITY = 0.01
BOTH_FLOAT = (torch.float32, torch.float32)
KERNEL, TORCH, TOPK = "fused, one pass", "torch: add, abs, topk, gather, fill", "torch.topk alone, nothing written back"
COLD, PHASES, ROUNDS = (
    "fused, two passes (cold)",
    "a kernel for each pass (radix select, as RadiK)",
    "MSTopK, 30 rounds",
)
ADD, MISSED, SEGMENTS = "residual + gradient alone", "fused, prediction missed", "fused, 161 segments of ResNet-50"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    elements: int
    times: Times
    useful_bytes: float
    """What has to be read and written in any case, for each element."""
    share: float
    """Of the bandwidth of a copy in the same run, by the useful bytes."""
    ratio: float | None = None
    """How many times as long as the fused kernel, where it is compared."""


@dataclass(frozen=True)
class Target:
    """One limit, and what was found."""

    what: str
    found: float
    limit: float
    at_most: bool

    @property
    def met(self) -> bool:
        """Whether it is kept."""
        return self.found <= self.limit if self.at_most else self.found >= self.limit


class Timer:
    """Rows as they are measured."""

    def __init__(self, setting: Setting, rows: int) -> None:
        """As many rows are to come."""
        self.setting, self.device, self.rows = setting, setting.device, list[Row]()
        self._left = rows
        self.copy_bytes_per_us = copy_bytes_per_us(setting.device)

    def add(
        self, what: str, elements: int, useful_bytes: float, steps: Sequence[Callable[[int], object]], *,
        graph: bool = True,
    ) -> None:  # fmt: skip
        """Time calls that have to move so many bytes of each element, in an even share of the time that is left."""
        budget_s = min(self.setting.pick(2.5, 0.02), max(0.02, self.setting.left_s / max(1, self._left) / 2))
        self._left -= 1
        times = timed(steps, self.device, budget_s, graph=graph)
        share = useful_bytes * elements / times.median_us / self.copy_bytes_per_us
        kernel = [row.times.median_us for row in self.rows if row.elements == elements and row.what == KERNEL]
        ratio = times.median_us / kernel[0] if kernel else None
        self.rows.append(Row(what, elements, times, useful_bytes, share, ratio))

    def buffers(
        self, elements: Sequence[int], density: float, dtypes: tuple[torch.dtype, torch.dtype]
    ) -> list[Buffers]:
        """Sets that together do not fit into the L2 cache."""
        k = tuple(max(1, int(density * n)) for n in elements)
        count = sets_of(2 * sum(elements) * sum(dtype.itemsize for dtype in dtypes), self.device)
        warm_ups = self.setting.pick(300, 3)
        return [Buffers(tuple(elements), k, self.device, dtypes, warm_ups=warm_ups) for _ in range(count)]


def run(setting: Setting) -> Found:
    """Sizes from 2²⁰ to 2²⁷; dtypes, densities, segments and unpacking at one of them."""
    torch.manual_seed(0)
    sizes: tuple[int, ...] = setting.pick(tuple(1 << exponent for exponent in range(20, 28)), (1 << 14, 1 << 16))
    timer, failures = Timer(setting, 8 * len(sizes) + 9), list[str]()
    for elements in sizes:
        try:
            _time_size(timer, elements)
        except torch.OutOfMemoryError:
            failures.append(f"{elements:,} elements: no memory on the device")
            break
    _time_variants(timer, setting.pick(1 << 24, 1 << 14), segments=setting.on_device)
    text = f"A copy moves {timer.copy_bytes_per_us / 1e6:.2f} TB/s. Density 1 %, in the steady state of error feedback."
    targets = judge(timer.rows) if setting.on_device else []
    parts = [text, targets_table(targets), rows_table(timer.rows)] if targets else [text, rows_table(timer.rows)]
    return Found("\n\n".join(parts), tuple(failures))


def _time_size(timer: Timer, elements: int) -> None:
    sets = timer.buffers([elements], DENSITY, BOTH_FLOAT)
    timer.add(KERNEL, elements, 12, [one.step for one in sets])
    timer.add(ADD, elements, 12, [one.add for one in sets])
    timer.add(COLD, elements, 16, [one.cold for one in sets])
    timer.add(PHASES, elements, 16, [one.by_phases for one in sets])
    timer.add(MISSED, elements, 16, [one.missed for one in sets])
    timer.add(TORCH, elements, 12, [one.by_torch for one in sets])
    timer.add(TOPK, elements, 4, [one.topk for one in sets])
    timer.add(ROUNDS, elements, 12, [Rounds(one).step for one in sets])


def _time_variants(timer: Timer, n: int, *, segments: bool) -> None:
    for name, dtypes in (
        ("fused, bfloat16 gradients", (torch.bfloat16, torch.float32)),
        ("fused, bfloat16 gradients and residuals", (torch.bfloat16, torch.bfloat16)),
    ):
        each = dtypes[0].itemsize + 2 * dtypes[1].itemsize
        timer.add(name, n, each, [one.step for one in timer.buffers([n], DENSITY, dtypes)])
    timer.add("fused, density 0.1 %", n, 12, [one.step for one in timer.buffers([n], 0.001, BOTH_FLOAT)])
    sizes = resnet50_like() if segments else [n // 8] * 8
    timer.add(KERNEL, sum(sizes), 12, [one.step for one in timer.buffers([sum(sizes)], DENSITY, BOTH_FLOAT)])
    timer.add(SEGMENTS, sum(sizes), 12, [one.step for one in timer.buffers(sizes, DENSITY, BOTH_FLOAT)])
    for ranks in (4, 16):
        message, per_element = Unpacking(n, max(1, n // 100), ranks, timer.device), 4 + 8 * ranks / 100
        timer.add(f"unpacking of {ranks} ranks", n, per_element, [message.by_kernel])
        timer.add(f"unpacking of {ranks} ranks by torch", n, per_element, [message.by_torch])


def rows_table(rows: Sequence[Row]) -> str:
    """Times, as Markdown."""
    head = ("what", "elements", "µs (95 % interval)", "p95 µs", "bytes per element", "share of a copy", "× fused")
    return table(head, (
        (row.what, f"{row.elements:,}", row.times, f"{row.times.p95_us:.1f}", f"{row.useful_bytes:.1f}",
         f"{row.share:.0%}", "" if row.ratio is None else f"{row.ratio:.2f}")
        for row in rows
    ))  # fmt: skip


def targets_table(targets: Sequence[Target]) -> str:
    """Limits, as Markdown."""
    return table(("target", "limit", "found", "met"), (
        (one.what, f"{'≤' if one.at_most else '≥'} {one.limit:g}", f"{one.found:.3g}", "yes" if one.met else "**no**")
        for one in targets
    ))  # fmt: skip


def judge(rows: Sequence[Row]) -> list[Target]:
    """The targets that these rows allow to judge: an H200's, density 1 %, cold L2 cache, in CUDA graphs."""
    by = {(row.what, row.elements): row for row in rows}
    found: list[Target] = []
    for elements, limit_us in ((1 << 24, 62.0), (1 << 20, 12.0)):
        row = by.get((KERNEL, elements))
        if row is not None:
            found.append(Target(f"{elements:,} elements: µs", row.times.median_us, limit_us, at_most=True))
    row = by.get((KERNEL, 1 << 27))
    if row is not None:
        found.append(Target(f"{1 << 27:,} elements: share of a copy", row.share, 0.83, at_most=False))
    for (what, elements), row in by.items():
        if row.ratio is None:
            continue
        if what == TORCH:
            found.append(Target(f"{elements:,} elements: × torch's operations", row.ratio, 8.0, at_most=False))
        if what == ROUNDS and elements >= 1 << 24:
            found.append(Target(f"{elements:,} elements: × MSTopK's rounds", row.ratio, 10.0, at_most=False))
        if what == SEGMENTS:
            found.append(Target("161 segments: × the merged buffer", row.ratio, 1.3, at_most=True))
    return found
