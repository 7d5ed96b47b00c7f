"""An environment from the wheels in a folder, without a network, for machines that have none."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.state import ROOT

EXTRAS = ("demo",)
"""Of pyproject.toml, beside what the package itself needs."""


class WheelsMissing(Exception):
    """Says what is missing, and what to do."""


def requirements() -> list[str]:
    """What pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: list[str] = list(project["dependencies"])
    for extra in EXTRAS:
        found += project["optional-dependencies"][extra]
    return found


def make_environment(wheels: Path, folder: Path, wanted: Sequence[str]) -> Path:
    """Return the interpreter of a virtual environment in `folder`, in which `wanted` is installed from `wheels` alone.

    One that is there is taken as it is where nothing is missing. Raises WheelsMissing.
    """
    if not any(wheels.glob("*.whl")):
        raise WheelsMissing(
            f"--wheels {wheels}: found no wheel there, expected those of {', '.join(wanted)} and of what they need: "
            f"fill it elsewhere with `pip download --dest {wheels} …`"
        )
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels), *wanted],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-600:]
        raise WheelsMissing(
            f"--wheels {wheels}: pip cannot install {', '.join(wanted)} from it for Python "
            f"{sys.version_info.major}.{sys.version_info.minor} ({said}); put the wheels that are missing there"
        )
    return python
