"""Progress bars on standard error, for people; silent for everybody else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """One bar per loop, gone when the loop is over; none unless asked for, and where nobody can see them."""

    show: bool = False

    def track(self, items: Sequence[T], what: str) -> Iterable[T]:
        """Return the same items, shown as a bar called `what`."""
        if not (self.show and sys.stderr.isatty()):
            return items
        from rich.console import Console
        from rich.progress import track

        return track(items, description=f"{what:<26}", console=Console(stderr=True), transient=True)
