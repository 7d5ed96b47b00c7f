"""Standard output that takes less than what a command has to say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bad_files import full
from builders import usual_document, write


def test_a_full_standard_output(tmp_path: Path) -> None:
    """Told in words, as for files; Python says nothing more as it ends."""
    profile = write(tmp_path / "p.json", usual_document())
    with open("/dev/full", "w") as full_:
        done = subprocess.run(
            [sys.executable, "-m", "planner", "simulate", profile],
            stdout=full_,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
        )
    assert done.returncode == 2
    assert (
        done.stderr == "planner: standard output: cannot be written: No space left on device; send it somewhere else\n"
    )


def test_output_in_an_encoding_that_lacks_characters(tmp_path: Path) -> None:
    """Names and arrows are written out where the terminal cannot show them."""
    document = {**full("plan"), "model": {"name": "möbius"}}
    done = subprocess.run(
        [sys.executable, "-m", "planner", "explain", write(tmp_path / "plan.json", document)],
        capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "m\\xf6bius" in done.stdout
