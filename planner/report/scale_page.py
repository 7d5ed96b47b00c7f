"""The page of a sweep: for each model one figure of its efficiency over ranks, one curve for each cluster."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from planner.decide.at_scale import ScalePoint, Scenario, curves
from planner.documents.text import milliseconds
from planner.report.figures import Figure, curve, over_ranks, shorten
from planner.report.frame import figure, frame_text, paragraphs, table
from planner.report.listing import Listing
from planner.report.tables import sweep_table

NAME_WIDTH = 40


def scale_page(points: Sequence[ScalePoint], scenario: Scenario) -> str:
    """Return the page. Raises EnvironmentFailure where plotly is not installed."""
    models = list(dict.fromkeys(point.model for point in points))
    figures = {
        f"scale{at}": efficiency_figure([p for p in points if p.model == name]) for at, name in enumerate(models)
    }
    sections = []
    for at, name in enumerate(models):
        shown = [point for _, _, these in curves([p for p in points if p.model == name]) for point in these]
        drawn = figure(
            f"scale{at}", figures, f"Efficiency of {escape(name)} over ranks",
            ["Share of a step that is compute, by number of ranks: 1 is what one rank alone does."], _caption(scenario),
        )  # fmt: skip
        listed = table(_listing(name, shown))
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


def efficiency_figure(points: Sequence[ScalePoint]) -> Figure:
    """Return efficiency over ranks, a line for each cluster; hollow marks where memory is too small."""
    lines = []
    for number, (_, cluster, these) in enumerate(curves(points)):
        drawn = [
            (
                point.ranks,
                round(point.efficiency, 5),
                f"<b>{escape(cluster, quote=False)}</b> · {point.ranks} ranks, {point.strategy}<br>"
                f"{milliseconds(point.median_us)} ms a step, {point.efficiency:.1%} of it compute<br>"
                f"{point.goodput:.1%} of the time after failures",
            )
            for point in these
        ]
        marker = {"symbol": ["circle-open" if point.fits is False else "circle" for point in these], "size": 8}
        dash = ("solid", "dash", "dot")[number // 6 % 3]
        lines.append(curve(number, cluster, drawn, marker, {"width": 2, "dash": dash}))
    return over_ranks(lines, sorted({point.ranks for point in points}), "efficiency", {"rangemode": "tozero"})


def _listing(model: str, points: Sequence[ScalePoint]) -> Listing:
    """Return the rows of a sweep of one model, with samples per second."""
    listing = sweep_table(points)
    rates = ["" if point.samples_per_s is None else f"{point.samples_per_s:,.0f}" for point in points]
    rows = [(*row[1:], rate) for row, rate in zip(listing.rows, rates, strict=True)]
    return Listing(f"{model}, predicted", (*listing.columns[1:], "samples/s"), rows, listing.left)
