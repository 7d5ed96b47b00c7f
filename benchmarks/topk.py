"""What selecting the largest elements costs on one core, beside the obvious way in torch.

    python -m benchmarks.topk             # prints a table; exit code 1 where a limit is passed
    python -m benchmarks.topk --quick     # fewer sizes and rounds
    python -m benchmarks.topk --sizes --output docs/results/selection.md   # over the sizes of Fig. 6 of MSTopK-SGD

The obvious way: `acc = residual + gradient; torch.topk(acc.abs(), k)`, gather the values, set them to zero. Each round
times every contestant once, in turn, by the processor's time of the thread; a ratio is the median over rounds of the
obvious way's time / the contestant's. `add` is residual + gradient alone, which nobody can go below.

Data: `normal`, and `steady`, residuals as error feedback leaves them, which pile up below the threshold.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.marked import write_part
from runtime.plan import CompressorSpec
from runtime.sparse.compressors import make_compressor
from runtime.sparse.compressors.sparse import SELECTORS, SparseCompressor

SIZES, DENSITIES, DATA = (1_000_000, 5_000_000, 25_000_000), (0.001, 0.01), ("normal", "steady")
FIGURE_SIZES = tuple(250_000 * 2**power for power in range(10))
"""Of Fig. 6 of MSTopK-SGD (CommLib, MLSys 2021): 0.25 to 128 million elements."""
LIMIT = 3.0
"""How many times faster than the obvious way `exact` has to be for the most elements at the least density."""

STEADY_ELEMENTS = 200_000
STEADY_STEPS = 1500
MEAN = 0.1
"""Standard deviation of the elements' lasting means, beside noise of 1."""


@dataclass(frozen=True)
class Buffers:
    """What a contestant works on."""

    gradient: Tensor
    residual: Tensor
    new_residual: Tensor
    k: int


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    elements: int
    density: float
    data: str
    contestant: str
    time_ms: float
    ratio: float


def obvious(buffers: Buffers) -> tuple[Tensor, Tensor]:
    """(values, indices); the sum becomes the new residual."""
    accumulated = buffers.residual + buffers.gradient
    indices = torch.topk(accumulated.abs(), buffers.k).indices
    values = accumulated[indices]
    accumulated[indices] = 0.0
    return values, indices


def add(buffers: Buffers) -> Tensor:
    """The sum alone."""
    return torch.add(buffers.residual, buffers.gradient, out=buffers.new_residual)


def selection(selector: str, elements: int, k: int) -> Callable[[Buffers], object]:
    """A contestant of the registry."""
    spec = CompressorSpec(name="topk", selector=selector, k={"all": k})
    compressor = make_compressor(spec, [("all", elements)], ranks=1)
    assert isinstance(compressor, SparseCompressor)
    return lambda b: compressor.compress(b.gradient, b.residual, b.new_residual, step=0)


def make_buffers(elements: int, density: float, data: str) -> Buffers:
    """The same for the same arguments."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(elements, generator=generator)
    if data == "normal":
        residual = torch.randn(elements, generator=generator)
    else:
        residual = _steady_residual(density).repeat(-(-elements // STEADY_ELEMENTS))[:elements]
    return Buffers(gradient, residual, torch.zeros(elements), int(density * elements))


def _steady_residual(density: float) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(STEADY_ELEMENTS, generator=generator) * MEAN
    residual, other = torch.zeros(STEADY_ELEMENTS), torch.zeros(STEADY_ELEMENTS)
    spec = CompressorSpec(name="topk", density=density)
    compressor = make_compressor(spec, [("all", STEADY_ELEMENTS)], ranks=1)
    assert isinstance(compressor, SparseCompressor)
    for step in range(STEADY_STEPS):
        compressor.compress(mean + torch.randn(STEADY_ELEMENTS, generator=generator), residual, other, step)
        residual, other = other, residual
    return residual


def measure(elements: int, density: float, data: str, rounds: int) -> list[Row]:
    """All contestants by turns; the first round is not counted."""
    buffers = make_buffers(elements, density, data)
    contestants: dict[str, Callable[[Buffers], object]] = {"obvious": obvious, "add": add}
    contestants |= {name: selection(name, elements, buffers.k) for name in SELECTORS}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for counted in [False] + [True] * rounds:
        for name, run in contestants.items():
            start = time.thread_time()
            run(buffers)
            if counted:
                times[name].append(time.thread_time() - start)
    return [
        Row(
            elements,
            density,
            data,
            name,
            median(own) * 1e3,
            median(a / b for a, b in zip(times["obvious"], own, strict=True)),
        )
        for name, own in times.items()
    ]


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = ["| elements | density | data | way | ms | times faster |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [
        f"| {r.elements:,} | {r.density:.1%} | {r.data} | {r.contestant} | {r.time_ms:.2f} | {r.ratio:.2f} |"
        for r in rows
    ]
    return "\n".join(lines)


def by_size(rows: list[Row]) -> str:
    """Markdown: milliseconds, a row for each size, a column for each way."""
    ways = list(dict.fromkeys(row.contestant for row in rows))
    lines = [f"| elements | {' | '.join(ways)} |", "| --: " * (1 + len(ways)) + "|"]
    for elements in dict.fromkeys(row.elements for row in rows):
        times = {row.contestant: row.time_ms for row in rows if row.elements == elements}
        lines.append(f"| {elements / 1e6:g} M | {' | '.join(f'{times[way]:,.2f}' for way in ways)} |")
    return "\n".join(lines)


def main() -> int:
    """Measures and prints; 1 where a limit is passed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one and 25 million elements, normal data, three rounds")
    parser.add_argument("--rounds", type=int, default=7, help="how often each way is timed")
    parser.add_argument("--sizes", nargs="*", type=int, default=None, help="elements; default: of Fig. 6, at 0.1 %%")
    parser.add_argument("--output", type=Path, help="a document whose table of sizes is rewritten")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stamp = f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, torch {torch.__version__}, one thread"
    if options.sizes is not None:
        found = [
            row
            for elements in options.sizes or FIGURE_SIZES
            for row in measure(elements, DENSITIES[0], DATA[0], options.rounds)
        ]
        text = f"{by_size(found)}\n\n{stamp}"
        print(text)
        if options.output is not None:
            write_part(options.output, "sizes", text)
        return 0
    sizes, kinds, rounds = (SIZES[::2], DATA[:1], 3) if options.quick else (SIZES, DATA, options.rounds)
    rows = [
        row
        for elements in sizes
        for density in DENSITIES
        for data in kinds
        for row in measure(elements, density, data, rounds)
    ]
    print(table(rows))
    print(f"\n{stamp}")
    judged = [r for r in rows if (r.elements, r.density, r.contestant) == (SIZES[-1], DENSITIES[0], "exact")]
    return int(any(row.ratio < LIMIT for row in judged))


if __name__ == "__main__":
    sys.exit(main())
