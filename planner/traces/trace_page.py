"""`planner explain TRACE --html FILE`: a traced run as one self-contained page."""

from __future__ import annotations

from html import escape

from planner.documents.text import SENTENCE_CHARACTERS, milliseconds, pluralize, sanitize
from planner.report.figures import shorten, timeline_figure
from planner.report.frame import figure, frame_text, paragraphs, table
from planner.report.tracks import Bar, Track
from planner.traces.events import Run, Step
from planner.traces.explain import COLUMNS, Explanation, change_cells, lines_of, message_cells

DRAWN_STEPS = 3
NAME_WIDTH = 60


def trace_page(explanation: Explanation) -> str:
    """Return the page. Raises EnvironmentFailure where plotly is not installed."""
    run, profile = explanation.run, explanation.profile
    figures = {"timeline": timeline_figure([_track(run, step) for step in run.steps[:DRAWN_STEPS]])}
    name = escape(shorten(profile.model.name, NAME_WIDTH))
    drawn = figure(
        "timeline", figures, f"Time line of the traced steps of {name}",
        ["Steps as the profiler recorded them; the dotted line is the end of the first one. Hover over a bar for what "
         "it is."],
        f"{profile.model.name}, {pluralize(profile.world.ranks, 'rank')}, {profile.source}.",
    )  # fmt: skip
    messages = table("Messages of a step", COLUMNS, _escaped(message_cells(explanation.messages)), texts=(0,))
    doubt = [explanation.doubt] if explanation.doubt is not None else []
    changes = table(
        "Predicted steps", ("what", "step (ms)", "saved", "note"), _escaped(change_cells(explanation.changes)),
        texts=(0, 3), cards=True,
    )  # fmt: skip
    sections = {
        "Traced steps": drawn,
        "Messages, medians over the steps": messages,
        "What would change the step": paragraphs(doubt)
        + (
            changes if explanation.changes else paragraphs(["Nothing is sent between ranks: there is nothing to plan."])
        ),
    }
    notes = "\n".join(f"<li>{escape(sanitize(note, SENTENCE_CHARACTERS))}</li>" for note in explanation.notes)
    return frame_text(
        f"{shorten(profile.model.name, NAME_WIDTH)}: {milliseconds(explanation.parts_us['step'])} ms a step, traced",
        "\n".join(
            [
                paragraphs([*doubt, *(line for line in lines_of(explanation) if line not in explanation.notes)]),
                *(f"<section>\n<h2>{heading}</h2>\n{text}\n</section>" for heading, text in sections.items()),
                f"<h2>Notes</h2>\n<ul>\n{notes}\n</ul>" if notes else "",
            ]
        ),
        {f"trace of rank {rank}": path for rank, path in zip(run.traced_ranks, run.paths, strict=False)},
        figures,
    )


def _escaped(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [tuple(escape(sanitize(cell, SENTENCE_CHARACTERS)) for cell in row) for row in rows]


def _track(run: Run, step: Step) -> Track:
    parts = (
        ("forward", 0.0, step.forward_us),
        ("backward", step.forward_us, step.last_gradient_us),
        ("update", step.messages_end_us, step.span_us),
    )
    bars = [_bar(name, "compute", name, start, end) for name, start, end in parts if end > start]
    before = 0
    for index, message in enumerate(step.buckets):
        bars.append(
            _bar(
                f"bucket {index} {message.collective}", "network", "message", message.start_us, message.end_us,
                ready_us=message.ready_us, size_bytes=message.size_bytes, gradients=message.gradients - before or None,
            )
        )  # fmt: skip
        before = message.gradients
    bars += [_bar(m.collective, f"other {m.collective}", "message", m.start_us, m.end_us) for m in step.others]
    return Track(
        name=f"step {step.number}, traced", iteration_us=step.span_us, exposed_us=step.exposed_us,
        buckets=len(step.buckets), bars=tuple(bar for bar in bars if bar.end_us > bar.start_us),
    )  # fmt: skip


def _bar(
    task: str, resource: str, role: str, start_us: float, end_us: float, *, ready_us: float | None = None,
    size_bytes: int | None = None, gradients: int | None = None,
) -> Bar:  # fmt: skip
    return Bar(
        task=task, resource=resource, role=role, start_us=start_us, end_us=end_us, ready_us=ready_us,
        size_bytes=size_bytes, gradients=gradients, first_name=None, last_name=None,
    )  # fmt: skip
