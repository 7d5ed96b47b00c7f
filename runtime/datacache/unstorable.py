"""The error of a sample that no cache can hold."""

from __future__ import annotations

from typing import Any


class Unstorable(Exception):
    """A sample that no cache can hold; the text says which part of it, and of which type that is."""

    sample: Any = None
