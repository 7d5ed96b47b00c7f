"""Writes docs/results/compatibility.md: the tests behind each sentence of the two pages on compatibility.

    python -m benchmarks.compatibility

A sentence names its tests in a comment after it: `<!-- tests: NAME; NAME -->`. A NAME is a parameter of
`test_interplay.py`, or `FILE::TEST` of tests/procs; `*` is any text.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from runtime.plan.files import write_text

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "procs"
PAGES = (ROOT / "docs" / "compatibility.md", ROOT / "docs" / "refused.md")
DOCUMENT = ROOT / "docs" / "results" / "compatibility.md"
INTERPLAY = {
    "2": re.compile(r"test_interplay\.py::test_two_ranks_as_with_ddp\[(.*)\]"),
    "3": re.compile(r"test_interplay\.py::test_three_ranks_as_with_ddp\[(.*)\]"),
}
"""Number of ranks → tests that take the name of a check."""
BULLET = re.compile(r"^- (.*?)(?=\n- |\n\n|\Z)", re.M | re.S)
COMMENT = re.compile(r"\s*<!-- tests: (.*?) -->", re.S)


class Statement(NamedTuple):
    """A sentence of a page, and the names of its tests."""

    page: Path
    section: str
    text: str
    names: tuple[str, ...]


def main() -> None:
    """Collect tests and write the page."""
    write_text(DOCUMENT, document(list(statements()), collect()))


def statements() -> Iterator[Statement]:
    """Yield the items of both pages' lists."""
    for page in PAGES:
        for section in page.read_text(encoding="utf-8").split("\n## ")[1:]:
            title, _, rest = section.partition("\n")
            for text in BULLET.findall(rest):
                names = [" ".join(name.split()) for found in COMMENT.findall(text) for name in found.split(";")]
                yield Statement(page, title, " ".join(COMMENT.sub("", text).split()), tuple(names))


def collect() -> set[str]:
    """Return every test of tests/procs in a file that a page names, as `FILE::TEST`."""
    names = {name.partition("::")[0] for one in statements() for name in one.names if "::" in name}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "test_interplay.py", *sorted(names)],
        cwd=TESTS, capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip
    return {line.rpartition("/")[2] for line in done.stdout.splitlines() if "::" in line}


def matching(name: str, collected: Iterable[str]) -> dict[str, list[str]]:
    """Return the tests that a name matches, in short, each with the numbers of ranks where the test's name has them."""
    wanted = re.compile(".*".join(map(re.escape, name.split("*"))))
    found: dict[str, list[str]] = {}
    for test in sorted(collected):
        if "::" in name and wanted.fullmatch(test):
            found[test] = []
        for ranks, pattern in INTERPLAY.items():
            if (match := pattern.fullmatch(test)) and wanted.fullmatch(match[1]):
                found.setdefault(match[1], []).append(ranks)
    return found


def document(every: Collection[Statement], collected: Collection[str]) -> str:
    """Return the page with one table for each section."""
    lines = [
        "# Tests behind the pages on compatibility",
        "",
        "`python -m benchmarks.compatibility` writes this page from [what works](../compatibility.md) and",
        "[what is refused](../refused.md). Tests are in `tests/procs`; those without a file are checks of",
        "`test_interplay.py`, with the numbers of ranks that train with DDP and with a plan.",
    ]
    section = None
    for one in every:
        if not one.names:
            continue
        if section != (section := (one.page, one.section)):
            lines += ["", f"## {'Refused: ' if one.page == PAGES[1] else ''}{one.section}", "", "| sentence | tests |"]
            lines += ["|---|---|"]
        tests = {test: ranks for name in one.names for test, ranks in matching(name, collected).items()}
        listed = [f"`{test}`" + (f" ({', '.join(sorted(ranks))})" if ranks else "") for test, ranks in tests.items()]
        text = re.sub(r"\]\((?!http)([^)]+)\)", r"](../\1)", one.text).replace("|", "\\|")
        lines.append(f"| {text} | {'<br>'.join(listed)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
