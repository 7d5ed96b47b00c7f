"""A plan as one self-contained page: figures, tables and plain words; nothing is fetched from anywhere."""

from __future__ import annotations

from html import escape

from planner.emit.text import SENTENCE_CHARACTERS, counted, mebibytes, milliseconds, printable
from planner.report.figures import scaling_figure, shorten, timeline_figure
from planner.report.frame import figure, frame_text, paragraphs, table
from planner.report.tables import bucket_form, interface_lines, plan_kind
from planner.report.tracks import plan_tracks
from planner.report.words import (
    caption_words,
    certificate_words,
    headline,
    measured_words,
    reading_words,
    scaling_words,
)
from runtime.plan import Plan, PlanBucket
from runtime.plan.measured import MeasuredStep

MAX_ROWS = 500
"""Rows of the table of buckets; a longer one is read by nobody, and by no browser quickly."""

MAX_NAMES = 3000
"""Names of gradients listed in it, over all rows."""

NAME_WIDTH = 80

LABELS = {"timeline": "Time line of the plan and its baselines", "scaling": "Predicted step over numbers of ranks"}
"""Of the figures, for those who cannot see them."""


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
    nodes = f" ({counted(plan.world.nodes, 'node')})" if plan.world.nodes else ""
    timeline = figure("timeline", figures, LABELS["timeline"], reading_words(tracks), caption_words(plan, measured))
    scaling = figure("scaling", figures, LABELS["scaling"], scaling_words(points), caption_words(plan))
    sections = {
        "One step, predicted and measured" if measured else "One step, predicted": timeline,
        "Buckets in launch order, and why": _buckets(plan),
        "How good is the plan?": paragraphs(certificate_words(plan)),
        "Other numbers of ranks": scaling,
    }
    return frame_text(
        f"{shorten(plan.model.name, NAME_WIDTH)} on {counted(plan.world.ranks, 'rank')}{nodes}: the plan explained",
        "\n".join(
            [
                paragraphs(headline(plan, measured)),
                _summary(plan, measured),
                *(f"<section>\n<h2>{heading}</h2>\n{text}\n</section>" for heading, text in sections.items()),
                _notes(plan),
            ]
        ),
        _sources(plan, measured, measured_from),
        figures,
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
    return table("The plan beside its baselines", columns, cells, texts=(0,))


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
    listed = table("Buckets in launch order", columns, rows, texts=(1, 5, 6), cards=True)
    left_out = len(plan.buckets) - len(shown)
    words = (
        [f"The first {len(shown)} of {len(plan.buckets)} buckets; `planner explain --json` lists all."]
        if left_out
        else []
    )
    return f"{listed}\n{paragraphs(words)}"


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


def _sources(plan: Plan, measured: MeasuredStep | None, measured_from: str | None) -> dict[str, str]:
    found = dict(plan.sources or {"numbers": "the plan does not say; it was written by hand or by an older version"})
    if measured is not None:
        found["measured step"] = measured_words(measured) + (f", from {measured_from}" if measured_from else "")
    found["units"] = "ms are milliseconds; KiB and MiB are 1024 and 1024² bytes; predicted times are those of a model"
    return found


def _notes(plan: Plan) -> str:
    notes = (*interface_lines(plan), *plan.notes)
    if not notes:
        return ""
    return "<h2>Notes</h2>\n<ul>\n" + "\n".join(f"<li>{escape(note)}</li>" for note in notes) + "\n</ul>"
