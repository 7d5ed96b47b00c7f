"""Times of narrow formats: encoding with error feedback, adding rows up and encoding the sum, and decoding."""

from __future__ import annotations

import torch

from benchmarks.gpu.selection import Timer
from benchmarks.gpu.setting import Found, Setting, table
from benchmarks.gpu.timing import sets_of
from runtime.plan import CompressorSpec
from runtime.sparse.compressors.wire import WIRE_DTYPES, StepResidual, make_wire

ROWS = 4
"""Ranks whose rows are added up."""


class Wires:
    """One vector, what it is encoded in, and what comes of it."""

    def __init__(self, dtype: str, elements: int, device: torch.device) -> None:
        self.compressor = make_wire(CompressorSpec(name="wire", dtype=dtype), ROWS)
        self.cut = self.compressor.cut(elements, ROWS, torch.float32)
        self.gradient = torch.randn(elements, device=device)
        self.residuals = [0.01 * torch.randn(elements, device=device), torch.empty(elements, device=device)]
        self.rows = torch.zeros(ROWS, self.cut.row_bytes, dtype=torch.uint8, device=device)
        self.own, self.sums = self.rows[:1].clone(), torch.empty(elements, device=device)
        self.encode(0)

    def encode(self, parity: int) -> None:
        """Of residual + gradient; what that loses is the new residual."""
        kept = StepResidual(self.residuals[parity], self.residuals[1 - parity])
        self.compressor.compress(self.gradient, kept, self.rows, self.cut, 0)

    def combine(self, parity: int) -> None:
        """The rows of one part, added up and encoded again."""
        share = self.cut.share
        kept = StepResidual(*(of[:share] for of in self.residuals))
        self.compressor.combine(self.rows, self.own, kept, self.cut, share, 0)

    def decode(self, parity: int) -> None:
        """All parts."""
        self.compressor.decode(self.rows, self.sums, self.cut)


def run(setting: Setting) -> Found:
    """Every format at a small, a usual and a large bucket."""
    torch.manual_seed(0)
    sizes = setting.pick((1 << 20, 1 << 24, 1 << 26), (1 << 14, 1 << 16))
    timer, failures = Timer(setting, 3 * len(sizes) * len(WIRE_DTYPES)), list[str]()
    for elements in sizes:
        elements -= elements % (ROWS * 512)
        count = sets_of(16 * elements, setting.device)
        for dtype in WIRE_DTYPES:
            sets = [Wires(dtype, elements, setting.device) for _ in range(count)]
            first = sets[0]
            if setting.on_device and not first.compressor.runs_on(setting.device, first.cut):
                failures.append(f"{dtype}: no kernel runs, torch's operations were timed")
            code_bytes = first.rows.numel() / elements
            # Read and written in any case: gradient and residuals once each, and codes.
            timer.add(f"{dtype}: encode", elements, 12 + code_bytes, [one.encode for one in sets])
            share = elements // ROWS
            timer.add(
                f"{dtype}: add {ROWS} rows up, encode", share, 8 + (ROWS + 1) * code_bytes, [s.combine for s in sets]
            )
            timer.add(f"{dtype}: decode", elements, 4 + code_bytes, [one.decode for one in sets])
    head = ("what", "elements", "µs (95 % interval)", "p95 µs", "bytes per element", "share of a copy")
    rows = [
        (
            row.what,
            f"{row.elements:,}",
            row.times,
            f"{row.times.p95_us:.1f}",
            f"{row.useful_bytes:.1f}",
            f"{row.share:.0%}",
        )
        for row in timer.rows
    ]
    text = f"A copy moves {timer.copy_bytes_per_us / 1e6:.2f} TB/s. Blocks of 256 elements where there are scales."
    return Found(f"{text}\n\n{table(head, rows)}", tuple(failures))
