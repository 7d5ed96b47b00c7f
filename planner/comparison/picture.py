"""A comparison as one self-contained page: each contestant's step, measured with its interval, and predicted."""

from __future__ import annotations

from typing import Any

from planner.comparison.report import Comparison, Row, failures
from runtime.errors import EnvironmentFailure

ROW_PX, AROUND_PX = 44, 220
MEASURED, PREDICTED = "#c96a14", "#2f6fb3"


def picture_text(comparison: Comparison, title: str) -> str:
    """The page; `title` says what was compared where.

    Raises:
        EnvironmentFailure: plotly is not installed.
    """
    try:
        import plotly.graph_objects as plots
    except ImportError:
        raise EnvironmentFailure("the page is drawn by plotly, which is missing: pip install plotly") from None
    rows = [row for row in comparison.rows if row.ci95_us is not None]
    figure = plots.Figure(data=[plots.Scatter(**_measured(rows)), plots.Scatter(**_predicted(rows))])
    words = [title, *(f"<sub>{line}</sub>" for line in _words(comparison))]
    figure.update_layout(
        title={"text": "<br>".join(words), "yref": "container"},
        height=AROUND_PX + ROW_PX * len(rows),
        margin={"l": 130, "r": 20, "t": 60 + 18 * len(words), "b": 60},
        xaxis={"title": "step (ms)", "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "type": "category"},
        legend={"orientation": "h", "y": -0.2},
        template="plotly_white",
    )
    text: str = figure.to_html(
        include_plotlyjs=True,
        full_html=True,
        config={"responsive": True, "displaylogo": False},
        post_script="document.documentElement.dataset.drawn = 'yes'",
    )
    return text


def _words(comparison: Comparison) -> list[str]:
    where = f"{comparison.steps} steps each on {comparison.ranks} ranks, in {comparison.rounds} rounds by turns; "
    return [
        f"{where}bars are 95 % intervals of the median",
        *comparison.verdicts,
        *comparison.differences,
        *failures(comparison),
    ]


def _measured(rows: list[Row]) -> dict[str, Any]:
    values = [(row.name, row.median_us, row.ci95_us) for row in rows if row.median_us is not None and row.ci95_us]
    return {
        "name": "measured",
        "mode": "markers",
        "y": [name for name, _, _ in values],
        "x": [median / 1e3 for _, median, _ in values],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [(high - median) / 1e3 for _, median, (_, high) in values],
            "arrayminus": [(median - low) / 1e3 for _, median, (low, _) in values],
        },
        "marker": {"size": 11, "color": MEASURED},
        "hovertemplate": "%{y}: %{x:.2f} ms measured<extra></extra>",
    }


def _predicted(rows: list[Row]) -> dict[str, Any]:
    known = [row for row in rows if row.predicted_us is not None]
    return {
        "name": "predicted",
        "mode": "markers",
        "y": [row.name for row in known],
        "x": [(row.predicted_us or 0.0) / 1e3 for row in known],
        "marker": {"size": 11, "symbol": "diamond-open", "color": PREDICTED, "line": {"width": 2}},
        "hovertemplate": "%{y}: %{x:.2f} ms predicted<extra></extra>",
    }
