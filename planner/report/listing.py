"""Tables of texts, for the terminal and for pages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from planner.documents.text import milliseconds
from runtime.plan import Plan
from runtime.plan.measured import MeasuredStep
from runtime.plan.predicted import Prediction

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


def step_rows(plan: Plan, name: str, count: int, measured: MeasuredStep | None = None) -> list[tuple[str, ...]]:
    """Return a row for the plan, a step measured with it, and its baselines from fast to slow.

    Args:
        plan: the plan.
        name: what the plan is called.
        count: its number of messages.
        measured: a step of it.
    """
    planned, baselines = plan.predicted, sorted((plan.baselines or {}).items(), key=lambda item: item[1].iteration_us)
    rows: list[tuple[str, int | None, Prediction | MeasuredStep]] = [(name, count, planned)] if planned else []
    rows += [("plan, measured", count, measured)] if measured else []
    rows += [(other, prediction.buckets, prediction) for other, prediction in baselines]
    base_us = planned.iteration_us if planned else 0.0
    return [
        (
            called,
            "" if buckets is None else str(buckets),
            milliseconds(step.iteration_us),
            milliseconds(step.exposed_us),
            f"{step.iteration_us / base_us:.3f}" if base_us > 0.0 else "",
        )
        for called, buckets, step in rows
    ]
