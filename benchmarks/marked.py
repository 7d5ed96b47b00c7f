"""Documents of which a benchmark writes the parts between marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.resumable import kept


def marks(part: str) -> tuple[str, str]:
    """What stands before and behind a part."""
    return f"<!-- {part}: begin -->", f"<!-- {part}: end -->"


def replace_part(text: str, part: str, found: str) -> str:
    """The document with another text in one part."""
    begin, end = marks(part)
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n\n{found}\n\n{end}{tail}"


def write_part(document: Path, part: str, found: str) -> None:
    """Replace one part of a document on disk."""
    document.write_text(replace_part(document.read_text(encoding="utf-8"), part, found), encoding="utf-8")


def tabulate(
    document: Path,
    parts: Mapping[str, tuple[Mapping[str, Callable[[], dict[str, Any]]], Callable[[Any], Sequence[str]]]],
    results: Path, only: str, *, write: bool,
) -> int:  # fmt: skip
    """Measure what is missing of each part, print its table, write it where asked to; return the exit code: 3 where
    nothing is known, 0 even where a limit is passed, for the document says so.

    Args:
        document: has a part for each table.
        parts: by name what measures each row, and what makes the lines of the table from all rows.
        results: JSON lines: not measured again.
        only: a part of the names of those that may be measured now.
        write: whether the document is written.
    """
    found = False
    for part, (wanted, tabulated) in parts.items():
        if rows := kept(results, wanted, only):
            found, text = True, "\n".join(tabulated(rows))
            print(text)
            if write:
                write_part(document, part, text)
    return 0 if found else 3
