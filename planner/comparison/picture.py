"""A comparison as one self-contained page: verdicts, a table, and each contestant's step, measured and predicted."""

from __future__ import annotations

from html import escape
from typing import Any

from planner.comparison.contestants import BARE, BEST_DDP
from planner.comparison.report import Comparison, Row, failures
from planner.emit.text import milliseconds
from planner.report.frame import figure, frame_text, paragraphs, table

ROW_PX, AROUND_PX = 40, 110
LABEL_CHARACTER_PX = 7
COLUMNS = ("", "step (ms)", "95 % interval (ms)", "exposed (ms)", "hidden", "predicted (ms)", "error", "buckets")


def picture_text(comparison: Comparison, title: str, measured: str) -> str:
    """The page.

    Args:
        comparison: what is shown.
        title: what was compared where.
        measured: when, in UTC.

    Raises:
        EnvironmentFailure: plotly is not installed.
    """
    cause = [] if comparison.cause is None else [f"{comparison.cause[:1].upper()}{comparison.cause[1:]}."]
    told = [f"{line[:1].upper()}{line[1:]}." for line in (*comparison.differences, *comparison.verdicts)]
    figures = {"steps": _figure([row for row in comparison.rows if row.ci95_us is not None and row.equal_to is None])}
    words = ["A filled circle is the median step with its 95 % interval, an open diamond what was predicted."]
    where = f"{comparison.steps} steps each on {comparison.ranks} ranks, in {comparison.rounds} rounds by turns"
    drawn = figure("steps", figures, "Step of each way to train", words, f"{title}, {where}, measured {measured}.")
    body = [
        paragraphs([*cause, *told]),
        table("Ways to train, measured by turns", COLUMNS, [_cells(row) for row in comparison.rows], texts=(0,)),
        paragraphs(failures(comparison)),
        f"<section>\n<h2>Measured and predicted</h2>\n{drawn}\n</section>",
    ]
    sources = {
        "measured": f"{measured}: {where}, each block from the same weights, batches and random states",
        "predicted": "the plan's prediction, or one made from the profile; from no communication: compute alone",
        "units": "ms are milliseconds",
    }
    return frame_text(f"{title}: measured by turns", "\n".join(body), sources, figures)


def _cells(row: Row) -> tuple[str, ...]:
    if row.equal_to is not None:
        return (BEST_DDP, f"equal to {row.equal_to}", *[""] * 6)
    if row.ci95_us is None:
        return (escape(row.name), "does not work here", *[""] * 6)
    low, high = map(milliseconds, row.ci95_us)
    return (
        escape(row.name),
        milliseconds(row.median_us),
        f"{low} to {high}",
        "" if row.name == BARE else milliseconds(row.exposed_us),
        "" if row.hidden_share is None or row.name == BARE else f"{row.hidden_share:.0%}",
        milliseconds(row.predicted_us),
        "" if row.error is None else f"{row.error:+.1%}",
        "" if row.buckets is None else str(row.buckets),
    )


def _figure(rows: list[Row]) -> dict[str, Any]:
    """In plotly's terms; the page gives the colours."""
    widest = max(len(row.name) for row in rows)
    return {
        "data": [_measured(rows), _predicted([row for row in rows if row.predicted_us is not None])],
        "layout": {
            "height": AROUND_PX + ROW_PX * len(rows),
            "margin": {"l": 20 + LABEL_CHARACTER_PX * widest, "r": 20, "t": 40, "b": 50},
            "xaxis": {"title": {"text": "step (ms)"}, "rangemode": "tozero"},
            "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": [r.name for r in rows][::-1]},
            "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"},
        },
    }


def _measured(rows: list[Row]) -> dict[str, Any]:
    values = [(row.name, row.median_us, row.ci95_us) for row in rows if row.median_us is not None and row.ci95_us]
    return {
        "type": "scatter",
        "name": "measured",
        "mode": "markers",
        "meta": {"role": "line0"},
        "y": [name for name, _, _ in values],
        "x": [median / 1e3 for _, median, _ in values],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [(high - median) / 1e3 for _, median, (_, high) in values],
            "arrayminus": [(median - low) / 1e3 for _, median, (low, _) in values],
        },
        "line": {},
        "marker": {"size": 11},
        "hovertemplate": "%{y}: %{x:.2f} ms measured<extra></extra>",
    }


def _predicted(rows: list[Row]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": "predicted",
        "mode": "markers",
        "meta": {"role": "line1"},
        "y": [row.name for row in rows],
        "x": [(row.predicted_us or 0.0) / 1e3 for row in rows],
        "line": {},
        "marker": {"size": 11, "symbol": "diamond-open", "line": {"width": 2}},
        "hovertemplate": "%{y}: %{x:.2f} ms predicted<extra></extra>",
    }
