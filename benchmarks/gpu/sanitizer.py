"""Small runs of all kernels under compute-sanitizer, where it is installed.

python -m benchmarks.gpu.sanitizer DEVICE    # what runs under it
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.gpu.checks import SMALL, Checks
from benchmarks.gpu.setting import Found, Setting, table

TOOLS = ("memcheck", "racecheck", "synccheck")
ERRORS = 77
"""Exit code of a run in which the tool has found something."""


def find_sanitizer() -> str | None:
    """Return where compute-sanitizer is: on the path or in a toolkit."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [str(Path(home) / "bin") for home in homes if home]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def run(setting: Setting) -> Found:
    """One run for each tool; without the tools one run by itself, so that it is known to run."""
    found = find_sanitizer() if setting.on_device else None
    prefixes = [[found, "--tool", tool, "--error-exitcode", str(ERRORS)] for tool in TOOLS] if found else [[]]
    rows: list[tuple[str, str]] = []
    failures: list[str] = []
    left_out: list[str] = []
    for prefix in prefixes:
        tool = prefix[2] if prefix else "none"
        left_s = max(30.0, setting.left_s)
        command = [*prefix, sys.executable, "-m", "benchmarks.gpu.sanitizer", str(setting.device)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left_s)
        except subprocess.TimeoutExpired:
            rows.append((tool, f"did not end within {left_s:.0f} s"))
            left_out.append(f"{tool}: did not end within {left_s:.0f} s")  # nothing is known of the kernels
            continue
        last = (done.stdout + done.stderr).strip().splitlines()[-1:] or [""]
        rows.append((tool, last[0] if done.returncode == 0 else f"**exit code {done.returncode}**: {last[0]}"))
        failures += [f"{tool}: exit code {done.returncode}: {last[0]}"] if done.returncode else []
    where = "" if found else "compute-sanitizer is not installed here; the run that it would watch:\n\n"
    return Found(where + table(("tool", "its last word"), rows), tuple(failures), tuple(left_out))


def main() -> int:
    """The checks at their smallest."""
    checks = Checks(torch.device(sys.argv[1]), SMALL)
    for check in (checks.numbers_of_elements, checks.segments, checks.mstopk, checks.unpacking, checks.wire):
        check()
    print(f"{checks.made} comparisons, {len(checks.failed)} differ {checks.failed[:5]}")
    return int(bool(checks.failed))


if __name__ == "__main__":
    sys.exit(main())
