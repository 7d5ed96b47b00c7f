"""Tables of texts, for the terminal and for pages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from planner.documents.text import milliseconds
from runtime.plan import Plan
from runtime.plan.measured import MeasuredStep
from runtime.plan.predicted import Prediction

PIPE_COLUMNS = 100
"""Width in characters of tables in a pipe or a file."""
MIN_WORDS, MAX_WORD = 16, 24
"""Width in characters to which a column of words may be narrowed; words of up to the second width are not broken."""


@dataclass(frozen=True)
class Listing:
    """A table of texts."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[str] = ()
    """Columns of words, which are aligned to the left; others hold numbers."""
    caption: str = ""
    label: str = ""
    """Column that names a row; default: the first one."""
    details: str = ""
    """Column of sentences, which become lines below the table if the output is too narrow for it."""

    @property
    def label_index(self) -> int:
        """Index of the column that names a row."""
        return self.columns.index(self.label or self.columns[0])

    def joined(self) -> Listing:
        """Return the table with one row for rows that differ in their label alone."""
        at = self.label_index
        labels: dict[tuple[str, ...], list[str]] = {}
        for row in self.rows:
            labels.setdefault((*row[:at], *row[at + 1 :]), []).append(row[at])
        rows = [(*rest[:at], " / ".join(dict.fromkeys(found)), *rest[at:]) for rest, found in labels.items()]
        return replace(self, rows=rows)

    def filled(self) -> Listing:
        """Return the table without columns that have no text in any row."""
        known = [at for at, (_, *cells) in enumerate(self._texts()) if any(cells)]
        columns, *rows = ([row[at] for at in known] for row in (self.columns, *self.rows))
        return replace(self, columns=columns, rows=rows)

    def fitted(self, width: int) -> tuple[Table | None, list[str]]:
        """Return the table as rich prints it in at most `width` characters, and the lines that follow it.

        If it is too wide, its details become lines, then headers and columns of words are wrapped; numbers never are.
        A table that is still too wide is None, and its rows are lines.
        """
        if self.natural_width <= width or not self.details:
            widths = self._widths(width)
            return (None, self._row_lines()) if widths is None else (self._table(widths), [])
        at = self.columns.index(self.details)
        columns, *rows = ((*row[:at], *row[at + 1 :]) for row in (self.columns, *self.rows))
        table, lines = replace(self, columns=columns, rows=rows, details="").fitted(width)
        return table, [*lines, *self._detail_lines(at)]

    @property
    def natural_width(self) -> int:
        """Width in characters of the table without wrapping."""
        return sum(self._cell_widths()) + self._frame

    @property
    def _frame(self) -> int:
        """Width in characters of lines and spaces around cells."""
        return 3 * len(self.columns) + 1

    def _cell_widths(self) -> list[int]:
        return [max(map(cell_len, texts)) for texts in self._texts()]

    def _texts(self) -> Iterable[list[str]]:
        """Yield the header and the cells of each column; rows may end early."""
        for at, name in enumerate(self.columns):
            yield [name, *(row[at] for row in self.rows if at < len(row))]

    def _widths(self, width: int) -> list[int] | None:
        """Return the width of each column's cells in a table of at most `width` characters; None: it does not fit."""
        widths = self._cell_widths()
        least: list[int] = []
        words: list[int] = []
        for at, (header, *cells) in enumerate(self._texts()):
            longest = max(map(cell_len, cells), default=0)
            if header in self.left:
                words.append(at)
                word = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
                longest = min(longest, max(MIN_WORDS, min(word, MAX_WORD)))
            least.append(max(longest, *map(cell_len, header.split() or [""])))
        numbers = [at for at in range(len(widths)) if at not in words]
        for columns in (numbers, words):
            while sum(widths) + self._frame > width and (wide := [at for at in columns if widths[at] > least[at]]):
                widths[max(wide, key=widths.__getitem__)] -= 1
        return widths if sum(widths) + self._frame <= width else None

    def _table(self, widths: Sequence[int]) -> Table:
        table = Table()
        for column, width in zip(self.columns, widths, strict=True):
            table.add_column(column, justify="left" if column in self.left else "right", width=width, overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def _row_lines(self) -> list[str]:
        """Return a line for each row: its label, and each other cell after its column's name."""
        label = self.label_index
        cells = [
            [f"{self.columns[at]} {cell}".strip() for at, cell in enumerate(row) if cell and at != label]
            for row in self.rows
        ]
        return [f"{row[label]}: {', '.join(of)}" for row, of in zip(self.rows, cells, strict=True)]

    def _detail_lines(self, column: int) -> list[str]:
        """Return a line for each text of a column, after the labels of its rows."""
        labels: dict[str, list[str]] = {}
        for row in self.rows:
            if column < len(row) and row[column]:
                labels.setdefault(row[column], []).append(row[self.label_index].removesuffix(" ←"))
        return [f"{_spans(found)}: {text}" for text, found in labels.items()]


def _spans(labels: Sequence[str]) -> str:
    """Join labels; three or more integers that follow one another are a span."""
    runs = groupby(enumerate(labels), lambda one: int(one[1]) - one[0] if one[1].isdecimal() else one[1])
    parts: list[str] = []
    for _, run in runs:
        found = [label for _, label in run]
        parts += [f"{found[0]}–{found[-1]}"] if len(found) > 2 else found
    return ", ".join(parts)


def make_console(*, colors: bool = True) -> Console:
    """Return a console that prints names as they are; in a pipe or a file tables fit 100 columns, and lines of text are
    not wrapped. Without `colors` text has no escape codes on a terminal, either.
    """
    piped = not Console().is_terminal
    return Console(
        width=PIPE_COLUMNS if piped else None, soft_wrap=piped, markup=False, emoji=False,
        color_system="auto" if colors else None,
    )  # fmt: skip


def print_tables(*tables: Listing, console: Console | None = None) -> None:
    """Print tables, with titles and captions as lines of their own: rich would wrap them to the table's width."""
    console = console or make_console()
    for listing in tables:
        table, lines = listing.joined().fitted(console.width)
        if listing.title:
            console.print(listing.title, style="table.title", highlight=False)
        if table is not None:
            console.print(table, soft_wrap=False)
        for line in lines:
            console.print(line, highlight=False)
        if listing.caption:
            console.print(listing.caption, style="table.caption", highlight=False)


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
