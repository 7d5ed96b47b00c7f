"""The page of a sweep: for each model one figure of its efficiency over ranks, one curve for each cluster."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from planner.decide.at_scale import ScalePoint, Scenario, curves
from planner.documents.text import milliseconds
from planner.report.figures import LEGEND_BELOW, TOP_PX, shorten
from planner.report.frame import figure, frame_text, paragraphs, table

COLUMNS = (
    "cluster", "ranks", "how", "step (ms)", "median (ms)", "99 % (ms)", "efficiency", "goodput", "samples/s",
)  # fmt: skip
NAME_WIDTH = 40


def scale_page(points: Sequence[ScalePoint], scenario: Scenario) -> str:
    """The page. Raises EnvironmentFailure where plotly is not installed."""
    models = list(dict.fromkeys(point.model for point in points))
    figures = {
        f"scale{at}": efficiency_figure([p for p in points if p.model == name]) for at, name in enumerate(models)
    }
    sections = []
    for at, name in enumerate(models):
        rows = [_row(point) for _, _, these in curves([p for p in points if p.model == name]) for point in these]
        drawn = figure(
            f"scale{at}", figures, f"Efficiency of {escape(name)} over ranks",
            ["Share of a step that is compute, by number of ranks: 1 is what one rank alone does."], _caption(scenario),
        )  # fmt: skip
        listed = table(f"{name}, predicted", COLUMNS, rows, texts=(0, 2))
        sections.append(f"<section>\n<h2>{escape(shorten(name, NAME_WIDTH))}</h2>\n{drawn}\n{listed}\n</section>")
    sources = {f"{point.model} on {point.cluster}": f"computed with {point.computed_with}" for point in points}
    sources |= {
        f"{point.cluster}, {point.ranks} ranks": point.cost_source for point in points if point.model == models[0]
    }
    head = paragraphs([f"{len(points)} predictions: {len(models)} models. {_caption(scenario)}"])
    return frame_text("What if, at scale", "\n".join([head, *sections]), sources, figures)


def _caption(scenario: Scenario) -> str:
    return (
        f"Nothing here is measured. Jitter {scenario.jitter:.1%}; {scenario.slow_share:.2%} of ranks "
        f"{scenario.slow_factor:g} times as slow; {scenario.mtbf_hours:,.0f} hours between failures of one of them, "
        f"{scenario.checkpoint_s:g} s for a checkpoint, {scenario.restart_s:g} s for a restart."
    )


def efficiency_figure(points: Sequence[ScalePoint]) -> dict[str, Any]:
    """Data for plotly.js: efficiency over ranks, a line for each cluster; hollow marks where memory is too small."""
    data = []
    for number, (_, cluster, these) in enumerate(curves(points)):
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": escape(shorten(cluster, NAME_WIDTH), quote=False),
                "meta": {"role": f"line{number % 6}"},
                "x": [point.ranks for point in these],
                "y": [round(point.efficiency, 5) for point in these],
                "marker": {
                    "symbol": ["circle-open" if point.fits is False else "circle" for point in these],
                    "size": 8,
                },
                "line": {"width": 2, "dash": ("solid", "dash", "dot")[number // 6 % 3]},
                "hovertext": [
                    f"<b>{escape(cluster, quote=False)}</b> · {point.ranks} ranks, {point.strategy}<br>"
                    f"{milliseconds(point.median_us)} ms a step, {point.efficiency:.1%} of it compute<br>"
                    f"{point.goodput:.1%} of the time after failures"
                    for point in these
                ],
                "hoverinfo": "text",
            }
        )
    ranks = sorted({point.ranks for point in points})
    layout = {
        "height": 460,
        "margin": {"l": 64, "r": 16, "t": TOP_PX, "b": 150},
        "hovermode": "closest",
        "dragmode": "zoom",
        "xaxis": {
            "title": {"text": "ranks", "standoff": 8}, "type": "log", "tickvals": ranks,
            "ticktext": [str(count) for count in ranks], "zeroline": False,
        },
        "yaxis": {"title": {"text": "efficiency", "standoff": 10}, "zeroline": False, "rangemode": "tozero"},
        "legend": LEGEND_BELOW,
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _row(point: ScalePoint) -> tuple[str, ...]:
    how = point.strategy + ("" if point.fits is not False else ", too little memory")
    rate = "" if point.samples_per_s is None else f"{point.samples_per_s:,.0f}"
    times = (milliseconds(time) for time in (point.step_us, point.median_us, point.p99_us))
    return (
        escape(point.cluster), str(point.ranks), escape(how), *times, f"{point.efficiency:.1%}", f"{point.goodput:.1%}",
        rate,
    )  # fmt: skip
