"""Programs that tests start."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
PATHS = f"{TESTS.parent}{os.pathsep}{TESTS / 'plain_ddp'}"
"""For PYTHONPATH: this repository's packages, and what lets scripts of plain DDP end."""


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A program in a session of its own. At the end of the block, the time limit included, its processes are killed
    where they still run: the block never waits for them, as that of Popen does.
    """
    process = subprocess.Popen(command, text=True, start_new_session=True, **options)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def marked(mark: str) -> list[str]:
    """Processes with the mark in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append(f"process {process.name} {(process / 'cmdline').read_bytes()[:200]!r}")
        except OSError:
            continue  # gone, or not ours
    return found
