"""Predicted against measured, from the marks of the last steps.

A step is all that one step of the optimizer takes, with several micro-batches where gradients are accumulated. Its
parts are means over the same steps, the middle half by length, so that they add up; medians of parts would not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.comm.world import World
from runtime.monitor.clock import Clock
from runtime.monitor.drift import complete, measured_times, predicted_times
from runtime.monitor.recorder import Recorder, StepMarks
from runtime.monitor.step_report import GatherReport, StepReport
from runtime.monitor.verdict import cause_of_error
from runtime.optimizers.planned_norms import NormReport
from runtime.optimizers.planned_operators import OperatorReport
from runtime.plan import NO_COMPRESSION, ModelReference, Plan
from runtime.plan.executed import cost_line
from runtime.plan.last_ranks import MessageArrival, RankArrival
from runtime.plan.measured import MeasuredStep
from runtime.plan.predicted import Prediction
from runtime.plan.timeline import Span, Timeline
from runtime.sparse.samples import Sampled

MIN_STEPS = 5
"""Minimum number of steps for a cause of their difference from the prediction: the first ones are slow."""


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """One phase of a bucket, on intra-node or inter-node links: means in microseconds from the step's start."""

    name: str
    link: str
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class BucketReport:
    """One bucket, as measured on this rank: means in microseconds from the step's start."""

    index: int
    gradients: int
    size_bytes: int | None
    ready_us: float
    """Time when its last gradient is in the buffer."""
    launch_us: float
    """It is handed to the communicator: later than ready where an earlier bucket is not complete."""
    start_us: float
    end_us: float
    exposed_us: float = 0.0
    """Time behind the end of autograd, and behind the bucket before, for which the step waits for it."""
    predicted_start_us: float | None = None
    predicted_end_us: float | None = None
    compressor: str = "none"
    sends: str = "all_reduce"
    """The collective that it is sent by, where that has no phases."""
    sample: Sampled | None = None
    """Last sample of a compressed bucket."""
    phases: tuple[PhaseReport, ...] = ()

    @property
    def spans(self) -> list[Span]:
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
            f"launch {self.launch_us / 1e3:.2f}, start {self.start_us / 1e3:.2f}, end {self.end_us / 1e3:.2f} ms, "
            f"exposed {self.exposed_us / 1e3:.2f}"
        )
        if self.compressor != NO_COMPRESSION.name:
            text += f"; {self.compressor}"
        if self.sample is not None:
            text += f", {self.sample}"
        return text


@dataclass(frozen=True, kw_only=True)
class Accumulated:
    """The micro-batches of a step before its last one, together; they are in the step's own times, too."""

    micro_batches: int
    exchanged: int
    """Number of them that exchanged gradients (backward outside of `no_sync`)."""
    forward_us: float
    backward_us: float
    wait_us: float

    @property
    def total_us(self) -> float:
        """Time until the last micro-batch begins, without the script's own between them."""
        return self.forward_us + self.backward_us + self.wait_us


@dataclass(frozen=True, kw_only=True)
class Report:
    """Means over the middle half of the last steps of one rank."""

    model: ModelReference
    rank: int
    ranks: int
    steps: int
    forward_us: float
    backward_us: float
    """Time from the end of forward to the end of autograd, the loss included."""
    update_us: float
    wait_us: float
    """Time from the end of autograd to the last averaged gradient."""
    script_us: float = 0.0
    """Remaining time until the next step begins: loading data, clipping, logging and the like (median)."""
    accumulated: Accumulated | None = None
    predicted_us: float | None
    """Predicted time of as many micro-batches as a step has, each as large as the profile's batch; None: not known."""
    buckets: tuple[BucketReport, ...]
    norms: NormReport | None = None
    """A part of the update, of optimizers that scale each layer's step (LARS, LAMB)."""
    operators: OperatorReport | None = None
    """A part of the update, of optimizers with a shared operator (Muon)."""
    step: StepReport | None = None
    arrivals: tuple[RankArrival, ...] = ()
    """Each rank at the messages, as ranks compared last; empty in the first steps, and where ranks do not wait."""
    messages: tuple[MessageArrival, ...] = ()
    """All ranks at each message, as they compared last."""
    interfaces: tuple[str, ...] = ()
    compiled: str | None = None
    """Regions of the compiled model, or what cuts of its graph would win; None: it is not compiled."""
    accuracy: str | None = None
    """The cost of the plan in accuracy, as text; None for an exact plan."""
    cause: str | None = None
    """Cause of a large difference from the prediction."""

    @property
    def iteration_us(self) -> float:
        """Time of the step without the script: forward, backward, waiting and update."""
        return self.forward_us + self.backward_us + self.wait_us + self.update_us

    @property
    def error(self) -> float | None:
        """Relative error of the prediction: predicted / measured − 1."""
        if self.predicted_us is None or self.iteration_us <= 0.0:
            return None
        return self.predicted_us / self.iteration_us - 1.0

    @property
    def timeline(self) -> Timeline:
        """Measured step in the form of a predicted one."""
        end_us = self.iteration_us - self.update_us
        compute = list(self._compute())
        network = [span for bucket in self.buckets for span in bucket.spans]
        late = [] if self.step is None else [self._late_gather(one) for one in self.step.late]
        gathers = list(self._gathers())
        updated_us = gathers[0].start_us if gathers else self.iteration_us
        update = Span(task="update", resource="compute", start_us=end_us, end_us=updated_us)
        return Timeline(
            spans=(*late, *compute, *network, update, *gathers),
            iteration_us=self.iteration_us,
            forward_us=self.forward_us,
            backward_us=self.backward_us,
            update_us=self.update_us,
        )

    def _compute(self) -> Iterator[Span]:
        """Forward and backward of the last micro-batch, and before them those of the others."""
        start_us, forward_us, backward_us = 0.0, self.forward_us, self.backward_us
        if (before := self.accumulated) is not None:
            of = f"of {before.micro_batches} micro-batches before"
            yield Span(task=f"forward {of}", resource="compute", start_us=0.0, end_us=before.forward_us)
            end_us = before.forward_us + before.backward_us
            yield Span(task=f"backward {of}", resource="compute", start_us=before.forward_us, end_us=end_us)
            start_us = before.total_us
            forward_us, backward_us = forward_us - before.forward_us, backward_us - before.backward_us
        middle_us = start_us + forward_us
        yield Span(task="forward", resource="compute", start_us=start_us, end_us=middle_us)
        yield Span(task="backward", resource="compute", start_us=middle_us, end_us=middle_us + backward_us)

    @property
    def every_us(self) -> float:
        """Time from the start of a step to that of the next one."""
        return self.iteration_us + self.script_us

    def _gathers(self) -> Iterator[Span]:
        """Yield the gathers of updated weights, which end the step."""
        times_us = self.step.gathers_us if self.step else ()
        start_us = self.iteration_us - min(sum(times_us), self.update_us)
        for index, time_us in enumerate(times_us):
            end_us = min(start_us + time_us, self.iteration_us)
            yield Span(
                task=f"bucket {index} all_gather", resource="network", start_us=start_us, end_us=end_us, bucket=index
            )
            start_us = end_us

    def _late_gather(self, gather: GatherReport) -> Span:
        """Return the span of a gather that was launched when the step before ended."""
        start_us, end_us = (max(0.0, time_us - self.script_us) for time_us in (gather.start_us, gather.end_us))
        which = f"bucket{'s' if gather.buckets[1:] else ''} {', '.join(map(str, gather.buckets))}"
        bucket = None if gather.buckets[1:] else gather.buckets[0]
        return Span(task=f"{which} all_gather", resource="network", start_us=start_us, end_us=end_us, bucket=bucket)

    @property
    def micro_batches(self) -> tuple[int, int]:
        """Return (micro-batches of a step, how many of them exchanged)."""
        before = self.accumulated
        return (1, 1) if before is None else (before.micro_batches + 1, before.exchanged + 1)

    @property
    def measured(self) -> MeasuredStep:
        """Measured step in the form that `planner explain --measured` reads."""
        several = self.accumulated is not None
        micro_batches, exchanged = self.micro_batches if several else (None, None)
        return MeasuredStep.of(
            self.timeline, model=self.model, rank=self.rank, ranks=self.ranks, steps=self.steps,
            micro_batches=micro_batches, exchanged=exchanged, arrivals=self.arrivals or None,
            messages=self.messages or None,
        )  # fmt: skip

    def to_document(self) -> dict[str, Any]:
        """Return `measured` as plain JSON types."""
        return self.measured.to_document()

    def save(self, path: str | Path) -> None:
        """Write `measured` to `path` as JSON, for `planner explain --measured`."""
        self.measured.save(path)

    def metrics(self) -> dict[str, float]:
        """Return the report as plain numbers by name, for TensorBoard and the like; what is not known is left out.

        Times are of one step of the optimizer, in microseconds; docs/howto/metrics.md describes each name.
        """
        known: dict[str, float | None] = {"steps_seen": self.steps, "buckets": len(self.buckets) or None}
        sizes = [bucket.size_bytes for bucket in self.buckets]
        if sizes and None not in sizes:
            known["gradient_bytes"] = sum(size or 0 for size in sizes)
        if self.steps:
            known |= {
                "micro_batches": self.micro_batches[0], "step_us": self.iteration_us, "interval_us": self.every_us,
                "forward_us": self.forward_us, "backward_us": self.backward_us, "wait_us": self.wait_us,
                "update_us": self.update_us, "script_us": self.script_us, "predicted_us": self.predicted_us,
                "prediction_error": self.error,
            }  # fmt: skip
        if self.arrivals:
            last = max(self.arrivals, key=lambda row: row.others_waited_us)
            known |= {"straggler": last.rank, "straggler_us": last.others_waited_us}
        harms = [one.sample.figure / one.sample.limit for one in self.buckets if one.sample and one.sample.limit > 0.0]
        known["compression_harm"] = max(harms, default=None)
        return {name: value for name, value in known.items() if value is not None and math.isfinite(value)}

    def __str__(self) -> str:
        if not self.steps:
            return (
                f"rank {self.rank} of {self.ranks}: no step of this plan was seen whole yet, from the model's forward "
                f"to the last averaged gradient; train on, and call the model itself"
            )
        predicted = ""
        if self.predicted_us is not None and self.error is not None:
            predicted = f", predicted {self.predicted_us / 1e3:.2f} ms ({self.error:+.1%})"
        interface = f"; interface {', '.join(self.interfaces)}" if self.interfaces else ""
        of = f" of {self.accumulated.micro_batches + 1} micro-batches" if self.accumulated else ""
        lines = [
            f"rank {self.rank} of {self.ranks}, {self.steps} steps{of}: "
            f"measured {self.iteration_us / 1e3:.2f} ms{predicted}{interface}",
            *((f"  {self.cause}",) if self.cause is not None else ()),
            f"  forward {self.forward_us / 1e3:.2f}, backward {self.backward_us / 1e3:.2f}, "
            f"waiting {self.wait_us / 1e3:.2f}, update {self.update_us / 1e3:.2f} ms",
        ]
        parts = (self.norms, self.operators, self.step, self.accuracy, self.compiled)
        lines += [f"  {part}" for part in parts if part is not None]
        if self.script_us > 0.0:
            lines.append(
                f"  the script beside it (loading data, clipping, logging) {self.script_us / 1e3:.2f} ms: a step every "
                f"{self.every_us / 1e3:.2f} ms"
            )
        if self.accumulated and self.predicted_us is not None:
            lines.append("  predicted for micro-batches as large as the batch that was profiled")
        late = {one.message: one for one in self.messages}
        buckets = [f"{row}{_late_text(late.get(row.index))}" for row in self.buckets]
        return "\n".join([*lines, *(f"  {row}" for row in (*buckets, *self.arrivals))])


def _late_text(arrival: MessageArrival | None) -> str:
    """Return which rank arrives last at a bucket's message; empty where that is not known."""
    if arrival is None:
        return ""
    return f"; rank {arrival.last_rank} arrives last, {arrival.waited_us / 1e3:.2f} ms behind the first"


@dataclass(frozen=True)
class _Backward:
    """One backward that exchanged, and those before it that only accumulated."""

    marks: StepMarks
    begun: Any
    """Mark of its start: of the forward, or of the end of the backward before if both go through one forward."""
    last_us: tuple[float, float, float]
    """Forward, backward and waiting of the last micro-batch."""
    whole_us: tuple[float, float, float]
    """The same of all micro-batches."""

    @classmethod
    def of(cls, marks: StepMarks, before: StepMarks | None, clock: Clock) -> _Backward | None:
        """Return the times of a backward; None if a mark is missing."""
        apart = marks.forward is None or marks.forward_end is None
        begun = (before.end if before else None) if apart else marks.forward
        middle = begun if apart else marks.forward_end
        if begun is None or marks.backward_end is None or marks.end is None:
            return None
        forward_us, backward_us, wait_us = map(
            clock.between_us, (begun, middle, marks.backward_end), (middle, marks.backward_end, marks.end)
        )
        forwards_us = forward_us + sum(clock.between_us(start, end) for start, end, _ in marks.micro_batches)
        backwards_us = backward_us + sum(clock.between_us(end, over) for _, end, over in marks.micro_batches)
        return cls(marks, begun, (forward_us, backward_us, wait_us), (forwards_us, backwards_us, wait_us))


@dataclass(frozen=True)
class _Step:
    """Backwards and update of one step of the optimizer."""

    backwards: list[_Backward]
    update_us: float
    start: Any
    end: Any

    @property
    def kind(self) -> tuple[int, int]:
        """(micro-batches, how many of them exchanged)."""
        alone = sum(len(one.marks.micro_batches) for one in self.backwards)
        return alone + len(self.backwards), len(self.backwards)

    @property
    def parts(self) -> tuple[float, float, float, float]:
        """Forward, backward, waiting and update."""
        forward_us, backward_us, wait_us = map(sum, zip(*(one.whole_us for one in self.backwards), strict=True))
        return forward_us, backward_us, wait_us, self.update_us

    @property
    def earlier(self) -> list[float]:
        """Forward, backward and waiting before the last micro-batch."""
        return [whole_us - last_us for whole_us, last_us in zip(self.parts, self.backwards[-1].last_us, strict=False)]

    def until(self, mark: Any, clock: Clock) -> float:
        """Return the time from the step's start to a mark of its last backward, without the script's own in between."""
        return sum(self.earlier) + clock.between_us(self.backwards[-1].begun, mark)


def _optimizer_steps(recorded: Sequence[StepMarks], clock: Clock) -> Iterator[_Step]:
    """Return the steps of which all marks are there, each up to the optimizer's where one is seen to step."""
    updated = any(marks.update_end is not None for marks in recorded)
    backwards: list[_Backward | None] = []
    before = None
    for marks in recorded:
        backwards.append(_Backward.of(marks, before, clock))
        before = marks
        if updated and marks.update_end is None:
            continue
        known = [one for one in backwards if one is not None]
        if len(known) == len(backwards):
            # A closure's backward comes after the optimizer's step has begun: then the update is not known apart.
            timed = updated and marks.update is not None
            update_us = clock.between_us(marks.update, marks.update_end) if timed else 0.0
            if timed and marks.aligned is not None:
                update_us += clock.between_us(marks.end, marks.aligned)
            first = known[0].marks.micro_batches
            start = first[0][0] if first else known[0].begun
            yield _Step(known, update_us, start, marks.update_end if updated else marks.end)
        backwards = []


def _middle(steps: Sequence[_Step]) -> list[_Step]:
    """Return the middle half by length, of the kind that most steps are of."""
    if not steps:
        return []
    usual = statistics.mode(step.kind for step in steps)
    ordered = sorted((step for step in steps if step.kind == usual), key=lambda step: sum(step.parts))
    aside = len(ordered) // 4
    return ordered[aside : len(ordered) - aside]


def _script_us(steps: Sequence[_Step], next_forward: Any, clock: Clock) -> float:
    """Return the median of what a step's parts leave of the time until the next one begins."""
    starts = [*(step.start for step in steps[1:]), next_forward][: len(steps)]
    rests = [
        clock.between_us(step.start, start) - sum(step.parts)
        for step, start in zip(steps, starts, strict=True)
        if start is not None
    ]
    return max(0.0, statistics.median(rests)) if rests else 0.0


def make_report(
    plan: Plan, recorder: Recorder, world: World, samples: Mapping[int, Sequence[Sampled]] | None = None,
    sends: str | None = None, *, in_run: bool = False,
) -> Report:  # fmt: skip
    """Return means over the middle half of the recorded steps, without the times of norms and of a sharded step.

    Args:
        plan: the plan of these steps.
        recorder: has the marks of the steps.
        world: the ranks.
        samples: of compressed buckets, by their index.
        sends: collective of all buckets; None: as the plan has it.
        in_run: whether plans are made in the run.
    """
    steps = list(_optimizer_steps(list(recorder.steps), recorder.clock))
    middle = _middle(steps)
    kind = middle[0].kind if middle else (1, 1)
    forward_us, backward_us, wait_us, update_us = _means([one.parts for one in middle], 4)
    predicted = plan.predicted.accumulated(*kind) if plan.predicted is not None else None
    earlier_us = _means([one.earlier for one in middle], 3)
    return Report(
        model=plan.model,
        rank=world.rank,
        ranks=world.ranks,
        steps=sum(one.kind == kind for one in steps),
        forward_us=forward_us,
        backward_us=backward_us,
        update_us=update_us,
        wait_us=wait_us,
        script_us=_script_us(steps, recorder.next_forward, recorder.clock),
        accumulated=None if kind[0] == 1 else Accumulated(
            micro_batches=kind[0] - 1, exchanged=kind[1] - 1, forward_us=earlier_us[0], backward_us=earlier_us[1],
            wait_us=earlier_us[2],
        ),
        predicted_us=None if predicted is None else predicted.iteration_us,
        buckets=tuple(_buckets(plan, predicted, middle, recorder.clock, samples or {}, sends)),
        interfaces=plan.interfaces,
        accuracy=cost_line(plan),
        # Whether micro-batches are as large as the profiled batch is not known, so nothing is said of causes then.
        cause=_cause(plan, list(recorder.steps), recorder.clock, in_run=in_run) if kind == (1, 1) else None,
    )  # fmt: skip


def _cause(plan: Plan, steps: Sequence[StepMarks], clock: Clock, *, in_run: bool) -> str | None:
    known, predicted = complete(steps, clock), predicted_times(plan)
    if len(known) < MIN_STEPS or predicted is None:
        return None
    measured = measured_times(known, clock, with_buckets=False)
    updated = measured.update_us > 0.0  # without an optimizer the update is not timed
    return cause_of_error(
        computed_us=measured.compute_us + measured.update_us,
        predicted_computed_us=predicted.compute_us + (predicted.update_us if updated else 0.0),
        step_us=measured.step_us,
        predicted_step_us=predicted.step_us if updated else predicted.exchanged_us,
        in_run=in_run,
    )


def _means(rows: Sequence[Sequence[float]], columns: int) -> list[float]:
    """Return the mean of each column; zeros where there is no row."""
    return [statistics.fmean(row[column] for row in rows) if rows else 0.0 for column in range(columns)]


def _buckets(
    plan: Plan, said: Prediction | None, steps: Sequence[_Step], clock: Clock,
    samples: Mapping[int, Sequence[Sampled]], sends: str | None,
) -> Iterable[BucketReport]:  # fmt: skip
    lasts = [step.backwards[-1].marks for step in steps]
    if not any(marks.sent and marks.sent[0].end is not None for marks in lasts):
        return

    def mean(marks_of: Iterable[Any]) -> float:
        """Return the mean time from the step's start to a mark of its last backward."""
        known = [step.until(mark, clock) for step, mark in zip(steps, marks_of, strict=True) if mark is not None]
        return statistics.fmean(known) if known else 0.0

    predicted = said.bucket_times(len(plan.buckets)) if said else [None] * len(plan.buckets)
    last, reached_us = -1, mean(marks.backward_end for marks in lasts)
    for index, bucket in enumerate(plan.buckets):
        first, last = last + 1, last + len(bucket.gradients)
        start_us, end_us = predicted[index] or (None, None)
        sent = [marks.sent[index] for marks in lasts]
        # The last of its gradients; those that came in no backward have no mark.
        ready = [[mark for mark in marks.ready[first : last + 1] if mark is not None] for marks in lasts]
        kinds = next((one.phases for one in reversed(sent) if one.phases), [])
        sent_us, done_us = (mean(getattr(one, name) for one in sent) for name in ("start", "end"))
        exposed_us = max(0.0, done_us - max(sent_us, reached_us))
        reached_us, phases = max(reached_us, done_us), []
        for number, (name, link, _, _) in enumerate(kinds):
            marks = [one.phases[number] if number < len(one.phases) else (name, link, None, None) for one in sent]
            begin_us, over_us = mean(one[2] for one in marks), mean(one[3] for one in marks)
            phases.append(PhaseReport(name=name, link=link, start_us=begin_us, end_us=over_us))
        yield BucketReport(
            index=index,
            gradients=len(bucket.gradients),
            size_bytes=bucket.size_bytes,
            ready_us=mean(max(marks) if marks else None for marks in ready),
            launch_us=mean(one.launch for one in sent),
            start_us=sent_us,
            end_us=done_us,
            exposed_us=exposed_us,
            predicted_start_us=start_us,
            predicted_end_us=end_us,
            compressor=bucket.compressor.name,
            sends=sends or bucket.collective,
            sample=samples[index][-1] if samples.get(index) else None,
            phases=tuple(phases),
        )
