"""Whether steps have become slower than the plan predicts, and why: from marks that are taken anyway.

Every rank judges alone, by its own marks, without asking another rank or waiting for a device. What it cannot tell
apart, a slow network and a straggler, late to every message, it says so; `planner.replan` asks all ranks.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from runtime.errors import DriftWarning
from runtime.monitor.clock import Clock
from runtime.monitor.recorder import StepMarks
from runtime.monitor.verdict import Cause, Verdict
from runtime.plan import Plan

WARM_UP_STEPS = 10
"""The first steps of a plan are not judged: caches, allocators and connections are cold."""

WINDOW_STEPS, WINDOWS = 10, 5
"""The last 50 steps are judged, in windows: a pause or some slow steps move the median of one, not of all."""

EVERY_STEPS = 10

SLOWER, NOT_SLOWER = 0.20, 0.10
"""Steps drift when the median of every window is more than 20 % above the prediction, and have stopped to when the
median of all is less than 10 % above it."""

HINT = (
    "planner.replan(session) adapts the plan while the run goes on; or measure again, in the script with "
    "planner.profile_step, or with `planner profile JOB`, and make a new plan with `planner optimize`"
)


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """One step in microseconds, as predicted or as measured on one rank."""

    exchanged_us: float
    """Time from the start of forward to the last averaged gradient."""
    compute_us: float
    """Time from the start of forward to the end of autograd."""
    update_us: float
    buckets_us: tuple[float, ...]
    """Time for which each bucket had the link to itself; empty if unknown."""
    alone_us: float = 0.0
    """Forward and backward of a micro-batch that only accumulates, as predicted."""

    @property
    def step_us(self) -> float:
        return self.exchanged_us + self.update_us


def _compared(found_us: float, planned_us: float) -> str:
    ratio = found_us / planned_us if planned_us > 0.0 else 1.0
    more = f" ({ratio - 1.0:+.0%})" if ratio < 10.0 else f" ({ratio:.0f} times as long)"
    return f"{found_us / 1e3:.2f} ms, predicted {planned_us / 1e3:.2f} ms{more}"


def predicted_times(plan: Plan) -> StepTimes | None:
    """Return what the plan predicts, or None where it does not say enough."""
    said = plan.predicted
    if said is None or said.iteration_us <= 0.0:
        return None
    tasks = said.timeline or ()
    update_us = said.update_us or 0.0
    computed_us = (said.forward_us or 0.0) + (said.backward_us or 0.0)
    backward_end_us = max((task.end_us for task in tasks if task.task == "backward"), default=computed_us)
    sent = [task for task in tasks if task.resource == "network"]
    return StepTimes(
        exchanged_us=max(0.0, said.iteration_us - update_us),
        compute_us=backward_end_us or said.iteration_us - update_us,
        update_us=update_us,
        buckets_us=tuple(task.end_us - task.start_us for task in sent) if len(sent) == len(plan.buckets) else (),
        alone_us=computed_us or backward_end_us,
    )


def measured_times(steps: Sequence[StepMarks], clock: Clock, *, with_buckets: bool = True) -> StepTimes:
    """Medians over steps that are `complete`, of which there is at least one."""

    def median(of: Callable[[StepMarks], tuple[Any, Any]]) -> float:
        spans = [(start, end) for start, end in map(of, steps) if start is not None and end is not None]
        return statistics.median(clock.between_us(*span) for span in spans) if spans else 0.0

    durations = [bucket_times(step, clock) for step in steps] if with_buckets else [()]
    return StepTimes(
        exchanged_us=median(lambda step: (step.forward, step.end)),
        compute_us=median(lambda step: (step.forward, step.backward_end)),
        update_us=median(lambda step: (step.update, step.update_end)),
        buckets_us=tuple(map(statistics.median, zip(*durations, strict=True))) if all(durations) else (),
    )


def bucket_times(step: StepMarks, clock: Clock) -> tuple[float, ...]:
    """Return how long each bucket of a complete step had the link to itself; empty where nothing was sent."""
    times, before = [], None
    for sent in step.sent:
        if sent.start is None or sent.end is None:
            return ()
        # A device's start mark is the launch: the bucket may queue behind the one before it.
        waited_us = max(0.0, clock.between_us(sent.start, before)) if before is not None else 0.0
        times.append(max(0.0, clock.between_us(sent.start, sent.end) - waited_us))
        before = sent.end
    return tuple(times)


def complete(steps: Iterable[StepMarks], clock: Clock) -> list[StepMarks]:
    """Return the steps that have every mark a judgement needs, and that the device is through with."""

    def seen(step: StepMarks) -> bool:
        if step.forward is None or step.backward_end is None or step.end is None:
            return False
        marks = [step.end, *(sent.end for sent in step.sent[-1:] if sent.end is not None)]
        return all(map(clock.reached, marks)) and (step.update_end is None or clock.reached(step.update_end))

    return [step for step in steps if seen(step)]


def judge(steps: Sequence[StepMarks], predicted: StepTimes, clock: Clock, *, drifting: bool = False) -> Verdict | None:
    """Return the verdict on the last steps, as `complete` gives them, oldest first, without the warm-up; None where
    there are too few. `drifting`: whether the last verdict was that steps drift; then less is enough for the next one.
    """
    last = steps[-WINDOW_STEPS * WINDOWS :]
    if len(last) < WINDOW_STEPS * WINDOWS:
        return None
    windows = [last[at : at + WINDOW_STEPS] for at in range(0, len(last), WINDOW_STEPS)]
    # Times of buckets are the most marks to read, and only a drift asks for them.
    measured = measured_times(last, clock, with_buckets=False)
    if all(step.update_end is None for step in last):  # without an optimizer the update is not timed
        predicted = replace(predicted, update_us=0.0)
    medians = [statistics.median(clock.between_us(s.forward, s.end) for s in window) for window in windows]
    slower = min(medians) + measured.update_us > (1.0 + SLOWER) * predicted.step_us
    still = drifting and measured.step_us > (1.0 + NOT_SLOWER) * predicted.step_us
    # Judged is what begins with the forward that exchanges; micro-batches before it are in what is said of the step.
    before, earlier_us = _earlier(last, clock)
    planned_earlier_us = before * predicted.alone_us
    step_us, predicted_us = measured.step_us + earlier_us, predicted.step_us + planned_earlier_us
    cause: Cause = "none"
    of = f" of {before + 1} micro-batches" if before else ""
    text = f"steps{of} take {_compared(step_us, predicted_us)}"
    if slower or still:
        measured = measured_times(last, clock)
        cause = find_cause(measured, predicted)
        found_us, planned_us = measured.buckets_us, predicted.buckets_us
        if cause == "compute":
            planned = predicted.compute_us + predicted.update_us + planned_earlier_us
            found = measured.compute_us + measured.update_us + earlier_us
            why = f"computation is slower on this rank ({_compared(found, planned)})"
        elif cause == "rank":
            first = _compared(found_us[0], planned_us[0])
            why = f"another rank is a straggler: the first message waits ({first}), the others hardly do"
        else:
            times = _compared(sum(found_us), sum(planned_us)) if found_us and planned_us else ""
            messages = f" (messages take {times})" if times else ""
            why = f"the network is slower than it was, or another rank is a straggler{messages}"
        text += f"; likely cause: {why}"
    return Verdict(good=cause == "none", step_us=step_us, other_us=predicted_us, text=text, cause=cause)


def _earlier(steps: Sequence[StepMarks], clock: Clock) -> tuple[int, float]:
    """Return how many micro-batches most steps accumulate before the one that exchanges, and the median of their time
    together.
    """
    usual = statistics.mode(len(step.micro_batches) for step in steps)
    of_usual = [step.micro_batches for step in steps if len(step.micro_batches) == usual]
    return usual, statistics.median(sum(clock.between_us(start, end) for start, _, end in one) for one in of_usual)


def find_cause(measured: StepTimes, predicted: StepTimes) -> Cause:
    """Return what most of the time above the prediction was spent on."""
    excess_us = measured.step_us - predicted.step_us
    computed_us = measured.compute_us + measured.update_us - predicted.compute_us - predicted.update_us
    if 2.0 * computed_us >= excess_us:
        return "compute"
    if len(measured.buckets_us) < 2 or len(measured.buckets_us) != len(predicted.buckets_us):
        return "network"
    first = _excess(measured.buckets_us[:1], predicted.buckets_us[:1])
    others = _excess(measured.buckets_us[1:], predicted.buckets_us[1:])
    return "rank" if first > NOT_SLOWER and others <= max(NOT_SLOWER, first / 4.0) else "network"


def _excess(measured_us: Sequence[float], predicted_us: Sequence[float]) -> float:
    """Return the share of the prediction by which messages took longer."""
    return (sum(measured_us) - sum(predicted_us)) / max(sum(predicted_us), 1e-9)


class DriftGuard:
    """Judges a session's steps now and then, and warns once for each plan."""

    def __init__(self, rank: int, clock: Clock) -> None:
        self._rank, self._clock = rank, clock
        self._predicted: StepTimes | None = None
        self._done = 0
        self._due = 0
        self._warned = False
        self.verdict: Verdict | None = None

    def begin(self, plan: Plan | None) -> None:
        """Begin to judge another plan's steps; None: they are not predicted."""
        self._predicted = None if plan is None else predicted_times(plan)
        self._done, self._due = 0, WARM_UP_STEPS + WINDOW_STEPS * WINDOWS
        self._warned, self.verdict = False, None

    def step_done(self, steps: Iterable[StepMarks]) -> None:
        """Judge now and then, after a step, the last steps of this plan. Warns (DriftWarning), once, if they drift."""
        self._done += 1
        if self._done < self._due or self._predicted is None:
            return
        self._due += EVERY_STEPS
        drifting = self.verdict is not None and not self.verdict.good
        judged = complete(steps, self._clock)
        self.verdict = judge(judged, self._predicted, self._clock, drifting=drifting) or self.verdict
        if self._warned or self.verdict is None or self.verdict.good:
            return
        self._warned = True
        count = WINDOW_STEPS * WINDOWS
        warnings.warn(f"rank {self._rank}, last {count} steps: {self.verdict.text}. {HINT}", DriftWarning, stacklevel=2)


def warn_of_torch(plan: Plan) -> None:
    """Warn where the plan was profiled with another version of torch, whose times need not be this one's."""
    profiled, here = (version and version.partition("+")[0] for version in (plan.world.torch, torch.__version__))
    if profiled and profiled != here:
        warnings.warn(
            f"the plan was profiled with torch {profiled}, and this is torch {here}, whose steps may take longer or "
            f"shorter: profile and optimize again where they do (`session.report()`)",
            DriftWarning,
            stacklevel=3,
        )
