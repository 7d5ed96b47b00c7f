"""planner's own commands, as a user gives them, on the device."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.setting import Found, Setting, table

LAST_LINES = 6


def run(setting: Setting) -> Found:
    """Every command on two ranks; one that needs what a failed one should have written fails, too."""
    device, job = setting.device.type, f"benchmarks.gpu.job:{setting.pick('large', 'small')}"
    budget = f"{setting.pick(40, 5)}"
    on = ["--device", device, "--ranks", "2"]
    # Some minutes of a device: as users would. On a CPU each has to do little.
    steps, rounds = setting.pick(("50", "5"), ("2", "2"))
    accuracy = setting.pick("bounded", "exact")
    commands = [
        ["doctor"],
        ["profile", job, *on, "--for", accuracy, "--budget-s", budget, "-o", "profile.json"],
        ["optimize", "profile.json", "-o", "plan.json"],
        ["optimize", "profile.json", "--accuracy", accuracy, "-o", "riskier.json"],
        ["run", job, "--plan", "riskier.json", "--steps", steps, *on],
        ["compare", job, "--plan", "plan.json", "--profile", "profile.json", "--steps", steps, "--rounds", rounds, *on],
    ]
    rows: list[tuple[str, str, str]] = []
    failures: list[str] = []
    shown = ""
    with tempfile.TemporaryDirectory(prefix="planner-gpu-") as folder:
        for command in commands:
            begun = time.monotonic()
            code, said = _call(command, Path(folder), max(60.0, setting.left_s))
            name = " ".join(word for word in command if word != job)
            rows.append(
                (f"`planner {name}`", f"{time.monotonic() - begun:.0f}", "good" if code == 0 else f"**{code}**")
            )
            if code:
                failures.append(f"planner {name}: exit code {code}: {' / '.join(said.splitlines()[-LAST_LINES:])}")
            elif command[0] == "compare":
                shown += f"\n\n`planner {command[0]}`:\n\n```text\n{said.strip()}\n```"
    return Found(
        table(("command", "s", "exit code"), rows) + (shown if setting.on_device else ""),
        tuple(failures),
    )


def _call(arguments: list[str], folder: Path, limit_s: float) -> tuple[int, str]:
    """Return (exit code, what it said)."""
    root = Path(__file__).parents[2]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "planner", *arguments], cwd=folder, capture_output=True, text=True, timeout=limit_s,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, f"did not end within {limit_s:.0f} s"
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr or done.stdout
