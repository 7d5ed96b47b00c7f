"""Runs the fault matrix and writes its recovery times into docs/results/faults.md.

    python -m benchmarks.faults

The cells are those of tests/procs/test_fault_matrix.py, which checks what each prints and leaves; here they run one
after the other, so that the times are those of a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "procs"))

from fault_cells import CELLS, DEADLINE_S, ROOT, run_cell, table

DOCUMENT = ROOT / "docs" / "results" / "faults.md"
BEGIN = "<!-- written by python -m benchmarks.faults -->\n"


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description="Runs the fault matrix and writes its recovery times.")
    parser.add_argument("--output", type=Path, default=DOCUMENT, help="what follows its marker is replaced")
    output = parser.parse_args().output
    kept = output.read_text(encoding="utf-8").partition(BEGIN)[0]
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        for cell in CELLS:
            outcomes[cell] = run_cell(cell, Path(folder) / str(cell))
            print(f"{cell}: {outcomes[cell].recovery_s:.1f} s {outcomes[cell].left or ''}", flush=True)
    where = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}"
    output.write_text(f"{kept}{BEGIN}\nDeadline {DEADLINE_S:g} s; {where}.\n\n{table(outcomes)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
