"""The page's two figures as data for plotly.js. Colours are roles (`meta`); the page's script knows the theme's."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, isfinite, log10
from typing import Any

from planner.documents.text import mebibytes, milliseconds, pluralize, sanitize
from planner.report.tracks import ROLES, Bar, Track
from runtime.plan import Plan
from runtime.plan.predicted import ScalingPoint

Figure = dict[str, Any]

NAME_WIDTH = 40
"""Characters of a gradient's name in a hover label."""

ROW_PX, HEAD_PX, BOTTOM_PX = 24, 28, 92
"""Height of one row of bars, of a track's heading, and of the axis with the legend below it."""

TOP_PX = 40

LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "compute": "other compute",
    "message": "communication",
}

LEGEND_BELOW = {"orientation": "h", "x": 0, "xref": "container", "y": 0, "yref": "container", "yanchor": "bottom"}

FAR_APART = 4.0
"""Steps that differ by more than this factor are drawn on a logarithmic axis."""

BASIS = {"measured": "circle", "formula": "square-open", "extrapolated": "circle-open"}
"""Source of a point's costs → its mark."""


def shorten(name: str, width: int) -> str:
    """Return a name in at most `width` characters, cut in the middle; control characters are written out."""
    if not name.isprintable():
        name = sanitize(name, len(name))
    if len(name) <= width:
        return name
    tail = (width - 1) // 2
    return f"{name[: width - 1 - tail]}…{name[-tail:]}"


def timeline_figure(tracks: Sequence[Track]) -> Figure:
    """Return all tracks on one time axis: a heading and a row of bars per resource each."""
    data: dict[str, Figure] = {
        role: {
            "type": "bar",
            "orientation": "h",
            "name": LEGEND[role],
            "meta": {"role": role},
            **{column: [] for column in ("x", "base", "y", "hovertext")},
            "width": ROW_PX - 6,
            "hoverinfo": "text",
            "textposition": "none",
        }
        for role in ROLES
    }
    ticks: list[tuple[float, str]] = []
    headings: list[Figure] = []
    critical: dict[str, list[bool]] = {role: [] for role in ROLES}
    top = 0.0
    for track in tracks:
        at = {"x": 0, "xref": "paper", "xanchor": "left", "xshift": -60, "y": top + HEAD_PX / 2, "yref": "y"}
        headings.append({"text": _heading(track), "showarrow": False, **at})
        top += HEAD_PX
        for resource in track.resources:
            ticks.append((top + ROW_PX / 2, escape(shorten(resource, 12), quote=False)))
            for bar in (bar for bar in track.bars if bar.resource == resource):
                trace = data[bar.role]
                trace["x"].append(_ms(bar.end_us - bar.start_us))
                trace["base"].append(_ms(bar.start_us))
                trace["y"].append(top + ROW_PX / 2)
                trace["hovertext"].append(_bar_text(bar, track.name))
                critical[bar.role].append(bar.critical is True)
            top += ROW_PX
    for role, of_bars in critical.items():
        if any(of_bars):  # outlined
            data[role]["meta"]["critical"] = of_bars
    end = {"x0": _ms(tracks[0].iteration_us), "x1": _ms(tracks[0].iteration_us)} if tracks else {}
    end_line = {"type": "line", **end, "y0": 0, "y1": 1, "yref": "paper", "line": {"dash": "dot", "width": 1}}
    layout = {
        "height": round(top + TOP_PX + BOTTOM_PX),
        "margin": {"l": 64, "r": 12, "t": TOP_PX, "b": BOTTOM_PX},
        "barmode": "overlay",
        "hovermode": "closest",
        "dragmode": "zoom",
        "xaxis": {"title": {"text": "time from the start of forward (ms)"}, "zeroline": False, "rangemode": "tozero"},
        "yaxis": {
            "range": [top, 0],
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "tickvals": [position for position, _ in ticks],
            "ticktext": [text for _, text in ticks],
        },
        "legend": LEGEND_BELOW,
        "annotations": headings,
        "shapes": [{**end_line, "layer": "below"}] if tracks else [],
    }
    return {"data": [trace for trace in data.values() if trace["x"]], "layout": layout}


def _ms(time_us: float) -> float:
    """Return ms with seven significant digits, which keeps the page small."""
    return float(f"{time_us / 1000:.7g}")


def _bar_text(bar: Bar, track: str) -> str:
    """Return what a hover label says; escaped for plotly's markup."""
    lines = [f"<b>{_plain(bar.task)}</b> · {_plain(track)}"]
    joined = (bar.tasks or 1) > 1
    if joined:
        lines.append(f"{bar.tasks} tasks, too short to be drawn one by one")
    if bar.gradients is not None:
        size = f", {mebibytes(bar.size_bytes)}" if bar.size_bytes is not None else ""
        lines.append(f"{pluralize(bar.gradients, 'gradient')}{size}")
        lines += [_plain(name) for name in dict.fromkeys((bar.first_name, bar.last_name)) if name is not None]
    start, end, duration = map(milliseconds, (bar.start_us, bar.end_us, bar.end_us - bar.start_us))
    lines.append(f"{start} to {end} ms: {duration} ms")
    if bar.critical:
        lines.append("the length of steps comes from it")
    if bar.ready_us is not None and not joined:
        wait_us = max(0.0, bar.start_us - bar.ready_us)
        lines.append(f"ready at {milliseconds(bar.ready_us)} ms, waits {milliseconds(wait_us)} ms for the link")
    return "<br>".join(lines)


def _plain(text: str) -> str:
    return escape(shorten(text, NAME_WIDTH), quote=False)


def _heading(track: Track) -> str:
    words = [f"{milliseconds(track.iteration_us)} ms"]
    if track.buckets is not None:
        words.append(pluralize(track.buckets, "bucket"))
    if track.exposed_us is not None:
        words.append(f"{milliseconds(track.exposed_us)} ms exposed")
    return f"<b>{_plain(track.name)}</b>  {', '.join(words)}"


def curve(number: int, name: str, points: Sequence[tuple[float, float, str]], marker: Figure, line: Figure) -> Figure:
    """Return a line with marks.

    Args:
        number: which colour it has.
        name: its name in the legend.
        points: x, y and hover label of each.
        marker: the look of the marks, in plotly's terms.
        line: the look of the line, in plotly's terms.
    """
    ranks, values, texts = zip(*points, strict=True)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": _plain(name),
        "meta": {"role": f"line{number % 6}"},
        "x": ranks,
        "y": values,
        "marker": marker,
        "line": line,
        "hovertext": texts,
        "hoverinfo": "text",
    }


def over_ranks(lines: Sequence[Figure], ranks: Sequence[int], title: str, axis: Figure) -> Figure:
    """Return a figure of lines over numbers of ranks, on a logarithmic axis.

    Args:
        lines: see `curve`.
        ranks: the marked numbers of ranks.
        title: of the other axis.
        axis: what else is set of it, in plotly's terms.
    """
    layout = {
        "height": 450,
        "margin": {"l": 76, "r": 16, "t": TOP_PX, "b": 140},
        "hovermode": "closest",
        "dragmode": "zoom",
        "xaxis": {
            "title": {"text": "ranks", "standoff": 8},
            "type": "log",
            "tickvals": ranks,
            "ticktext": list(map(str, ranks)),
            "zeroline": False,
        },
        "yaxis": {"title": {"text": title, "standoff": 10}, "zeroline": False, **axis},
        "legend": LEGEND_BELOW,
    }
    return {"data": list(lines), "layout": layout}


def scaling_figure(plan: Plan, points: Sequence[ScalingPoint]) -> Figure:
    """Return the predicted step over ranks, one line per strategy; the marks say where costs come from."""
    predicted = plan.predicted
    compute_us = None
    if predicted is not None and predicted.forward_us is not None and predicted.backward_us is not None:
        total_us = predicted.forward_us + predicted.backward_us + (predicted.update_us or 0.0)
        compute_us = total_us if isfinite(total_us) else None
    names = dict.fromkeys(name for point in points for name in point.iteration_us)
    lines: list[Figure] = []
    for number, name in enumerate(names):
        # The first line, the optimum, is broad and lies below the others: those that reach it stay visible.
        known, first = [point for point in points if name in point.iteration_us], number == 0
        drawn = [(p.ranks, _ms(p.iteration_us[name]), _point_text(name, p, compute_us)) for p in known]
        marker = {"symbol": [BASIS[point.basis] for point in known], "size": 13 if first else 8}
        lines.append(curve(number, name, drawn, marker, {"width": 5 if first else 2}))
    if compute_us is not None:
        lines.append({
            "type": "scatter", "mode": "lines", "name": "compute alone", "meta": {"role": "quiet"},
            "x": [points[0].ranks, points[-1].ranks], "y": [_ms(compute_us)] * 2, "line": {"dash": "dot", "width": 2},
            "hoverinfo": "skip",
        })  # fmt: skip
    times = [time for line in lines for time in line["y"] if time > 0.0]
    scale: Figure = {"rangemode": "tozero"}
    if times and max(times) > FAR_APART * min(times):
        # A tick at 1, 2 and 5 times each power of ten; plotly's own ticks leave out the zeros.
        decades = range(floor(log10(min(times))), ceil(log10(max(times))) + 1)
        ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
        texts = [f"{tick:,.0f}" if tick >= 1.0 else f"{tick:g}" for tick in ticks]
        scale = {"type": "log", "tickvals": ticks, "ticktext": texts}
    return over_ranks(lines, [point.ranks for point in points], "step (ms)", scale)


def _point_text(name: str, point: ScalingPoint, compute_us: float | None) -> str:
    step_us = point.iteration_us[name]
    nodes = f" on {pluralize(point.nodes, 'node')}" if point.nodes is not None else ""
    lines = [f"<b>{_plain(name)}</b> · {pluralize(point.ranks, 'rank')}{nodes}", f"{milliseconds(step_us)} ms a step"]
    if compute_us is not None and step_us > 0.0:
        lines[-1] += f", {min(1.0, compute_us / step_us):.0%} of it compute"
    return "<br>".join([*lines, f"{point.basis}: {_plain(point.source or 'source unknown')}"])
