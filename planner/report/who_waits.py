"""Tables of ranks at the messages of a step, for the terminal and for pages: who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence

from planner.documents.text import milliseconds
from planner.report.frame import paragraphs, table
from planner.report.listing import Listing
from runtime.plan.last_ranks import MessageArrival, RankArrival

MAX_ROWS, MAX_RANKS = 500, 16
"""Largest number of rows, and of columns for ranks: those that others wait for longest."""


def arrival_tables(rows: Sequence[RankArrival], messages: Sequence[MessageArrival], of: str) -> list[Listing]:
    """Return the ranks that arrive last at a message, and when ranks arrive at each; nothing where none have compared.

    Args:
        rows: of all ranks.
        messages: with the arrivals of all ranks, in the order of `rows`.
        of: name of what is trained, for the titles.
    """
    if not rows:
        return []
    last = sorted((row for row in rows if row.last), key=lambda row: -row.others_waited_us)[:MAX_ROWS]
    ranks = [
        (str(row.rank), str(row.last), str(row.messages), milliseconds(row.others_waited_us), row.cause or "")
        for row in last
    ]
    late = {row.rank for row in last[:MAX_RANKS]}
    shown = [at for at, row in enumerate(rows) if row.rank in late or at < MAX_RANKS - len(late)]
    columns = ("bucket", *(f"rank {rows[at].rank} (ms)" for at in shown), "last rank", "waiting (ms)")
    arrivals = [
        (
            str(one.message), *(milliseconds(one.late_us[at]) for at in shown), str(rows[one.last_rank].rank),
            milliseconds(one.waited_us),
        )
        for one in messages[:MAX_ROWS]
    ]  # fmt: skip
    found = [
        Listing(
            f"{of}: ranks that arrive last at its messages",
            ("rank", "last at", "of messages", "the others wait (ms)", "late by"), ranks, left=("late by",),
        ),
        Listing(f"{of}: arrival of each rank at each message behind the first one", columns, arrivals),
    ]  # fmt: skip
    return [one for one in found if one.rows]


def arrival_section(tables: Sequence[Listing]) -> dict[str, str]:
    """Return the section of a page with these tables, each below its title, by its heading; empty without any."""
    text = "\n".join(f"{paragraphs([one.title])}\n{table(one)}" for one in tables)
    return {"Who waits for whom": text} if tables else {}
