"""`planner explain TRACE --html FILE`: a traced run as one self-contained page."""

from __future__ import annotations

from html import escape
from typing import Any

from planner.documents.text import SENTENCE_CHARACTERS, milliseconds, pluralize, sanitize
from planner.report.figures import shorten, timeline_figure
from planner.report.frame import figure, frame_text, paragraphs, table
from planner.report.tracks import Bar, Track
from planner.report.who_waits import arrival_section
from planner.traces.events import Interval, Step
from planner.traces.explain import Explanation, arrival_listings, change_listing, lines_of, message_listing

DRAWN_STEPS = 3
NAME_WIDTH = 60
UNPREDICTED = "Nothing is predicted: the trace holds no messages between ranks."


def trace_page(explanation: Explanation) -> str:
    """Return the page. Raises EnvironmentFailure where plotly is not installed."""
    run, profile = explanation.run, explanation.profile
    name = shorten(profile.model.name, NAME_WIDTH)
    figures = {"timeline": timeline_figure([_track(step) for step in run.steps[:DRAWN_STEPS]])}
    drawn = figure(
        "timeline", figures, f"Time line of the traced steps of {escape(name)}",
        ["Steps as the profiler recorded them; the dotted line is the end of the first one. Hover over a bar for what "
         "it is."],
        f"{name}, {pluralize(profile.world.ranks, 'rank')}, {profile.source}.",
    )  # fmt: skip
    changes = table(change_listing(explanation), cards=True) if explanation.changes else paragraphs([UNPREDICTED])
    sections = {
        "Traced steps": drawn,
        "Messages, medians over the steps": table(message_listing(explanation)),
        **arrival_section(arrival_listings(explanation)),
        "What would change the step": paragraphs(explanation.doubt) + changes,
    }
    notes = "\n".join(f"<li>{escape(sanitize(note, SENTENCE_CHARACTERS))}</li>" for note in explanation.notes)
    return frame_text(
        f"{name}: {milliseconds(explanation.parts_us['step'])} ms a step, traced",
        "\n".join(
            [
                paragraphs([*explanation.doubt, *lines_of(explanation)]),
                *(f"<section>\n<h2>{heading}</h2>\n{text}\n</section>" for heading, text in sections.items()),
                f"<h2>Notes</h2>\n<ul>\n{notes}\n</ul>" if notes else "",
            ]
        ),
        {f"trace of rank {rank}": path for rank, path in zip(run.traced_ranks, run.paths, strict=False)},
        figures,
    )


def _track(step: Step) -> Track:
    parts = (
        ("forward", 0.0, step.forward_us),
        ("backward", step.forward_us, step.last_gradient_us),
        ("update", step.messages_end_us, step.span_us),
    )
    bars = [_bar(name, "compute", Interval(start_us=start, end_us=end), role=name) for name, start, end in parts]
    before = 0
    for index, message in enumerate(step.buckets):
        what: dict[str, Any] = {"ready_us": message.ready_us, "size_bytes": message.size_bytes}
        holds = message.gradients - before or None
        bars.append(_bar(f"bucket {index} {message.collective}", "network", message, gradients=holds, **what))
        before = message.gradients
    bars += [_bar(message.collective, "others", message) for message in step.others]
    return Track(
        name=f"step {step.number}, traced", iteration_us=step.span_us, exposed_us=step.exposed_us,
        buckets=len(step.buckets), bars=tuple(bar for bar in bars if bar.end_us > bar.start_us),
    )  # fmt: skip


def _bar(task: str, resource: str, part: Interval, *, role: str = "message", **more: Any) -> Bar:
    return Bar(
        task=task, resource=resource, role=role, start_us=part.start_us, end_us=part.end_us, first_name=None,
        last_name=None, **more,
    )  # fmt: skip
