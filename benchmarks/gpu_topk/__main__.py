"""See the package."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.gpu_topk.checks import Checks, Scale, large
from benchmarks.gpu_topk.contestants import Buffers, Rounds, Unpacking, resnet50_like
from benchmarks.gpu_topk.report import KERNEL, PART, ROUNDS, SEGMENTS, TORCH, Row, judge, table, targets_table
from benchmarks.gpu_topk.timing import copy_bytes_per_us, sets_of, timed
from benchmarks.marked import replace_part
from runtime.kernels import Shape
from runtime.kernels.cuda import why_not, working
from runtime.kernels.nvrtc import compiler

DOCUMENT = Path(__file__).parents[2] / "docs" / "results" / "gpu-topk.md"
SIZES = (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 27)
DENSITY = 0.01
BOTH_FLOAT = (torch.float32, torch.float32)


class Timer:
    """Rows as they are measured."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.rows = device, list[Row]()
        self.copy_bytes_per_us = copy_bytes_per_us(device)

    def add(self, what: str, elements: int, each_bytes: float, steps: Sequence[Callable[[int], None]]) -> float:
        """Times calls that have to move `each_bytes` per element; returns the median in microseconds."""
        found, useful = timed(steps), int(each_bytes * elements)
        share = useful / found.median_us / self.copy_bytes_per_us
        kernel = [r.time_us for r in self.rows if r.elements == elements and r.what == KERNEL]
        ratio = found.median_us / kernel[0] if kernel else None
        self.rows.append(Row(what, elements, found.median_us, found.p95_us, useful, share, ratio))
        print(f"{what}, {elements:,} elements: {found.median_us:.1f} µs", flush=True)
        return found.median_us

    def buffers(
        self, elements: Sequence[int], density: float, dtypes: tuple[torch.dtype, torch.dtype]
    ) -> list[Buffers]:
        """Sets that together do not fit into the L2 cache."""
        k = tuple(max(1, int(density * n)) for n in elements)
        count = sets_of(2 * sum(elements) * sum(dtype.itemsize for dtype in dtypes))
        return [Buffers(tuple(elements), k, self.device, dtypes) for _ in range(count)]


def time_size(timer: Timer, elements: int) -> None:
    """All contestants on one number of elements, density 1 %."""
    sets = timer.buffers([elements], DENSITY, BOTH_FLOAT)
    timer.add(KERNEL, elements, 12, [one.step for one in sets])
    timer.add("residual + gradient alone", elements, 12, [one.add for one in sets])
    timer.add("kernel, cold", elements, 16, [one.cold for one in sets])
    timer.add("kernel, prediction missed", elements, 16, [one.missed for one in sets])
    timer.add(TORCH, elements, 12, [one.by_torch for one in sets])
    if elements % 4 == 0:
        timer.add(ROUNDS, elements, 12, [Rounds(one).step for one in sets])
    counters = sets[0].state.counters()[0]
    print(f"counters of the first set: {counters}")


def time_variants(timer: Timer) -> None:
    """Narrow dtypes, another density, segments, unpacking."""
    n = 1 << 24
    for name, dtypes in (
        ("kernel, bfloat16 gradients", (torch.bfloat16, torch.float32)),
        ("kernel, bfloat16 gradients and residuals", (torch.bfloat16, torch.bfloat16)),
    ):
        each = dtypes[0].itemsize + 2 * dtypes[1].itemsize
        timer.add(name, n, each, [one.step for one in timer.buffers([n], DENSITY, dtypes)])
    timer.add("kernel, density 0.1 %", n, 12, [one.step for one in timer.buffers([n], 0.001, BOTH_FLOAT)])
    sizes = resnet50_like()
    total = sum(sizes)
    timer.add(KERNEL, total, 12, [one.step for one in timer.buffers([total], DENSITY, BOTH_FLOAT)])
    segments = timer.buffers(sizes, DENSITY, BOTH_FLOAT)
    timer.add(SEGMENTS, total, 12, [one.step for one in segments])
    for ranks in (4, 16):
        message = Unpacking(n, n // 100, ranks, timer.device)
        per_element = 4 + 8 * ranks / 100
        timer.add(f"unpacking of {ranks} ranks", n, per_element, [message.by_kernel])
        timer.add(f"unpacking of {ranks} ranks by torch", n, per_element, [message.by_torch])


def tune(timer: Timer) -> None:
    """Other numbers of threads and elements per block, for whoever changes the source."""
    n = 1 << 24
    for shape in (Shape(), Shape(threads=256), Shape(threads=256, vectors=4), Shape(vectors=4), Shape(vectors=1)):
        sets = [Buffers((n,), (n // 100,), timer.device, BOTH_FLOAT, shape) for _ in range(2)]
        timer.add(f"kernel, {shape.threads} threads, {shape.vectors} vectors", n, 12, [one.step for one in sets])


def document(checks: Checks, timer: Timer, seconds: float) -> str:
    """What goes into docs/results/gpu-topk.md."""
    name = torch.cuda.get_device_name(timer.device)
    where = f"{datetime.now(UTC):%Y-%m-%d}, {name}, torch {torch.__version__}, CUDA {torch.version.cuda}, NVRTC "
    verdict = "all equal bit for bit" if not checks.failed else f"{len(checks.failed)} differ: {checks.failed[:5]}"
    lines = [
        f"{where}{compiler().version}; a copy moves {timer.copy_bytes_per_us / 1e6:.2f} TB/s. Took {seconds:.0f} s.",
        f"{checks.made} comparisons with the reference on the device: {verdict}.",
        targets_table(judge(timer.rows)),
        table(timer.rows),
    ]
    return "\n\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, times, prints and writes."""
    parser = argparse.ArgumentParser(description=str(sys.modules["benchmarks.gpu_topk"].__doc__).partition("\n")[0])
    parser.add_argument("--device", type=int, default=0, help="number of the GPU")
    parser.add_argument("--output", type=Path, default=DOCUMENT, help="document whose measured part is written")
    parser.add_argument("--tune", action="store_true", help="also times other numbers of threads and vectors")
    parser.add_argument("--no-timing", action="store_true", help="only checks; writes nothing")
    options = parser.parse_args(arguments)
    why = why_not() or working(options.device)
    if why is not None:
        print(f"no kernels here: {why}; nothing was run, and {options.output} stays as it is", file=sys.stderr)
        return 3
    begun, device = time.monotonic(), torch.device("cuda", options.device)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    checks = Checks(device, Scale())
    checks.all()
    for name, equal in large(device):
        checks.made += 1
        checks.failed += [] if equal else [name]
    print(f"{checks.made} comparisons, {len(checks.failed)} differ {checks.failed[:20]}")
    if options.no_timing:
        return int(bool(checks.failed))
    timer = Timer(device)
    for elements in SIZES:
        time_size(timer, elements)
    time_variants(timer)
    if options.tune:
        tune(timer)
    text = document(checks, timer, time.monotonic() - begun)
    print(text)
    options.output.write_text(replace_part(options.output.read_text(encoding="utf-8"), PART, text), encoding="utf-8")
    return int(bool(checks.failed) or not all(target.met for target in judge(timer.rows)))


if __name__ == "__main__":
    sys.exit(main())
