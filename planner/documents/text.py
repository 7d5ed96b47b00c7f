"""Texts for people: numbers and texts from documents written out, rates and times parsed. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from runtime.errors import InputError

if TYPE_CHECKING:
    from planner.documents.profile import Contention

_NUMBER = r"\s*(\d{1,12}(?:\.\d{1,12})?)\s*"
_RATE_UNIT = r"([kmgt])(?:(bit|byte)s?(?:/s|ps)?|(b)(e|ps|/s)?)\s*"
_RATE = re.compile(_NUMBER + _RATE_UNIT, re.ASCII | re.IGNORECASE)
_RATE_AT_END = re.compile(r"(\d)\s*" + _RATE_UNIT + "$", re.ASCII | re.IGNORECASE)
_TIME = re.compile(_NUMBER + r"(ns|us|µs|ms|s)\s*", re.IGNORECASE)
_PREFIX = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIMES_US = {"ns": 1e-3, "us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}
SLOWEST, FASTEST = 1e3, 1e15
"""Bytes per second that a link may have."""
LONGEST_US = 1e9


def pluralize(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_significant(value: float) -> str:
    """Format with three significant digits; more if the number has more before its point."""
    return f"{value:,.0f}" if 999.5 <= value < 1e15 else f"{value:,.3g}"


def first_part(text: str) -> str:
    """Return the first of several parts: a cluster's name, nodes and ranks; what was profiled; how costs were found."""
    return text.partition("; ")[0]


def first_part_with_source(text: str) -> str:
    """Return the first part, and its source."""
    first, *others = text.split("; ")
    return "; ".join([first, *(part for part in others if part.startswith("source: "))])


BOTH_BUSY = "while both are busy"
"""Words before `describe_contention` in a plan's sources, by which its reports know of contention."""


def describe_contention(factors: Contention) -> str:
    """Contention factors in words: from the largest message that was measured to the smallest."""
    network = f"{factors.network:.3g}"
    if factors.by_size is not None:
        sizes = sorted(factors.by_size)
        network = f"{sizes[-1][2]:.3g} (large messages) to {sizes[0][2]:.3g} (small ones)"
    return f"compute takes {factors.compute:.3g} × and the network {network} × as long"


def as_names(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names that a caller gave: several, or one as a string."""
    return (given,) if isinstance(given, str) else tuple(given)


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
"""Most characters that are shown of a name and of a sentence."""


def sanitize(text: str, characters: int = NAME_CHARACTERS) -> str:
    """Return a text from a document for the terminal: control characters written out, a long one cut short."""
    if len(text) > characters:
        text = text[:characters] + "…"
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def ms(time_us: float) -> str:
    """Format with three significant digits and the unit."""
    return f"{format_significant(time_us / 1000)} ms"


def mib(size_bytes: int) -> str:
    """Format with three significant digits and the unit."""
    return f"{format_significant(size_bytes / 2**20)} MiB"


def parse_bandwidth(text: object, where: str) -> float:
    """Return the bytes per second that a text such as `400gbit`, `100Gbps`, `10GbE`, `50gbyte` or `25 GB/s` stands for.

    Raises InputError: anything else, `400gb` too, which some read as bits and some as bytes; starts with `where`.
    """
    match = _RATE.fullmatch(text) if isinstance(text, str) else None
    rate, expected = 0.0, "in kbit, mbit, gbit, tbit, or in kbyte, mbyte, gbyte, tbyte, such as"
    if match is not None:
        unit, sure = _rate_unit(*match.groups()[1:])
        rate = float(match[1]) * _PREFIX[match[2].lower()] / (8 if unit == "bit" else 1)
        if not sure:
            rate, expected = 0.0, "in bits or in bytes, for it is read as both:"
    if not SLOWEST <= rate <= FASTEST:
        raise InputError(
            f"{where}: found {repr(text)[:60]}, expected a rate per second {expected} "
            f'"400gbit" (also 400Gbps, 400GbE) or "50gbyte" (also 50GB/s); write it so'
        )
    return rate


def _rate_unit(prefix: str, word: str | None, letter: str | None, rest: str | None) -> tuple[str, bool]:
    """`bit` or `byte`, and whether everybody reads it so."""
    if word is not None:
        return word.lower(), True
    rest = rest or ""
    if rest.lower() == "e":  # Ethernet
        return "bit", True
    if letter == "b":
        return "bit", rest.lower() == "ps" or (rest != "" and prefix.isupper())
    return "byte", rest in ("ps", "/s", "/S")


def spell_rate(text: str) -> str:
    """Return an option with a rate at its end, such as `8x100gb`, with `b` written out as bits and `B` as bytes."""
    match = _RATE_AT_END.search(text)
    if match is None or _rate_unit(*match.groups()[1:])[1]:
        return text
    return f"{text[: match.end(1)]}{match[2].lower()}{_rate_unit(*match.groups()[1:])[0]}"


def parse_latency_us(text: object, where: str) -> float:
    """Return the microseconds that a text such as `3us`, `900ns` or `0.5ms` stands for; InputError as above."""
    match = _TIME.fullmatch(text) if isinstance(text, str) else None
    time_us = float(match[1]) * _TIMES_US[match[2].lower()] if match is not None else -1.0
    if not 0.0 <= time_us <= LONGEST_US:
        shown = repr(text)[:60]
        raise InputError(f'{where}: found {shown}, expected a time in ns, us or ms, such as "3us"; write it so')
    return time_us


def us_per_byte(bytes_per_s: float) -> float:
    """Return β of a link from its rate."""
    return 1e6 / bytes_per_s
