"""A comparison as one self-contained page: verdicts, a table, and each variant's step, measured and predicted, or its
loss."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from planner.comparison.learned import Learned
from planner.comparison.report import AnyRow, Comparison, arrival_listings, failures
from planner.comparison.variants import DDP_AGAIN, PLAN
from planner.report.figures import LEGEND_BELOW, curve
from planner.report.frame import figure, frame_text, paragraphs, table
from planner.report.listing import Listing
from planner.report.who_waits import arrival_section

ROW_PX, AROUND_PX = 40, 110
LABEL_CHARACTER_PX = 7


def picture_text(comparison: Comparison, title: str, measured: str) -> str:
    """Return the page; its title says what was compared where, `measured` when, in UTC.

    Raises EnvironmentFailure where plotly is not installed.
    """
    cause = [] if comparison.cause is None else [f"{comparison.cause[:1].upper()}{comparison.cause[1:]}."]
    told = [f"{line[:1].upper()}{line[1:]}." for line in (*comparison.differences, *comparison.verdicts)]
    figures = {"steps": _figure([row for row in comparison.rows if row.ci95_us is not None and row.equal_to is None])}
    words = ["A filled circle is the median step with its 95 % interval, an open diamond what was predicted."]
    columns, where = comparison.rows[0].COLUMNS, comparison.heading
    drawn = figure("steps", figures, "Step of each way to train", words, f"{title}, {where}, measured {measured}.")
    cells = [[row.cells().get(column, "") for column in columns] for row in comparison.rows]
    sections = {"Measured and predicted": drawn, **arrival_section(arrival_listings(comparison))}
    body = [
        paragraphs([*cause, *told]),
        table(Listing("Ways to train, measured in interleaved blocks", columns, cells, columns[:1])),
        paragraphs(failures(comparison)),
        *(f"<section>\n<h2>{heading}</h2>\n{text}\n</section>" for heading, text in sections.items()),
    ]
    sources = {
        "measured": f"{measured}: {where}, each block from the same weights, batches and random states",
        "predicted": "the plan's prediction, or one made from the profile; from no communication: compute alone",
        "units": "ms are milliseconds",
    }
    return frame_text(f"{title}: measured in interleaved blocks", "\n".join(body), sources, figures)


def curves_text(learned: Learned, title: str, measured: str) -> str:
    """Return the page of losses: verdicts, a table, and a curve of each contestant; arguments as of `picture_text`."""
    row, where = learned.rows[0], learned.heading
    cells = [[one.cells().get(column, "") for column in row.COLUMNS] for one in learned.rows]
    figures = {"losses": _curves(learned)}
    words = ["Lines are means over ranks and seeds; hover labels have the lowest and the highest seed."]
    drawn = figure("losses", figures, "Loss of each way to train", words, f"{title}, {where}, measured {measured}.")
    names = tuple(one.name for one in learned.rows if one.name != PLAN)
    told = (line if line.startswith(names) else line[:1].upper() + line[1:] for line in learned.verdicts)
    body = [
        paragraphs(f"{line}." for line in (*told, *learned.closing)),
        table(Listing("What each way to train learnt", row.COLUMNS, cells, row.LEFT).filled()),
        f"<section>\n<h2>Loss over steps</h2>\n{drawn}\n</section>",
    ]
    sources = {
        "last loss": "mean over the last tenth of the steps, all ranks and seeds",
        "end loss": "of the last step, mean over ranks and seeds",
        "against DDP": "mean over seeds of the difference of the last loss from DDP's of the same seed, with its 95 % "
        "interval by Student's t",
        "DDP's own spread": "largest such difference of DDP with sums rounded as in another order",
        "steps to DDP's loss": "until the mean of a twentieth of the steps is as low as DDP's at 90 % of the steps",
        "time to it": "these steps times the step, as a share of DDP's; exact first steps are as long as DDP's",
        "metric against DDP": "mean over seeds of the difference after the last step, with its interval; verdicts "
        "are by it where DDP's own spread of the loss is above the margin",
    }
    return frame_text(f"{title}: what is learnt", "\n".join(body), sources, figures)


def _curves(learned: Learned) -> dict[str, Any]:
    lines = []
    for number, (name, one) in enumerate(learned.curves.items()):
        known = [
            (step, mean, f"{escape(name)}, step {step:.0f}: {mean:.4f} ({low:.4f} to {high:.4f})")
            for step, mean, low, high in zip(one.steps, one.mean, one.low, one.high, strict=True)
            if mean is not None and low is not None and high is not None
        ]
        if known:
            dash = {"dash": "dot"} if name == DDP_AGAIN else {}
            lines.append({**curve(number, name, known, {"size": 4}, {"width": 2, **dash}), "mode": "lines"})
    layout = {
        "height": 450,
        "margin": {"l": 76, "r": 16, "t": 40, "b": 92},
        "hovermode": "closest",
        "xaxis": {"title": {"text": "step"}, "rangemode": "tozero", "zeroline": False},
        "yaxis": {"title": {"text": "loss"}, "zeroline": False},
        "legend": LEGEND_BELOW,
    }
    return {"data": lines, "layout": layout}


def _figure(rows: list[AnyRow]) -> dict[str, Any]:
    """Return it in plotly's terms; the page gives the colours."""
    values = [(row.name, row.median_us, *row.ci95_us) for row in rows if row.median_us is not None and row.ci95_us]
    error = {
        "type": "data",
        "symmetric": False,
        "array": [(high - median) / 1e3 for _, median, _, high in values],
        "arrayminus": [(median - low) / 1e3 for _, median, low, _ in values],
    }
    expected = [(row.name, row.predicted_us) for row in rows if row.predicted_us is not None]
    diamond = {"size": 11, "symbol": "diamond-open", "line": {"width": 2}}
    return {
        "data": [
            _points("line0", "measured", [value[:2] for value in values], {"size": 11}) | {"error_x": error},
            _points("line1", "predicted", expected, diamond),
        ],
        "layout": {
            "height": AROUND_PX + ROW_PX * len(rows),
            "margin": {"l": 20 + LABEL_CHARACTER_PX * max(len(row.name) for row in rows), "r": 20, "t": 40, "b": 50},
            "xaxis": {"title": {"text": "step (ms)"}, "rangemode": "tozero"},
            "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": [r.name for r in rows][::-1]},
            "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"},
        },
    }


def _points(role: str, name: str, times_us: Sequence[tuple[str, float]], marker: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": name,
        "mode": "markers",
        "meta": {"role": role},
        "line": {},
        "hovertemplate": f"%{{y}}: %{{x:.2f}} ms {name}<extra></extra>",
        "y": [variant for variant, _ in times_us],
        "x": [time_us / 1e3 for _, time_us in times_us],
        "marker": marker,
    }
