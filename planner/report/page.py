"""A plan as one self-contained page: figures, tables and plain words; nothing is fetched from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from planner.documents.text import (
    SENTENCE_CHARACTERS,
    first_part_with_source,
    milliseconds,
    pluralize,
    sanitize,
)
from planner.model.modes import describe
from planner.report.figures import scaling_figure, shorten, timeline_figure
from planner.report.frame import figure, frame_text, paragraphs, table
from planner.report.listing import Listing
from planner.report.tables import (
    SUMMARY,
    bucket_table,
    interface_lines,
    slack_lines,
    summary_rows,
    uncertainty_line,
)
from planner.report.tracks import MEASURED, Track, plan_tracks
from planner.report.who_waits import arrival_section, arrival_tables
from runtime.plan import Plan, PlanBucket
from runtime.plan.executed import cost_line
from runtime.plan.measured import MeasuredStep
from runtime.plan.predicted import ScalingPoint

MAX_ROWS = 500
"""Largest number of rows of the table of buckets: browsers are slow at more."""

MAX_NAMES = 3000
"""Largest number of names of gradients listed in it, over all rows."""

NAME_WIDTH = 80

NO_PREDICTION = (
    "It carries no prediction: `planner optimize` makes plans that do, and a run without a plan once it has measured "
    "its steps."
)

LABELS = {"timeline": "Time line of the plan and its baselines", "scaling": "Predicted step over numbers of ranks"}
"""Labels of the figures, for those who cannot see them."""


BASIS_WORDS = {
    "measured": "a filled circle: communication was measured on so many ranks",
    "formula": "an open square: computed from the links' constants by a published formula",
    "extrapolated": "an open circle: extrapolated from a measurement on another number of ranks",
}


def page_text(plan: Plan, measured: MeasuredStep | None = None, measured_from: str | None = None) -> str:
    """Return the page, with a step measured with the plan below it.

    Raises EnvironmentFailure where plotly is not installed.
    """
    tracks = plan_tracks(plan, measured)
    points = plan.scaling or ()
    figures = {
        **({"timeline": timeline_figure(tracks)} if tracks else {}),
        **({"scaling": scaling_figure(plan, points)} if len(points) > 1 else {}),
    }
    nodes = f" ({pluralize(plan.world.nodes, 'node')})" if plan.world.nodes else ""
    timeline = figure("timeline", figures, LABELS["timeline"], _reading_words(tracks), _caption_text(plan, measured))
    scaling = figure("scaling", figures, LABELS["scaling"], _scaling_words(points), _caption_text(plan))
    arrivals = arrival_tables(measured.arrivals or (), measured.messages or (), MEASURED) if measured else []
    sections = {
        "One step, predicted and measured" if measured else "One step, predicted": timeline,
        "Buckets in launch order, and why": _buckets(plan),
        **arrival_section(arrivals),
        "How good is the plan?": paragraphs(certificate_words(plan)),
        "Other numbers of ranks": scaling,
    }
    sources = dict(plan.sources or {"numbers": "the plan does not say; it was written by hand or by an older version"})
    if measured is not None:
        sources["measured step"] = _measured_text(measured) + (f", from {measured_from}" if measured_from else "")
    sources["units"] = "ms are milliseconds; KiB and MiB are 1024 and 1024² bytes; predicted times are those of a model"
    notes = (*interface_lines(plan), *filter(None, [cost_line(plan)]), *plan.notes)
    listed = "\n".join(f"<li>{escape(note)}</li>" for note in notes)
    return frame_text(
        f"{shorten(plan.model.name, NAME_WIDTH)} on {pluralize(plan.world.ranks, 'rank')}{nodes}: the plan explained",
        "\n".join(
            [
                paragraphs(headline(plan, measured)),
                _summary(plan, measured),
                *(f"<section>\n<h2>{heading}</h2>\n{text}\n</section>" for heading, text in sections.items()),
                f"<h2>Notes</h2>\n<ul>\n{listed}\n</ul>" if listed else "",
            ]
        ),
        sources,
        figures,
    )


def _summary(plan: Plan, measured: MeasuredStep | None) -> str:
    cells = [(shorten(name, NAME_WIDTH), *others) for name, *others in summary_rows(plan, measured)]
    return table(Listing("The plan beside its baselines", SUMMARY, cells, left=("schedule",))) if cells else ""


def _buckets(plan: Plan) -> str:
    count = len(plan.buckets)
    most = MAX_NAMES // min(count, MAX_ROWS)
    listing = bucket_table(plan, lambda bucket: _members(bucket, most), MAX_ROWS, "the plan does not say")
    listed = table(replace(listing, title="Buckets in launch order"), markup=("gradients",), cards=True)
    more = [f"The first {MAX_ROWS} of {count} buckets; `planner explain --json` lists all."]
    said = [f"{line[0].upper()}{line[1:]}." for line in slack_lines(plan)]
    return f"{listed}\n{paragraphs([*(more if count > MAX_ROWS else []), *said])}"


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


def headline(plan: Plan, measured: MeasuredStep | None) -> list[str]:
    """Return what the plan gives, in a paragraph or two."""
    predicted = plan.predicted
    gradients, count = pluralize(len(plan.gradients), "gradient"), pluralize(len(plan.buckets), "message")
    text = f"{gradients} {'is' if len(plan.gradients) == 1 else 'are'} communicated in {count} a step."
    if predicted is None:
        return [f"{text} {NO_PREDICTION}"]
    text += f" A step is predicted to take {milliseconds(predicted.iteration_us)} ms"
    if predicted.exposed_us is not None:
        text += f", of which {milliseconds(predicted.exposed_us)} ms are communication that compute does not hide"
    text += "."
    ddp = (plan.baselines or {}).get("ddp")
    if ddp is not None and ddp.iteration_us > 0.0:
        gain = 1.0 - predicted.iteration_us / ddp.iteration_us
        if abs(gain) < 0.0005:
            text += " DDP with its default buckets is predicted to take as long."
        else:
            text += (
                f" That is {abs(gain):.1%} {'shorter' if gain > 0.0 else 'longer'} than DDP with its default buckets "
            )
            text += f"({milliseconds(ddp.iteration_us)} ms)."
    lines = [text]
    if uncertain := uncertainty_line(plan):
        lines.append(f"{uncertain[0].upper()}{uncertain[1:]}.")
    if paragraph := describe(plan).paragraph:
        lines.append(paragraph)
    if measured is not None and measured.iteration_us > 0.0:
        error = predicted.iteration_us / measured.iteration_us - 1.0
        lines.append(
            f"Measured: {milliseconds(measured.iteration_us)} ms on rank {measured.rank}; the prediction is off by "
            f"{error:+.1%}."
        )
    return lines


def _caption_text(plan: Plan, measured: MeasuredStep | None = None) -> str:
    """Return model, cluster and sources of the times, so that a picture of a figure says what it shows."""
    sources = {name: sanitize(text, SENTENCE_CHARACTERS) for name, text in (plan.sources or {}).items()}
    sentences = [f"{shorten(plan.model.name, NAME_WIDTH)}, {pluralize(plan.world.ranks, 'rank')}"]
    if "cluster" in sources:
        sentences.append(f"Cluster {first_part_with_source(sources['cluster'])}")
    sentences += [
        f"{name.capitalize()}: {first_part_with_source(sources[name])}"
        for name in ("compute", "communication")
        if name in sources
    ]
    if not sources:
        sentences.append("The plan does not say where its numbers came from")
    if measured is not None:
        sentences.append(f"Measured: {_measured_text(measured)}")
    return f"{'. '.join(sentences)}."


def _measured_text(measured: MeasuredStep) -> str:
    return f"rank {measured.rank} of {measured.ranks}, mean of the middle half of {pluralize(measured.steps, 'step')}"


def _reading_words(tracks: Sequence[Track]) -> list[str]:
    if not tracks:
        return [f"The plan holds no time line. {NO_PREDICTION}"]
    joined = any((bar.tasks or 1) > 1 for track in tracks for bar in track.bars)
    whose = "the plan's step" if tracks[0].name.startswith("plan") else f"the step of {tracks[0].name}"
    words = (
        f"One step of each schedule on one axis; the dotted line is where {whose} ends. "
        "Hover over a bar, or tap it, for what it is. Drag with the mouse, or use the buttons, to zoom; double-click "
        "to go back."
    )
    if any(track.name == MEASURED for track in tracks):
        words += " The measured step is the plan's, as one rank saw it."
    if joined:
        words += " Tasks too short to be seen are drawn together."
    return [words]


def certificate_words(plan: Plan) -> list[str]:
    """Return how far the plan is from the best one, for readers who do not know lower bounds."""
    certificate, predicted = plan.certificate, plan.predicted
    if certificate is None:
        return ["The plan carries no certificate: nothing is known of how far it is from the best one."]
    step = f"{milliseconds(predicted.iteration_us)} ms" if predicted is not None else "the predicted step"
    bound = f"{milliseconds(certificate.lower_bound_us)} ms"
    if certificate.gap <= 1e-9:
        first = f"This is the best {plan.accuracy} plan there is: with these compute and communication times, no other "
        first += f"one of its class has a step shorter than {step}."
    else:
        first = f"With these compute and communication times, no {plan.accuracy} plan has a step shorter than {bound}. "
        first += f"This one is predicted to take {step}, {certificate.gap:.2%} more at most than the best possible."
    how = f"Shown by {certificate.method}."
    if certificate.note:
        how += f" Mind: {certificate.note}."
    return [
        first,
        how,
        "The proof is about the model of the step, not about the machines: that the real step takes as long as "
        "predicted is a matter of measuring (`session.report()`, `planner compare`).",
    ]


def _scaling_words(points: Sequence[ScalingPoint]) -> list[str]:
    if len(points) < 2:
        return [
            "The plan holds no other numbers of ranks: either the cluster has no costs for them, or the model is so "
            "large that they were left out. `planner simulate --ranks` computes them."
        ]
    kinds = dict.fromkeys(point.basis for point in points)
    marks = "; ".join(BASIS_WORDS[kind] for kind in BASIS_WORDS if kind in kinds)
    return [
        "Predicted time of one step with the same batch per rank, so a flat line is perfect scaling. `optimal` is "
        "decided anew for each number of ranks. Compute times are those of the profile everywhere. The time axis is "
        "logarithmic where strategies lie far apart.",
        f"Marks: {marks}.",
    ]
