"""`PLANNER_DEBUG`: which events both packages log, read once when the first of them is about to happen. Torch-free.

The words are listed in `EVENTS`. Without the variable nothing is logged, and nothing is added to a step.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from functools import lru_cache

from runtime.errors import InputError

VARIABLE = "PLANNER_DEBUG"

EVENTS: Mapping[str, str] = {
    "schedule": "the schedule after each pass, with the time that the pass took",
    "launch": "each message as it is launched: rank, bucket, transport, bytes and time",
    "wait": "each message as it has been waited for: rank, bucket, and its time since the launch",
}
"""Word of the variable → what it logs."""

PACKAGES = ("planner", "runtime")
"""Packages, and the names of their loggers."""


def parse_events(text: str) -> frozenset[str]:
    """Return the words of a text such as `launch,wait`. Raises InputError: one is unknown (lists the known ones)."""
    words = frozenset(word.strip() for word in text.split(",") if word.strip())
    if unknown := sorted(words - EVENTS.keys()):
        raise InputError(
            f"{VARIABLE}: found {', '.join(unknown)}, expected words among {', '.join(EVENTS)}, separated by commas; "
            f"correct it, or unset it"
        )
    return words


@lru_cache(maxsize=1)
def asked_events() -> frozenset[str]:
    """Return the events that the environment asks for, and let their loggers be heard on standard error unless the
    script has configured `logging`. Raises InputError as `parse_events` does.
    """
    words = parse_events(os.environ.get(VARIABLE, ""))
    for logger in map(logging.getLogger, PACKAGES if words else ()):
        logger.setLevel(logging.DEBUG)
        if not logger.hasHandlers():
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            logger.addHandler(handler)
    return words
