"""The process that runs parts, one after the other, and writes what comes of them at once; started by the command.

It imports torch and makes the device's context, either of which a part may break: behind one that failed it ends, and
the command starts another one with what is left.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.state import append, source_digest

TRACE_LINES = 12
"""Of a traceback, the last ones."""


def describe() -> dict[str, Any]:
    """Return what results depend on: device, driver and versions; `device` is None where there is none."""
    import torch

    from runtime.version import __version__

    device: dict[str, Any] | None = None
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        device = {
            "name": found.name, "capability": f"{found.major}.{found.minor}", "memory_gib": found.total_memory >> 30,
            "count": torch.cuda.device_count(), "driver": _driver(), "cuda": torch.version.cuda,
        }  # fmt: skip
    return {
        "device": device, "torch": torch.__version__, "python": platform.python_version(), "planner": __version__,
        "machine": platform.machine(),
    }  # fmt: skip


def _driver() -> str:
    """The driver's version, as nvidia-smi tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return said[0] if said else "unknown"


def main() -> int:
    """Describe, or run parts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--describe", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--state", type=Path)
    parser.add_argument("--deadline", type=float, help="as time.time() gives it")
    parser.add_argument("--parts", nargs="*", default=[])
    options = parser.parse_args()
    if options.describe:
        print(json.dumps(describe()))
        return 0
    import torch

    from benchmarks.gpu.setting import Setting

    device = torch.device("cpu")
    if options.device == "cuda":
        torch.cuda.set_device(0)
        device = torch.device("cuda", 0)
    elif torch.get_num_threads() > 2:  # one rank of two, as in most parts
        torch.set_num_threads(2)
    for place, name in enumerate(options.parts):
        part = PARTS[name]
        shares = sum(PARTS[other].share for other in options.parts[place:])
        seconds = max(1.0, (options.deadline - time.time()) * part.share / shares)
        append(options.state, {"begun": name, "seconds": seconds, "time": time.time()})
        started = time.monotonic()
        try:
            found = asdict(part.load()(Setting(device, seconds)))
        except Exception as error:
            trace = traceback.format_exc().strip().splitlines()[-TRACE_LINES:]
            found = {"text": "```text\n" + "\n".join(trace) + "\n```", "failures": [f"{type(error).__name__}: {error}"]}
        about = {"date": time.strftime("%Y-%m-%d"), "source": source_digest()}
        append(options.state, {"part": name, "took_s": round(time.monotonic() - started, 1), **about, **found})
        if options.device == "cuda":
            if found["failures"]:
                return 0  # the device's context may be broken
            gc.collect()
            torch.cuda.empty_cache()  # ranks of the next part are other processes
    return 0


if __name__ == "__main__":
    sys.exit(main())
