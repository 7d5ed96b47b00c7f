"""What the page says in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from planner.emit.text import SENTENCE_CHARACTERS, counted, milliseconds, printable, short_with_source
from planner.report.figures import shorten
from planner.report.tables import uncertainty_line
from planner.report.tracks import MEASURED, Track
from runtime.plan import Plan
from runtime.plan.measured import MeasuredStep
from runtime.plan.predicted import ScalingPoint

CAPTION_NAME = 80
"""Characters of a name in a caption."""


def headline(plan: Plan, measured: MeasuredStep | None) -> list[str]:
    """What the plan gives, in a paragraph or two."""
    predicted = plan.predicted
    gradients, count = counted(len(plan.gradients), "gradient"), counted(len(plan.buckets), "message")
    text = f"{gradients} {'travels' if len(plan.gradients) == 1 else 'travel'} in {count} a step."
    if predicted is None:
        return [f"{text} The plan carries no prediction; `planner optimize` makes plans that do."]
    text += f" A step is predicted to take {milliseconds(predicted.iteration_us)} ms"
    if predicted.exposed_us is not None:
        text += f", of which {milliseconds(predicted.exposed_us)} ms are communication that compute does not hide"
    lines = [f"{text}.{_against_ddp(plan)}"]
    if uncertain := uncertainty_line(plan):
        lines.append(f"{uncertain[0].upper()}{uncertain[1:]}.")
    if plan.delay is not None:
        every = "step" if plan.delay.steps == 1 else f"{plan.delay.steps} steps"
        lines.append(
            f"With delay: gradients are pushed in every step, and new weights come after every {every}. That is the "
            f"mean step; the time line shows a whole cycle, from a step that new weights follow."
        )
    if plan.local_async is not None:
        lines.append(
            f"{counted(plan.local_async.updaters, 'updater')} of each rank work on its model at once, and ranks "
            f"average their models beside them: a step is what a rank takes for a minibatch on average; the time line "
            f"shows some minibatches of each updater, late in training."
        )
    if measured is not None and measured.iteration_us > 0.0:
        error = predicted.iteration_us / measured.iteration_us - 1.0
        lines.append(
            f"Measured: {milliseconds(measured.iteration_us)} ms on rank {measured.rank}; the prediction is off by "
            f"{error:+.1%}."
        )
    return lines


def caption_words(plan: Plan, measured: MeasuredStep | None = None) -> str:
    """Below each figure, so that a picture of it says what it shows: model, cluster, and what the times rest on."""
    sources = {name: printable(text, SENTENCE_CHARACTERS) for name, text in (plan.sources or {}).items()}
    sentences = [f"{shorten(plan.model.name, CAPTION_NAME)}, {counted(plan.world.ranks, 'rank')}"]
    if "cluster" in sources:
        sentences.append(f"Cluster {short_with_source(sources['cluster'])}")
    sentences += [
        f"{name.capitalize()}: {short_with_source(sources[name])}"
        for name in ("compute", "communication")
        if name in sources
    ]
    if not sources:
        sentences.append("The plan does not say where its numbers came from")
    if measured is not None:
        sentences.append(f"Measured: {measured_words(measured)}")
    return f"{'. '.join(sentences)}."


def measured_words(measured: MeasuredStep) -> str:
    """Whose times a measured step holds."""
    return f"rank {measured.rank} of {measured.ranks}, mean of the middle half of {counted(measured.steps, 'step')}"


def _against_ddp(plan: Plan) -> str:
    ddp = (plan.baselines or {}).get("ddp")
    if ddp is None or plan.predicted is None or ddp.iteration_us <= 0.0:
        return ""
    gain = 1.0 - plan.predicted.iteration_us / ddp.iteration_us
    if abs(gain) < 0.0005:
        return " DDP with its default buckets is predicted to take as long."
    word = "shorter" if gain > 0.0 else "longer"
    return f" That is {abs(gain):.1%} {word} than DDP with its default buckets ({milliseconds(ddp.iteration_us)} ms)."


def reading_words(tracks: Sequence[Track]) -> list[str]:
    """How to read the time line."""
    if not tracks:
        return ["The plan holds no time line; `planner optimize` makes plans that do."]
    joined = any(bar.tasks > 1 for track in tracks for bar in track.bars)
    words = (
        f"One step of each schedule on one axis; the dotted line is where {_whose(tracks[0])} ends. "
        "Hover over a bar, or tap it, for what it is. Drag with the mouse, or use the buttons, to zoom; double-click "
        "to go back."
    )
    if any(track.name == MEASURED for track in tracks):
        words += " The measured step is the plan's, as one rank saw it."
    if joined:
        words += " Tasks too short to be seen are drawn together."
    return [words]


def _whose(track: Track) -> str:
    return "the plan's step" if track.name.startswith("plan") else f"the step of {track.name}"


def certificate_words(plan: Plan) -> list[str]:
    """How far the plan is from the best one, for somebody who has not read about lower bounds."""
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


BASIS_WORDS = {
    "measured": "a filled circle: communication was measured on so many ranks",
    "formula": "an open square: computed from the links' constants by a published formula",
    "extrapolated": "an open circle: extrapolated from a measurement on another number of ranks",
}


def scaling_words(points: Sequence[ScalingPoint]) -> list[str]:
    """How to read the curve over ranks."""
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
