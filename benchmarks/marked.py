"""Documents of which a benchmark writes the parts between marks."""

from __future__ import annotations

from pathlib import Path


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
