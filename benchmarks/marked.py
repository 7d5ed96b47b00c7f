"""Documents of which a benchmark writes the parts between marks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
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


def publish(document: Path | None, parts: Mapping[str, str]) -> None:
    """Print the text of each part, and write it into a document, if one is given."""
    for part, found in parts.items():
        print(found, "\n", flush=True)
        if document is not None:
            write_part(document, part, found)


def parser_of(text: str | None, document: Path, results: Path | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options of `tabulate`.

    Args:
        text: docstring of the benchmark, which its first line describes.
        document: what `--write` changes.
        results: default of `--results`.
    """
    parser = argparse.ArgumentParser(description=str(text).partition("\n")[0])
    parser.add_argument("--results", type=Path, default=results, help="JSON lines: not measured again")
    parser.add_argument("--only", default="", help="a part of the names of what may be measured now")
    parser.add_argument("--write", action="store_true", help=f"put what is known into {document}")
    return parser


def tabulate(
    document: Path,
    parts: Mapping[str, tuple[Mapping[str, Callable[[], dict[str, Any]]], Callable[[Any], Iterable[str]]]],
    options: argparse.Namespace,
) -> int:
    """Measure what is missing of each part, print its table, write it where asked to; return the exit code: 3 where
    nothing is known, 0 even where a limit is passed, for the document says so.

    Args:
        document: has a part for each table.
        parts: by name what measures each row, and what makes the lines of the table from all rows.
        options: those of `parser_of`.
    """
    found = False
    for part, (wanted, tabulated) in parts.items():
        if rows := kept(options.results, wanted, options.only):
            found = True
            publish(document if options.write else None, {part: "\n".join(tabulated(rows))})
    return 0 if found else 3
