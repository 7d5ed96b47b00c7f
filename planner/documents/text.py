"""How numbers, and texts from documents, are written for people."""

from __future__ import annotations

from planner.documents.profile import Contention


def pluralize(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_significant(value: float) -> str:
    """Three significant digits; more where the number has more before its point."""
    return f"{value:,.0f}" if 999.5 <= value < 1e15 else f"{value:,.3g}"


def first_part(text: str) -> str:
    """The first of several parts: a cluster's name, nodes and ranks; what was profiled; how costs were found."""
    return text.partition("; ")[0]


def first_part_with_source(text: str) -> str:
    """The first part, and where it is from."""
    first, *others = text.split("; ")
    return "; ".join([first, *(part for part in others if part.startswith("source: "))])


def describe_contention(factors: Contention) -> str:
    """Contention factors in words: from the largest message that was measured to the smallest."""
    network = f"{factors.network:.3g}"
    if factors.by_size is not None:
        sizes = sorted(factors.by_size)
        network = f"{sizes[-1][2]:.3g} (large messages) to {sizes[0][2]:.3g} (small ones)"
    return f"compute takes {factors.compute:.3g} × and the network {network} × as long"


def milliseconds(time_us: float | None) -> str:
    """Four significant digits, in ms; more where the number has more before its point."""
    if time_us is None:
        return ""
    return f"{time_us / 1000:,.0f}" if 1e7 <= time_us < 1e15 else f"{time_us / 1000:,.4g}"


def mebibytes(size_bytes: int | None) -> str:
    """Bytes as people read them."""
    if size_bytes is None:
        return ""
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:,.1f} {unit}"
    return f"{size_bytes} B"


NAME_CHARACTERS, SENTENCE_CHARACTERS = 120, 2000
"""How much is shown of a name and of a sentence."""


def sanitize(text: str, characters: int = NAME_CHARACTERS) -> str:
    """A text from a document for the terminal: control characters written out, a long one cut short."""
    if len(text) > characters:
        text = text[:characters] + "…"
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def ms(time_us: float) -> str:
    """Three significant digits, with the unit."""
    return f"{format_significant(time_us / 1000)} ms"


def mib(size_bytes: int) -> str:
    """Three significant digits, with the unit."""
    return f"{format_significant(size_bytes / 2**20)} MiB"
