"""docs/compatibility.md: every row names its test, every test it names exists, and it leaves out no interplay test."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "docs" / "compatibility.md"
COLUMNS = ["with a plan", "against DDP", "ranks", "test", "notes"]
INTERPLAY = "test_interplay.py::test_{}_ranks_as_with_ddp"


def rows() -> list[list[str]]:
    """The cells of every row of every table but the heads."""
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]
    return [row for row in cells if row[1:] != COLUMNS and not set("".join(row)) <= set("- ")]


def named(row: list[str]) -> Iterator[str]:
    """The tests that a row names, in full; a name in brackets alone stands for one or two."""
    for name in re.findall(r"`(\[[^`]+\]|test_\w+\.py::[^`]+)`", f"{row[4]} {row[5]}"):
        if name.startswith("test_"):
            yield name
            continue
        for ranks in row[3].split(", "):
            yield INTERPLAY.format({"2": "two", "3": "three"}[ranks]) + name


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """Every test in this folder's files that the table names."""
    files = sorted({test.partition("::")[0] for row in rows() for test in named(row)})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *files],
        cwd=HERE, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return {line.rpartition("/")[2] for line in done.stdout.splitlines() if "::" in line}


def test_the_tables_are_read_whole() -> None:
    assert len(rows()) > 60
    assert all(len(row) == 6 for row in rows()), [row for row in rows() if len(row) != 6]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_every_row_names_a_test_that_exists(row: list[str], collected: set[str]) -> None:
    assert "`" in row[4]
    assert set(named(row))
    assert set(named(row)) <= collected


def test_every_interplay_test_is_in_the_table(collected: set[str]) -> None:
    ours = {test for test in collected if test.startswith("test_interplay.py")}
    assert ours == {test for row in rows() for test in named(row) if test.startswith("test_interplay.py")}
