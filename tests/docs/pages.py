"""What pages hold: fenced blocks, commands, and how a command of theirs is run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from started import PATHS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    {
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("[!.]*/README.md"),
    }
)
BLOCK = re.compile(r"(?:^<!-- (?:file: (\S+)|(run)) -->\n)?^```(\w+)[^\n]*\n(.*?)^```$", re.M | re.S)


def blocks(page: Path) -> Iterator[tuple[str | None, bool, str, str]]:
    """(name of a file, whether it is run, language, text) of each fenced block."""
    for name, run, language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        yield name or None, bool(run), language, text


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command in blocks of shell, without what is between pipes."""
    for _, _, language, text in blocks(page):
        if language == "bash":
            yield from filter(None, (shlex.split(line, comments=True) for line in text.splitlines()))


def call(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with this repository's packages, and programs of this interpreter."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=400,
        env={**os.environ, "PATH": path, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def run(command: Sequence[str], folder: Path) -> str:
    """What a command that has to end well prints."""
    done = call(command, folder)
    assert done.returncode == 0, f"{shlex.join(command)}:\n{done.stdout}\n{done.stderr}"
    return done.stdout
