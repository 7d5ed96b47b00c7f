"""Runs the tests on several versions of Python and torch, and writes docs/results/versions.md.

    python -m benchmarks.versions [--only python3.12-torch2.12] [--tests tests/null/cost ...]

Each cell has an environment of its own in .versions/, which is kept. An interrupted run continues: cells that are
done are not run again unless the sources or the tests asked for have changed. Versions of Python that are not installed
are skipped, and the table names them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.resumable import kept
from runtime.errors import EnvironmentFailure
from runtime.plan.files import write_text

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".versions"
DOCUMENT = ROOT / "docs" / "results" / "versions.md"
PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.11", "2.12", "2.13")
ALL = ("tests",)


class Cell(NamedTuple):
    """One version of Python with one of torch."""

    python: str
    torch: str

    def __str__(self) -> str:
        return f"python{self.python}-torch{self.torch}"


CELLS = tuple(Cell(python, torch) for python in PYTHONS for torch in TORCHES)


def main() -> None:
    """Run the cells that are missing, and write the table."""
    parser = argparse.ArgumentParser(description="Run the tests on several versions of Python and torch.")
    parser.add_argument("--only", default="", help="a part of the names of cells, such as torch2.12")
    parser.add_argument("--tests", nargs="+", default=[*ALL], help="files and folders of tests")
    parser.add_argument("--output", type=Path, default=DOCUMENT)
    asked = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    tests = tuple(asked.tests)
    records = kept(
        FOLDER / f"{digest(tests)}.jsonl", {str(cell): partial(run_cell, cell, tests) for cell in CELLS}, asked.only
    )
    write_text(asked.output, page(records, tests))
    chosen = [record for record in records if asked.only in record["cell"]]
    if not any(record.get("passed") for record in chosen) or any(record.get("failed") for record in chosen):
        sys.exit(1)


def digest(tests: Iterable[str]) -> str:
    """Return what results depend on besides their cell, as some hexadecimal digits: tracked files, and the tests."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    found = hashlib.sha256(" ".join(tests).encode())
    for path in (ROOT / os.fsdecode(name) for name in names if not name.startswith(b"docs/results/")):
        if path.is_file():
            found.update(os.fsencode(path.relative_to(ROOT)) + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def run_cell(cell: Cell, tests: Sequence[str]) -> dict[str, Any]:
    """Return the outcome of the tests of a cell.

    Raises:
        EnvironmentFailure: there is no such Python, its environment cannot be made, or its tests came to no result;
            nothing is kept then.
    """
    python = find_python(cell.python)
    if python is None:
        raise EnvironmentFailure(f"skipped: Python {cell.python} is not installed here")
    folder = FOLDER / str(cell)
    program = install(cell, python, folder)
    started_s, report = time.monotonic(), folder / "report.xml"
    report.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [program, "-m", "pytest", "-q", "-m", "not long", f"--junitxml={report}", *tests],
        cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    if not report.exists():
        raise EnvironmentFailure(f"pytest ended without a result, expected {report}; see its output above")
    return {"minutes": (time.monotonic() - started_s) / 60.0, **versions(program), **outcome(report)}


@cache
def find_python(version: str) -> str | None:
    """Return a Python of this version: of PATH, or of pyenv, whose commands work only where it is switched on."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [
        shutil.which(f"python{version}"),
        *sorted(map(str, root.glob(f"versions/{version}.*/bin/python{version}"))),
    ]
    for program in filter(None, found):
        check = f"import sys; sys.exit(sys.version_info[:2] != ({version.replace('.', ', ')}))"
        if subprocess.run([program, "-c", check], capture_output=True, check=False).returncode == 0:
            return program
    return None


def install(cell: Cell, python: str, folder: Path) -> str:
    """Return the Python of the cell's environment, which is made where it is missing or for other dependencies."""
    program, done = folder / "bin" / "python", folder / ".installed"
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    wanted = (ROOT / "pyproject.toml").read_text(encoding="utf-8") + pinned
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        return str(program)
    constraints = folder / "constraints.txt"
    others = [line for line in pinned.splitlines() if not line.startswith("torch==")]
    try:
        subprocess.run([python, "-m", "venv", folder], check=True)
        constraints.write_text("\n".join([*others, f"torch=={cell.torch}.*", ""]), encoding="utf-8")
        pip = [str(program), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
        subprocess.run([*pip, "--editable", ".[dev]"], cwd=ROOT, check=True)
    except subprocess.CalledProcessError as error:
        raise EnvironmentFailure(f"{cell}: its environment {folder} cannot be made: {error}") from error
    done.write_text(wanted, encoding="utf-8")
    return str(program)


def versions(program: str) -> dict[str, str]:
    """Return the exact versions of a cell."""
    code = "import platform, torch; print(platform.python_version(), torch.__version__)"
    python, torch = subprocess.run([program, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return {"python": python, "torch": torch}


def outcome(report: Path) -> dict[str, Any]:
    """Return the numbers of tests of a report in JUnit's format, and the names of those that failed."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    kinds = {id(case): {child.tag for child in case} for case in cases}
    failed = [case for case in cases if kinds[id(case)] & {"failure", "error"}]
    skipped = sum("skipped" in kinds[id(case)] for case in cases)
    names = sorted({f"{case.get('classname')}::{case.get('name')}" for case in failed})
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": len(failed), "names": names}


def page(records: Iterable[dict[str, Any]], tests: Sequence[str]) -> str:
    """Return the page of results, with a row for each cell."""
    known = {record["cell"]: record for record in records}
    where = f"{os.cpu_count()} cores, {platform.machine()}, {datetime.now(UTC):%Y-%m-%d}"
    lines = [
        "# Versions of Python and torch",
        "",
        f"`make test-versions` writes this page ({where}). Tests: "
        f"{', '.join(f'`{test}`' for test in tests)}, without those marked as long.",
        "",
        "| Python | torch | passed | skipped | failed | minutes |",
        "|---|---|---|---|---|---|",
        *(_row(cell, known.get(str(cell))) for cell in CELLS),
    ]
    failures = [(name, record["cell"]) for record in known.values() for name in record.get("names", ())]
    lines += ["", *(f"- failed on {cell}: `{name}`" for name, cell in failures)] if failures else []
    return "\n".join(lines) + "\n"


def _row(cell: Cell, record: dict[str, Any] | None) -> str:
    if record is None:
        why = "not run" if find_python(cell.python) else "not run: this Python is not installed"
        return f"| {cell.python} | {cell.torch} | {why} | | | |"
    numbers = f"{record['passed']:,} | {record['skipped']:,} | {record['failed']:,} | {record['minutes']:.1f}"
    return f"| {record['python']} | {record['torch']} | {numbers} |"


if __name__ == "__main__":
    main()
