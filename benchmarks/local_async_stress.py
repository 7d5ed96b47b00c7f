"""Local updaters under stress: 2 ranks × 4 updaters × 2,000 minibatches of a tiny model, 20 times.

    python -m benchmarks.local_async_stress

Models are averaged after every update. Each run has to do every minibatch once, to count what it did, and to end with
equal models; at the end no process and no shared memory may be left. tests/procs/test_local_async.py has a small one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "procs"))

from local_async_checks import stress

from planner.jobs.launch import LocalWorld, run_ranks

MARK = "LOCAL_ASYNC_STRESS"
LEAVING_S = 10.0
"""How long processes may take to be gone."""


def main() -> None:
    """Runs, prints, and ends with code 1 where something did not hold."""
    parser = argparse.ArgumentParser(description="Local updaters under stress.")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--updaters", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2000, help="minibatches of each rank")
    options = parser.parse_args()
    os.environ[MARK] = str(os.getpid())
    before, bad = set(_shared_memory()), 0
    for number in range(options.times):
        start = time.perf_counter()
        found = run_ranks(LocalWorld(ranks=2), stress, options.updaters, options.steps)
        wrong = [f"rank {rank}: {name}" for rank, one in enumerate(found) for name, good in one.items() if not good]
        bad += bool(wrong)
        print(f"run {number + 1}: {time.perf_counter() - start:.1f} s, {'; '.join(wrong) or 'all held'}", flush=True)
    left = [*_processes_left(), *(name for name in _shared_memory() if name not in before)]
    print(f"left behind: {', '.join(left) or 'nothing'}")
    sys.exit(1 if bad or left else 0)


def _shared_memory() -> list[str]:
    """What torch and multiprocessing name there."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return [name for name in names if name.startswith(("torch_", "sem.mp-", "psm_"))]


def _processes_left() -> list[str]:
    """Processes with the mark in their environment, once they had time to leave."""
    mark = f"{MARK}={os.getpid()}".encode()
    until = time.monotonic() + LEAVING_S
    found = ["?"]
    while found and time.monotonic() < until:
        time.sleep(0.2)
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                marked = mark in (entry / "environ").read_bytes().split(b"\0")
                tracker = b"resource_tracker" in (entry / "cmdline").read_bytes()  # of this process; ends with it
            except OSError:
                continue  # gone, or not ours
            if marked and not tracker and entry.name != str(os.getpid()):
                found.append(f"process {entry.name}")
    return found


if __name__ == "__main__":
    main()
