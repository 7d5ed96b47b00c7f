"""Predicted against measured, from the marks of the last steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from runtime.causes import cause_of_error
from runtime.clock import Clock
from runtime.documents import write_json
from runtime.drift import complete, measured_times, predicted_times
from runtime.guard import Sampled
from runtime.measured import MeasuredStep
from runtime.plan import ModelReference, Plan
from runtime.recorder import Recorder, StepMarks
from runtime.sharded_step import StepReport
from runtime.timeline import Span, Timeline
from runtime.updates import NormReport
from runtime.world import World

MIN_STEPS = 5
"""Of fewer steps nothing is said about why they are not what was predicted: the first ones are slow."""


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """One phase of a bucket on one kind of link: medians in microseconds from the start of forward."""

    name: str
    """Such as `reduce_scatter`."""
    link: str
    """`intra` or `inter`."""
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class BucketReport:
    """One bucket, as measured on this rank: medians in microseconds from the start of forward."""

    index: int
    gradients: int
    size_bytes: int | None
    ready_us: float
    """Its last gradient is in the buffer."""
    launch_us: float
    """It is handed to the communicator: later than ready where an earlier bucket is not complete."""
    start_us: float
    end_us: float
    predicted_start_us: float | None = None
    predicted_end_us: float | None = None
    compressor: str = "none"
    sends: str = "all_reduce"
    """What it travels by, where that has no phases."""
    sample: Sampled | None = None
    """Of a lossy bucket, when it was last looked at."""
    phases: tuple[PhaseReport, ...] = ()
    """Where the plan's collectives have several."""

    @property
    def spans(self) -> list[Span]:
        """What it keeps busy, and when."""
        parts = [(phase.name, phase.link, phase.start_us, phase.end_us) for phase in self.phases]
        return [
            Span(
                task=f"bucket {self.index} {name}", resource=resource, start_us=start_us, end_us=end_us,
                bucket=self.index, ready_us=self.ready_us,
            )
            for name, resource, start_us, end_us in parts or [(self.sends, "network", self.start_us, self.end_us)]
        ]  # fmt: skip

    def __str__(self) -> str:
        text = (
            f"bucket {self.index}: {self.gradients} gradients, ready {self.ready_us / 1e3:.2f}, "
            f"launch {self.launch_us / 1e3:.2f}, start {self.start_us / 1e3:.2f}, end {self.end_us / 1e3:.2f} ms"
        )
        if self.compressor != "none":
            text += f"; {self.compressor}"
        if self.sample is not None:
            text += (
                f", δ {self.sample.delta:.2f}, {self.sample.energy:.0%} of the energy sent, "
                f"norm of what is held back {self.sample.residual_norm:.3g}"
            )
        return text


@dataclass(frozen=True, kw_only=True)
class Report:
    """Medians over the last steps of one rank."""

    model: ModelReference
    rank: int
    ranks: int
    steps: int
    iteration_us: float
    """Forward's start to the end of the optimizer's step, without the time between backward and that step."""
    forward_us: float
    backward_us: float
    """From the end of forward to the end of autograd, the loss included."""
    update_us: float
    wait_us: float
    """From the end of autograd to the last averaged gradient."""
    predicted_us: float | None
    error: float | None
    """predicted / measured − 1."""
    buckets: tuple[BucketReport, ...]
    norms: NormReport | None = None
    """A part of the update, of optimizers that scale each layer's step (LARS, LAMB)."""
    step: StepReport | None = None
    """Where ranks share the whole step."""
    interfaces: tuple[str, ...] = ()
    """Of the plan, where it is not drop-in."""
    cause: str | None = None
    """Why the step is not what was predicted, where it is far from that."""

    @property
    def timeline(self) -> Timeline:
        """The measured step in the form of a predicted one."""
        end_us = self.iteration_us - self.update_us
        compute = [
            Span(task="forward", resource="compute", start_us=0.0, end_us=self.forward_us),
            Span(task="backward", resource="compute", start_us=self.forward_us, end_us=end_us - self.wait_us),
        ]
        network = [span for bucket in self.buckets for span in bucket.spans]
        gathers = list(self._gathers())
        updated_us = gathers[0].start_us if gathers else self.iteration_us
        update = Span(task="update", resource="compute", start_us=end_us, end_us=updated_us)
        return Timeline(
            spans=(*compute, *network, update, *gathers),
            iteration_us=self.iteration_us,
            forward_us=self.forward_us,
            backward_us=self.backward_us,
            update_us=self.update_us,
        )

    def _gathers(self) -> Iterator[Span]:
        """Of the weights that ranks have updated, which end the step."""
        times_us = self.step.gathers_us if self.step else ()
        start_us = self.iteration_us - min(sum(times_us), self.update_us)
        for index, time_us in enumerate(times_us):
            end_us = min(start_us + time_us, self.iteration_us)
            yield Span(
                task=f"bucket {index} all_gather", resource="network", start_us=start_us, end_us=end_us, bucket=index
            )
            start_us = end_us

    def to_document(self) -> dict[str, Any]:
        """The measured step as plain JSON types, in the form that `planner explain --measured` reads."""
        return MeasuredStep.of(
            self.timeline, model=self.model, rank=self.rank, ranks=self.ranks, steps=self.steps
        ).to_document()

    def save(self, path: str | Path) -> None:
        """Writes the measured step (`to_document`) atomically."""
        write_json(path, self.to_document())

    def __str__(self) -> str:
        predicted = ""
        if self.predicted_us is not None and self.error is not None:
            predicted = f", predicted {self.predicted_us / 1e3:.2f} ms ({self.error:+.1%})"
        interface = f"; interface {', '.join(self.interfaces)}" if self.interfaces else ""
        lines = [
            *((self.cause,) if self.cause is not None else ()),
            f"rank {self.rank} of {self.ranks}, {self.steps} steps: "
            f"measured {self.iteration_us / 1e3:.2f} ms{predicted}{interface}",
            f"  forward {self.forward_us / 1e3:.2f}, backward {self.backward_us / 1e3:.2f}, "
            f"waiting {self.wait_us / 1e3:.2f}, update {self.update_us / 1e3:.2f} ms",
        ]
        lines += [f"  {part}" for part in (self.norms, self.step) if part is not None]
        return "\n".join([*lines, *(f"  {bucket}" for bucket in self.buckets)])


def make_report(
    plan: Plan, recorder: Recorder, world: World, samples: Mapping[int, Sequence[Sampled]] | None = None,
    norms: NormReport | None = None, step: StepReport | None = None,
) -> Report:  # fmt: skip
    """Medians over the recorded steps that have forward, backward and, where there is an optimizer, an update.

    `samples`: of lossy buckets by their index. `norms`, `step`: what those of the optimizer took, where it has them.
    """
    steps = [step for step in recorder.steps if step.forward is not None and step.forward_end is not None]
    between = recorder.clock.between_us

    def median(of: Callable[[StepMarks], tuple[Any, Any]]) -> float:
        spans = [(start, end) for start, end in map(of, steps) if start is not None and end is not None]
        return statistics.median(between(start, end) for start, end in spans) if spans else 0.0

    update_us = median(lambda s: (s.update, s.update_end))
    iteration_us = median(lambda s: (s.forward, s.end)) + update_us
    predicted_us = plan.predicted.iteration_us if plan.predicted else None
    return Report(
        model=plan.model,
        rank=world.rank,
        ranks=world.ranks,
        steps=len(steps),
        iteration_us=iteration_us,
        forward_us=median(lambda s: (s.forward, s.forward_end)),
        backward_us=median(lambda s: (s.forward_end, s.backward_end)),
        update_us=update_us,
        wait_us=median(lambda s: (s.backward_end, s.end)),
        predicted_us=predicted_us,
        error=predicted_us / iteration_us - 1.0 if predicted_us is not None and iteration_us > 0.0 else None,
        buckets=tuple(_buckets(plan, steps, median, samples or {})),
        norms=norms,
        step=step,
        interfaces=plan.interfaces,
        cause=_cause(plan, steps, recorder.clock),
    )


def _cause(plan: Plan, steps: Sequence[StepMarks], clock: Clock) -> str | None:
    known, predicted = complete(steps, clock), predicted_times(plan)
    if len(known) < MIN_STEPS or predicted is None:
        return None
    measured = measured_times(known, clock, with_buckets=False)
    updated = measured.update_us > 0.0  # without an optimizer nobody times the update
    return cause_of_error(
        computed_us=measured.compute_us + measured.update_us,
        predicted_computed_us=predicted.compute_us + (predicted.update_us if updated else 0.0),
        step_us=measured.step_us,
        predicted_step_us=predicted.step_us if updated else predicted.exchanged_us,
    )


def _buckets(
    plan: Plan,
    steps: list[StepMarks],
    median: Callable[[Callable[[StepMarks], tuple[Any, Any]]], float],
    samples: Mapping[int, Sequence[Sampled]],
) -> Iterable[BucketReport]:
    if not any(step.sent and step.sent[0].end is not None for step in steps):
        return
    predicted = plan.predicted.bucket_times(len(plan.buckets)) if plan.predicted else [None] * len(plan.buckets)
    last = -1
    for index, bucket in enumerate(plan.buckets):
        first, last = last + 1, last + len(bucket.gradients)
        start_us, end_us = predicted[index] or (None, None)
        yield BucketReport(
            index=index,
            gradients=len(bucket.gradients),
            size_bytes=bucket.size_bytes,
            ready_us=median(partial(_until_ready, slice(first, last + 1))),
            launch_us=median(partial(_until_sent, index, "launch")),
            start_us=median(partial(_until_sent, index, "start")),
            end_us=median(partial(_until_sent, index, "end")),
            predicted_start_us=start_us,
            predicted_end_us=end_us,
            compressor=bucket.compressor.name,
            sends="reduce_scatter" if plan.sharded else bucket.collective,
            sample=samples[index][-1] if samples.get(index) else None,
            phases=tuple(_phases(index, steps, median)),
        )


def _phases(
    bucket: int, steps: list[StepMarks], median: Callable[[Callable[[StepMarks], tuple[Any, Any]]], float]
) -> Iterator[PhaseReport]:
    kinds = next((step.sent[bucket].phases for step in reversed(steps) if step.sent[bucket].phases), [])
    for number, (name, link, _, _) in enumerate(kinds):
        start_us, end_us = (median(partial(_until_phase, bucket, number, side)) for side in (2, 3))
        yield PhaseReport(name=name, link=link, start_us=start_us, end_us=end_us)


def _until_phase(bucket: int, number: int, side: int, step: StepMarks) -> tuple[Any, Any]:
    phases = step.sent[bucket].phases
    return step.forward, phases[number][side] if number < len(phases) else None


def _until_ready(members: slice, step: StepMarks) -> tuple[Any, Any]:
    """From forward to the last of a bucket's gradients; those that came in no backward have no mark."""
    known = [mark for mark in step.ready[members] if mark is not None]
    return step.forward, max(known) if known else None


def _until_sent(bucket: int, what: str, step: StepMarks) -> tuple[Any, Any]:
    return step.forward, getattr(step.sent[bucket], what)
