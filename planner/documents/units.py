"""Rates and times as people write them: `400gbit`, `50gbyte`, `3us`. Torch-free."""

from __future__ import annotations

import re

from runtime.errors import InputError

_NUMBER = r"\s*(\d{1,12}(?:\.\d{1,12})?)\s*"
_RATE = re.compile(_NUMBER + r"([kmgt])(bit|bits|byte|bytes)(?:/s|ps)?\s*", re.ASCII | re.IGNORECASE)
_TIME = re.compile(_NUMBER + r"(ns|us|µs|ms|s)\s*", re.IGNORECASE)
_PREFIX = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIMES_US = {"ns": 1e-3, "us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}
SLOWEST, FASTEST = 1e3, 1e15
"""Bytes per second that a link may have."""
LONGEST_US = 1e9


def parse_bandwidth(text: object, where: str) -> float:
    """Return the bytes per second that a text such as `400gbit`, `50gbyte` or `25 Gbit/s` stands for.

    Raises InputError: anything else, `400gb` too, which some read as bits and some as bytes; starts with `where`.
    """
    match = _RATE.fullmatch(text) if isinstance(text, str) else None
    rate = 0.0
    if match is not None:
        rate = float(match[1]) * _PREFIX[match[2].lower()] / (8 if match[3].lower().startswith("bit") else 1)
    if not SLOWEST <= rate <= FASTEST:
        raise InputError(
            f"{where}: found {repr(text)[:60]}, expected a rate per second in kbit, mbit, gbit, tbit, or in kbyte, "
            f'mbyte, gbyte, tbyte, such as "400gbit" or "50gbyte"; write it so'
        )
    return rate


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
