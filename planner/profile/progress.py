"""Progress on standard error: bars on a terminal, occasional lines into a pipe or a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

EVERY_S = 15.0
"""Least seconds between two lines: short commands have none, and logs of long ones stay short."""


@dataclass
class Progress:
    """Shows one bar per loop, gone when it is over, or lines if standard error is no terminal; nothing by default."""

    show: bool = False
    _said_s: float = field(default_factory=lambda: time.monotonic())

    def track(self, items: Sequence[T], what: str) -> Iterable[T]:
        """Return the same items, shown as a bar called `what`."""
        if not self.show:
            return items
        if not sys.stderr.isatty():
            return self._said(items, what)
        from rich.console import Console
        from rich.progress import track

        return track(items, description=f"{what:<26}", console=Console(stderr=True), transient=True)

    def say(self, text: str) -> None:
        """Write a line if there are no bars, unless there was one just now; for parts of what a bar counts."""
        if self.show and time.monotonic() - self._said_s >= EVERY_S and not sys.stderr.isatty():
            self._said_s = time.monotonic()
            print(f"planner: {text}", file=sys.stderr, flush=True)

    def _said(self, items: Sequence[T], what: str) -> Iterator[T]:
        for number, item in enumerate(items):
            self.say(f"{what}, {number} of {len(items)} done")
            yield item
