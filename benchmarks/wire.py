"""What narrow formats cost on one core: encoding with error feedback, and decoding and adding up.

    python -m benchmarks.wire             # prints a table; exit code 1 where int8 takes longer than LIMIT_NS
    python -m benchmarks.wire --quick     # fewer sizes and rounds

Times are the thread's processor time; of each round every contestant takes its turn, and the median over rounds counts.
`copy` is a copy of as many float32 elements. Encoding adds residual + gradient, fills codes and scales and keeps what
they lose; decoding is of one rank's row, into a sum.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from runtime.plan import CompressorSpec
from runtime.sparse.compressors.wire import WIRE_DTYPES, StepResidual, make_wire

SIZES = (65_536, 1_000_000, 25_000_000)
LIMIT_NS = 4.0
"""What encoding, decoding and adding up one element of int8 may take together."""
ROWS = 4
"""Ranks whose rows are added up."""


def contestants(elements: int) -> dict[str, tuple[Callable[[], object], int]]:
    """(what is timed, elements that it handles) by name."""
    gradient, residual, rest = torch.randn(elements), torch.randn(elements) * 0.01, torch.empty(elements)
    found: dict[str, tuple[Callable[[], object], int]] = {"copy": (lambda: rest.copy_(gradient), elements)}
    specs = {dtype: CompressorSpec(name="wire", dtype=dtype) for dtype in WIRE_DTYPES}
    specs["int8 by chance"] = CompressorSpec(name="wire", dtype="int8", rounding="stochastic")
    for name, spec in specs.items():
        compressor = make_wire(spec, ROWS)
        cut = compressor.cut(elements, 1, torch.float32)
        rows, total = torch.zeros(ROWS, cut.row_bytes, dtype=torch.uint8), torch.empty(elements)
        kept = StepResidual(residual, rest)
        for row in range(ROWS):
            compressor.compress(gradient, kept, rows[row : row + 1], cut, 0)

        encode = partial(compressor.compress, gradient, kept, rows[:1], cut, 1)
        found[f"{name}: encode"] = (encode, elements)
        found[f"{name}: decode and sum"] = (partial(compressor.add_up, rows, total, cut), elements * ROWS)
    return found


def times_ns(elements: int, rounds: int) -> dict[str, float]:
    """Of an element."""
    timed = contestants(elements)
    repeats = max(1, 500_000 // elements)
    found: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, (action, handled) in timed.items():
            begun = time.thread_time_ns()
            for _ in range(repeats):
                action()
            found[name].append((time.thread_time_ns() - begun) / (repeats * handled))
    return {name: median(values[1:]) for name, values in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="What narrow formats cost on one core.")
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    too_long = False
    print("| elements | what | ns an element | × copy |\n| ---: | --- | ---: | ---: |")
    for elements in SIZES[:2] if quick else SIZES:
        found = times_ns(elements, 4 if quick else 8)
        for name, time_ns in found.items():
            print(f"| {elements:,} | {name} | {time_ns:.2f} | {time_ns / found['copy']:.1f} |")
        too_long |= found["int8: encode"] + found["int8: decode and sum"] > LIMIT_NS
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
