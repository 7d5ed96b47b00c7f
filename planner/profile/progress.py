"""Progress bars on standard error, for people; silent for everybody else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """Shows how far a loop has got."""

    def track(self, items: Sequence[T], what: str) -> Iterable[T]:
        """The same items, shown as a bar called `what`."""
        ...


class Silent:
    """Shows nothing."""

    def track(self, items: Sequence[T], what: str) -> Iterable[T]:
        """The same items."""
        return items


class Bars:
    """One bar per loop, on standard error, gone when the loop is over."""

    def track(self, items: Sequence[T], what: str) -> Iterator[T]:
        """The same items."""
        from rich.console import Console
        from rich.progress import track

        yield from track(items, description=f"{what:<26}", console=Console(stderr=True), transient=True)


def make_progress(*, show: bool) -> Progress:
    """Bars where they were asked for and somebody can see them."""
    return Bars() if show and sys.stderr.isatty() else Silent()
