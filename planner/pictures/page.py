"""A plan as one self-contained page: figures, tables and plain words; nothing is fetched from anywhere."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from planner.explain import (
    SENTENCE_CHARACTERS,
    bucket_form,
    interface_lines,
    mebibytes,
    milliseconds,
    plan_kind,
    printable,
)
from planner.pictures.figures import scaling_figure, shorten, timeline_figure
from planner.pictures.tracks import plan_tracks
from planner.pictures.words import (
    caption_words,
    certificate_words,
    headline,
    measured_words,
    reading_words,
    scaling_words,
)
from planner.sources import counted
from runtime.errors import EnvironmentFailure
from runtime.measured import MeasuredStep
from runtime.plan import Plan, PlanBucket
from runtime.version import __version__

MAX_ROWS = 500
"""Rows of the table of buckets; a longer one is read by nobody, and by no browser quickly."""

MAX_NAMES = 3000
"""Names of gradients listed in it, over all rows."""

NAME_WIDTH = 80

LABELS = {"timeline": "Time line of the plan and its baselines", "scaling": "Predicted step over numbers of ranks"}
"""Of the figures, for those who cannot see them."""

_CODE, _AS_CODE = re.compile(r"`([^`]+)`"), r"<code>\1</code>"


def page_text(plan: Plan, measured: MeasuredStep | None = None, measured_from: str | None = None) -> str:
    """The page.

    Args:
        plan: what is explained.
        measured: a step measured with this plan, drawn below it.
        measured_from: the name of its file.

    Raises:
        EnvironmentFailure: plotly is not installed.
    """
    tracks = plan_tracks(plan, measured)
    points = plan.scaling or ()
    figures = {
        **({"timeline": timeline_figure(tracks)} if tracks else {}),
        **({"scaling": scaling_figure(plan, points)} if len(points) > 1 else {}),
    }
    # A page without figures needs nothing to draw them.
    library, script = _plotly() if figures else "", _asset("page.js")
    nodes = f" ({counted(plan.world.nodes, 'node')})" if plan.world.nodes else ""
    return Template(_asset("page.html")).substitute(
        policy=_policy(library, script),
        title=escape(f"{shorten(plan.model.name, NAME_WIDTH)} on {counted(plan.world.ranks, 'rank')}{nodes}"),
        style=_asset("page.css"),
        headline=_paragraphs(headline(plan, measured)),
        summary=_summary(plan, measured),
        timeline_heading="One step, predicted and measured" if measured else "One step, predicted",
        timeline=_figure("timeline", figures, reading_words(tracks), caption_words(plan, measured)),
        buckets=_buckets(plan),
        certificate=_paragraphs(certificate_words(plan)),
        scaling=_figure("scaling", figures, scaling_words(points), caption_words(plan)),
        sources=_sources(plan, measured, measured_from),
        notes=_notes(plan),
        figures=_embedded(figures),
        library=library,
        script=script,
        version=escape(__version__),
    )


def _asset(name: str) -> str:
    return (resources.files("planner.pictures") / name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise EnvironmentFailure("the page is drawn by plotly, which is missing: pip install plotly") from None
    library: str = get_plotlyjs()
    return library


def _policy(*scripts: str) -> str:
    """The page may run its own scripts and load nothing: neither from the network nor what a name smuggles in."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _embedded(value: Any) -> str:
    """JSON inside a script element: no character there can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _paragraphs(lines: Iterable[str]) -> str:
    """Paragraphs of text; what stands between backticks is code."""
    return "\n".join(f"<p>{_CODE.sub(_AS_CODE, escape(line))}</p>" for line in lines)


def _figure(name: str, figures: dict[str, Any], words: Sequence[str], caption: str) -> str:
    text = _paragraphs(words)
    if name not in figures:
        return text
    height, label = figures[name]["layout"]["height"], LABELS[name]
    place = f'<div class="figure" id="{name}" role="img" aria-label="{label}" style="height:{height}px"></div>'
    return f"{text}\n<figure>{place}\n<figcaption>{escape(caption)}</figcaption></figure>"


def _table(
    label: str, columns: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[int], *, cards: bool = False
) -> str:
    """A table of cells that are markup already; `texts` are the columns that are not numbers.

    With `cards`, narrow screens show each row as a card of labelled lines.
    """
    kinds = ["text" if place in texts else "number" for place in range(len(columns))]
    head = "".join(
        f'<th scope="col" class="{kind}">{escape(name)}</th>' for name, kind in zip(columns, kinds, strict=True)
    )
    body = "\n".join(
        "<tr>"
        + "".join(
            f'<td class="{kind}" data-label="{escape(name)}">{cell}</td>'
            for cell, name, kind in zip(row, columns, kinds, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    kind = "wide cards" if cards else "wide"
    return (
        f'<div class="{kind}" role="region" tabindex="0" aria-label="{escape(label)}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _summary(plan: Plan, measured: MeasuredStep | None) -> str:
    planned = plan.predicted
    rows: list[tuple[str, int | None, float, float | None]] = []
    if planned is not None:
        rows.append((plan_kind(plan), len(plan.buckets), planned.iteration_us, planned.exposed_us))
    if measured is not None:
        rows.append(("plan, measured", len(plan.buckets), measured.iteration_us, measured.exposed_us))
    for name, prediction in sorted((plan.baselines or {}).items(), key=lambda item: item[1].iteration_us):
        rows.append((name, prediction.buckets, prediction.iteration_us, prediction.exposed_us))
    if not rows:
        return ""
    base_us = planned.iteration_us if planned is not None else 0.0
    cells = [
        (
            escape(shorten(name, NAME_WIDTH)),
            "" if buckets is None else str(buckets),
            milliseconds(step_us),
            milliseconds(exposed_us),
            f"{step_us / base_us:.3f}" if base_us > 0.0 else "",
        )
        for name, buckets, step_us, exposed_us in rows
    ]
    columns = ("schedule", "buckets", "step (ms)", "exposed (ms)", "step / plan")
    return _table("The plan beside its baselines", columns, cells, texts=(0,))


def _buckets(plan: Plan) -> str:
    shown = plan.buckets[:MAX_ROWS]
    times = plan.predicted.bucket_times(len(plan.buckets)) if plan.predicted else [None] * len(plan.buckets)
    most = MAX_NAMES // len(shown)
    rows = []
    for index, bucket in enumerate(shown):
        start_us, end_us = times[index] or (None, None)
        rows.append(
            (
                str(index),
                _members(bucket, most),
                escape(mebibytes(bucket.size_bytes)),
                milliseconds(start_us),
                milliseconds(end_us),
                escape(bucket_form(bucket, sharded=plan.sharded)),
                escape(printable(bucket.reason or "the plan does not say", SENTENCE_CHARACTERS)),
            )
        )
    columns = ("#", "gradients", "size", "start (ms)", "end (ms)", "how", "why")
    table = _table("Buckets in launch order", columns, rows, texts=(1, 5, 6), cards=True)
    left_out = len(plan.buckets) - len(shown)
    words = (
        [f"The first {len(shown)} of {len(plan.buckets)} buckets; `planner explain --json` lists all."]
        if left_out
        else []
    )
    return f"{table}\n{_paragraphs(words)}"


def _members(bucket: PlanBucket, most: int) -> str:
    names = bucket.gradients
    if len(names) == 1:
        return _name(names[0])
    text = f"{_name(names[0])} … {_name(names[-1])} ({len(names)})"
    if len(names) == 2 or most < 2:
        return text
    more = f", and {len(names) - most} more" if len(names) > most else ""
    listed = ", ".join(map(_name, names[:most]))
    return f"<details><summary>{text}</summary>{listed}{more}</details>"


def _name(name: str) -> str:
    return f"<code>{escape(shorten(name, NAME_WIDTH))}</code>"


def _sources(plan: Plan, measured: MeasuredStep | None, measured_from: str | None) -> str:
    found = dict(plan.sources or {"numbers": "the plan does not say; it was written by hand or by an older version"})
    if measured is not None:
        found["measured step"] = measured_words(measured) + (f", from {measured_from}" if measured_from else "")
    found["units"] = "ms are milliseconds; KiB and MiB are 1024 and 1024² bytes; predicted times are those of a model"
    items = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in found.items())
    return f"<dl>\n{items}\n</dl>"


def _notes(plan: Plan) -> str:
    notes = (*interface_lines(plan), *plan.notes)
    if not notes:
        return ""
    return "<h2>Notes</h2>\n<ul>\n" + "\n".join(f"<li>{escape(note)}</li>" for note in notes) + "\n</ul>"
