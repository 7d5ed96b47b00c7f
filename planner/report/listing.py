"""Tables of texts, for the terminal and for pages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

UNWRAPPED = 100_000
"""Width in characters of output into a pipe or a file: more than any table or line has."""


@dataclass(frozen=True)
class Listing:
    """A table of texts."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[str] = ()
    """Columns of words, which are aligned to the left; others hold numbers."""
    caption: str = ""

    def __rich__(self) -> Table:
        """Return the table as rich prints it."""
        table = Table(title=self.title, title_justify="left", caption=self.caption, caption_justify="left")
        for column in self.columns:
            table.add_column(column, justify="left" if column in self.left else "right")
        for row in self.rows:
            table.add_row(*row)
        return table


def make_console() -> Console:
    """Return a console that prints names as they are; into a pipe or a file nothing is wrapped or cut off."""
    width = None if Console().is_terminal else UNWRAPPED
    return Console(width=width, markup=False, emoji=False)


def print_tables(*tables: Listing, console: Console | None = None) -> None:
    """Print tables, with titles and captions as lines of their own: rich would wrap them to the table's width."""
    console = console or make_console()
    for listing in tables:
        table = listing.__rich__()
        table.title = table.caption = None
        for part, style in ((listing.title, "table.title"), (table, None), (listing.caption, "table.caption")):
            if part != "":
                console.print(part, style=style, highlight=False)
