"""`planner demo` several times, some of them with a busy process on one core, written to docs/results/demo.md.

python -m benchmarks.demo_runs --results benchmarks/results/demo.jsonl            # resumes where it was stopped
python -m benchmarks.demo_runs --results benchmarks/results/demo.jsonl --write    # puts what is known into the page
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.marked import parser_of, tabulate
from planner.comparison.variants import DDP, NO_COMMUNICATION, PLAN
from runtime.errors import EnvironmentFailure

DOCUMENT = Path("docs/results/demo.md")
QUIET, BUSY = 3, 2
"""Number of runs without and with a busy process."""
LONGEST_S = 300.0


@contextmanager
def busy_core(wanted: bool) -> Iterator[None]:
    """Keep one core busy, if that is wanted."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if wanted else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def measure(busy: bool) -> dict[str, Any]:
    """Run the demo once; return its figures. Raises EnvironmentFailure where it fails."""
    started_s = time.monotonic()
    with busy_core(busy):
        done = subprocess.run(
            [sys.executable, "-m", "planner", "demo", "--json"], capture_output=True, text=True, timeout=LONGEST_S
        )
    if done.returncode:
        raise EnvironmentFailure(f"planner demo: exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["rows"]}
    return {
        "seconds": time.monotonic() - started_s,
        **{name: found[name] for name in ("ratio", "ratio_ci95", "rounds", "steps", "other_cores")},
        **{f"{name}_us": rows[name]["median_us"] for name in (NO_COMMUNICATION, DDP, PLAN)},
        **{f"{name}_predicted_us": rows[name]["predicted_us"] for name in (DDP, PLAN)},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
    }


def cells() -> Mapping[str, Any]:
    """Return what measures each run, by name."""
    runs = [(f"run {number}", False) for number in range(1, QUIET + 1)]
    runs += [(f"run {QUIET + number}, one core busy", True) for number in range(1, BUSY + 1)]
    return {name: partial(measure, busy) for name, busy in runs}


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the runs as Markdown."""
    columns = (
        "run", "computation ms", "DDP ms", "predicted", "plan ms", "predicted", "plan / DDP (95 %)", "rounds",
        "cores of others", "s",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for row in rows:
        low, high = row["ratio_ci95"]
        times = [row[f"{name}_us"] / 1e3 for name in ("none", "ddp", "ddp_predicted", "plan", "plan_predicted")]
        lines.append(
            f"| {row['cell']} | {' | '.join(f'{time_ms:.1f}' for time_ms in times)} | {row['ratio']:.3f} "
            f"({low:.3f} to {high:.3f}) | {row['rounds']} | {row['other_cores']:.1f} | {row['seconds']:.0f} |"
        )
    gains = sum(row["ratio_ci95"][1] < 1.0 for row in rows)
    last = f"The gain is beyond the noise in {gains} of {len(rows)} runs ({rows[0]['machine']})."
    return [*lines, "", last]


def main() -> int:
    """Measure what is missing, print, write."""
    options = parser_of(__doc__, DOCUMENT).parse_args()
    return tabulate(DOCUMENT, {"runs": (cells(), table)}, options)


if __name__ == "__main__":
    sys.exit(main())
