"""The error of a sample that no cache can hold."""

from __future__ import annotations

from typing import Any


class Unstorable(Exception):
    """A sample holds something that cannot be stored; the text says where and of which type."""

    sample: Any = None
