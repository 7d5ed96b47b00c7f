"""The fault matrix: where a rank fails × how, under each way to start ranks; and what is left when it is over.

`run_cell` starts one cell as a user would, waits for it, and looks for what it left behind. `tests/procs/
test_fault_matrix.py` checks every cell; `python -m benchmarks.faults` writes the times into docs/results/faults.md.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import fault_jobs
from started import marked

ROOT = Path(__file__).resolve().parents[2]
JOBS = Path(fault_jobs.__file__).resolve()
DEADLINE_S = 4.0
"""Of every cell; small, so that the matrix takes little time."""
LIMIT_S = 120.0
"""Of one cell, most of which is importing torch on a busy machine."""
OF_TORCH = ("torchinductor_", "torchelastic_")
"""Folders that torch makes for a program with an optimizer, and torchrun for its logs, fault or not."""
LEAVING_S = 10.0
"""How long processes may take to be gone once the command has ended."""

PHASES = ("compute", "links", "attach", "forward", "backward", "end")
FAULTS = ("kill", "stop", "raise")


@dataclass(frozen=True)
class Cell:
    """One fault in one phase."""

    phase: str
    fault: str
    start: str = "local"
    """`local`: the command starts its ranks. `ranks`: one process each, in the environment that torchrun makes.
    `torchrun`: torchrun itself."""
    program: str = "run"
    """`profile`, `run`, `ddp` (run without a plan) or `script` (a user's own, with `runtime.attach`)."""
    ranks: int = 2
    failing: int = 1

    def __str__(self) -> str:
        world = self.start if self.ranks == 2 else f"{self.start}{self.ranks}"
        return "-".join([world, self.program, self.phase, self.fault] + (["rank0"] if self.failing == 0 else []))


def _program(phase: str) -> str:
    return "profile" if phase in ("compute", "links") else "run"


CELLS = (
    Cell("backward", "stop", "torchrun", "script"),  # first: torchrun waits for half a minute before it kills
    Cell("backward", "kill", "torchrun"),
    *(Cell(phase, fault, program=_program(phase)) for phase in PHASES for fault in FAULTS),
    Cell("backward", "stop", ranks=3),
    Cell("backward", "stop", program="ddp"),
    *(Cell("backward", fault, "ranks") for fault in FAULTS),
    Cell("links", "stop", "ranks", "profile"),
    Cell("end", "stop", "ranks"),
    *(Cell("backward", fault, "ranks", "script") for fault in ("stop", "raise")),
    Cell("attach", "stop", "ranks", "script"),
    Cell("forward", "kill", "ranks", "script", failing=0),
)


@dataclass
class Outcome:
    """What came of a cell."""

    codes: list[int]
    """Exit codes: of the command, or of each rank but the failed one."""
    text: str
    """What was printed, all streams together."""
    recovery_s: float
    """From the fault to the end of the last of them."""
    left: list[str] = field(default_factory=list)
    """Processes and temporary files that stayed behind."""


def run_cell(cell: Cell, folder: Path) -> Outcome:
    """Runs a cell in a new folder."""
    codes = _wait(_start(cell, folder), cell)
    ended, moment = time.time(), folder / "moment"
    return _outcome(folder, codes, ended - float(moment.read_text()) if moment.exists() else float("nan"))


def interrupt(number: int, folder: Path) -> Outcome:
    """Sends a signal to a command that waits for its ranks, of which one is stopped; its deadline is far away."""
    cell = Cell("forward", "stop")
    [process] = _start(cell, folder, deadline_s=600.0)
    until = time.monotonic() + LIMIT_S
    while not (folder / "moment").exists() and time.monotonic() < until:
        time.sleep(0.1)
    sent = time.time()
    process.send_signal(number)
    codes = _wait([process], cell)
    return _outcome(folder, codes, time.time() - sent)


def _outcome(folder: Path, codes: list[int], recovery_s: float) -> Outcome:
    left = _processes_left(str(folder / "moment"))
    left += [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith(OF_TORCH)]
    text = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("out-*")))
    return Outcome(codes, text, recovery_s, left)


def _start(cell: Cell, folder: Path, deadline_s: float = DEADLINE_S) -> list[subprocess.Popen[bytes]]:
    (folder / "tmp").mkdir(parents=True)
    plan = folder / "plan.json"
    buckets = [{"gradients": names, "collective": "all_reduce", "algorithm": "library"} for names in fault_jobs.BUCKETS]
    document = {"schema": "planner.plan/1", "model": {"name": "three layers"}, "world": {"ranks": cell.ranks}}
    plan.write_text(json.dumps({**document, "accuracy": "exact", "buckets": buckets}))
    # Cells run beside the tests, and not for one of them: what a failed test started is killed by its mark.
    inherited = {name: value for name, value in os.environ.items() if name != "PLANNER_TEST"}
    environment = {
        **inherited,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), str(JOBS.parent), os.environ.get("PYTHONPATH")))),
        "TMPDIR": str(folder / "tmp"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "FAULT": f"{cell.phase}:{cell.fault}:{cell.failing}",
        "FAULT_MOMENT": str(folder / "moment"),
    }
    processes = []
    for number, (command, extra) in enumerate(_commands(cell, plan, deadline_s)):
        with (folder / f"out-{number}").open("wb") as out:
            arguments = [sys.executable, *command]
            merged = {**environment, **extra}
            processes.append(subprocess.Popen(arguments, cwd=folder, env=merged, stdout=out, stderr=subprocess.STDOUT))
    return processes


def _commands(cell: Cell, plan: Path, deadline_s: float) -> Iterable[tuple[list[str], dict[str, str]]]:
    """The processes that a user starts: arguments of Python, and what the environment holds besides."""
    deadline = ["--timeout-s", f"{deadline_s:g}"]
    steps = ["--steps", str(fault_jobs.STEPS)]
    planner = ["planner", "profile" if cell.program == "profile" else "run", f"{JOBS}:job", *deadline]
    arguments = {
        "profile": ["-m", *planner, "-o", "profile.json"],
        "run": ["-m", *planner, *steps, "--plan", str(plan)],
        "ddp": ["-m", *planner, *steps],
        "script": [str(JOBS), str(plan), f"{deadline_s:g}"],
    }[cell.program]
    if cell.start == "local":
        yield [*arguments, "--ranks", str(cell.ranks)], {}
    elif cell.start == "torchrun":
        yield ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cell.ranks), *arguments], {}
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        world = {"WORLD_SIZE": str(cell.ranks), "LOCAL_WORLD_SIZE": str(cell.ranks)}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(cell.ranks):
            yield arguments, {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def _wait(processes: list[subprocess.Popen[bytes]], cell: Cell) -> list[int]:
    """Exit codes of all that have to end by themselves; a rank of ours that is stopped is ended by us."""
    failing = processes[cell.failing] if cell.start == "ranks" else None
    until = time.monotonic() + LIMIT_S
    codes = []
    try:
        for process in processes:
            if process is not failing:
                codes.append(process.wait(until - time.monotonic()))
    except subprocess.TimeoutExpired:
        codes.append(124)
    finally:
        for process in processes:
            if process is failing or process.poll() is None:
                process.kill()
            process.wait()
    return codes


def _processes_left(mark: str) -> list[str]:
    """Processes with the mark in their environment, once they had time to leave. With them go their sockets."""
    until = time.monotonic() + LEAVING_S
    while (found := marked(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    for process in found:
        os.kill(int(process.split()[1]), signal.SIGKILL)
    return found


def table(outcomes: dict[Cell, Outcome]) -> str:
    """The recovery times, in Markdown."""
    lines = ["| started by | program | ranks | phase | fault | exit codes | recovery (s) |", "|" + " --- |" * 7]
    for cell, outcome in outcomes.items():
        codes = ", ".join(str(code) for code in outcome.codes)
        start = {"local": "planner", "ranks": "a launcher"}.get(cell.start, cell.start)
        program = {"script": "own script", "ddp": "run (DDP)"}.get(cell.program, cell.program)
        lines.append(
            f"| {start} | {program} | {cell.ranks} | {cell.phase} | {cell.fault} | {codes} | {outcome.recovery_s:.1f} |"
        )
    return "\n".join(lines)
