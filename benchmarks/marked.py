"""Documents of which a benchmark writes the parts between marks."""

from __future__ import annotations


def marks(part: str) -> tuple[str, str]:
    """What stands before and behind a part."""
    return f"<!-- {part}: begin -->", f"<!-- {part}: end -->"


def replace_part(text: str, part: str, found: str) -> str:
    """The document with another text in one part."""
    begin, end = marks(part)
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n\n{found}\n\n{end}{tail}"
