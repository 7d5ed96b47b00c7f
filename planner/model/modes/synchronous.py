"""Synchronous: every step ends with the averaged gradient on every rank, all of it or its largest elements."""

from __future__ import annotations

from typing import Any

from planner.documents.text import ms, pluralize
from planner.ir import Bucket, Schedule
from planner.model.codecs import codec_of
from planner.model.engine import run
from planner.model.problem import Problem
from planner.model.reasons import PlanWords, difference, exposure, merging
from planner.model.spending import spending
from planner.model.step import (
    Exchange,
    bucket_costs,
    bucket_costs_step_us,
    exchange_step_us,
    exchange_timeline,
    step_timeline,
)
from planner.model.step_ops import step_ops
from planner.model.updates import update_us
from runtime.plan import Plan
from runtime.plan.timeline import Span, Timeline


def defect(schedule: Schedule, gradients: int) -> str | None:
    """Return None: any schedule is sound."""
    return None


def step_us(problem: Problem, schedule: Schedule) -> float:
    if any(bucket.transport.staged for bucket in schedule.buckets):
        return simulate(problem, schedule).iteration_us
    if all(bucket.whole for bucket in schedule.buckets):
        return exchange_step_us(problem, schedule.buckets, _exchange(problem, schedule))
    # Searches ask this of many schedules, and the engine takes far longer than these sums.
    sparse_us = bucket_costs_step_us(problem, bucket_costs(problem, schedule.buckets))
    return sparse_us - problem.update_us + update_us(problem, schedule)


def simulate(problem: Problem, schedule: Schedule) -> Timeline:
    """Return the timeline: by the closed form of `planner.model.step`, with phases and selection by the engine."""
    if any(not bucket.whole or bucket.transport.staged for bucket in schedule.buckets):
        return _simulate_phases(problem, schedule)
    return exchange_timeline(problem, schedule.buckets, _exchange(problem, schedule))


def _exchange(problem: Problem, schedule: Schedule) -> Exchange:
    return Exchange(
        collectives=[bucket.transport.collective for bucket in schedule.buckets],
        costs_us=problem.bucket_cost_us([bucket.gradients for bucket in schedule.buckets]),
        update_us=update_us(problem, schedule),
    )


def _simulate_phases(problem: Problem, schedule: Schedule) -> Timeline:
    ran = run(step_ops(problem, schedule))
    times = list(zip(ran.ops, ran.start_us, ran.end_us, strict=True))
    gradients_end_us = [end_us for op, _, end_us in times if op.kind == "backward"]
    ready_us = [gradients_end_us[max(bucket.gradients)] for bucket in schedule.buckets]
    messages = [
        Span(
            task=f"bucket {op.bucket} {op.kind}", resource=op.lane, start_us=start_us, end_us=end_us, bucket=op.bucket,
            ready_us=ready_us[op.bucket],
        )
        for op, start_us, end_us in times
        if op.bucket is not None
    ]  # fmt: skip
    messages.sort(key=lambda span: span.start_us)
    network_end_us = max((span.end_us for span in messages), default=0.0)
    return step_timeline(problem, messages, network_end_us, gradients_end_us[-1], _exchange(problem, schedule))


def critical_path(problem: Problem, schedule: Schedule) -> dict[str, float]:
    return run(step_ops(problem, schedule)).shares()


def message_bytes(problem: Problem, schedule: Schedule) -> dict[str, float]:
    total: dict[str, float] = {}
    for bucket in schedule.buckets:
        for message in spending(problem, bucket).messages:
            total[message.resource] = total.get(message.resource, 0.0) + message.sent_bytes
    return total


def assumptions(problem: Problem) -> tuple[list[str], bool]:
    """Return no assumptions beyond the all-reduce's."""
    return [], False


def plan_fields(problem: Problem, schedule: Schedule) -> dict[str, Any]:
    return {}


def describe(plan: Plan) -> PlanWords:
    """Return the description of exact first steps; an empty one without them."""
    if plan.from_step is None:
        return PlanWords()
    first = pluralize(plan.from_step, "exact step")
    return PlanWords(
        line=f"{first} first, in the same buckets; the prediction is of those after them",
        paragraph=f"The run begins with {first} in the same buckets, uncompressed. Prediction and time line are of the "
        f"steps after them.",
    )


def explain(problem: Problem, schedule: Schedule, timeline: Timeline) -> list[str]:
    """Return what merging saves on the link and what a bucket waits for; of a sparse one how much is sent, and what
    that saves; of one with phases what each kind of link carries.
    """
    spans = timeline.on("network")
    computes = not all(bucket.whole for bucket in schedule.buckets)
    backward_end_us = problem.compute_end_us
    phased = len(spans) != len(schedule.buckets)  # several messages for a bucket, on other networks too, or none
    if computes or phased:  # selecting and encoding make backward longer
        backward_end_us = next(span.end_us for span in timeline.spans if span.task == "backward")
    if phased:
        return [
            _explain_phases(problem, bucket, [span for span in timeline.spans if span.bucket == index], backward_end_us)
            for index, bucket in enumerate(schedule.buckets)
        ]
    alone_us = problem.bucket_cost_us([(gradient,) for gradient in range(problem.count)])
    reasons, free_us = [], 0.0
    for bucket, span in zip(schedule.buckets, spans, strict=True):
        late_us = span.end_us - max(backward_end_us, span.start_us)
        if not bucket.whole:
            spent = spending(problem, bucket)
            saved = difference(problem.bucket_cost_us([bucket.gradients])[0] - span.duration_us)
            sent = codec_of(bucket).sent_text()
            text = f"{sent} of {problem.elements(bucket):,} elements: {saved} on the link than dense, "
            text += f"{ms(spent.before_us + spent.after_us)} more of compute"
        else:
            text = merging(bucket, alone_us, span.duration_us)
            if len(bucket.gradients) > 1:
                waited_us = span.start_us - max(free_us, float(problem.ready_us[bucket.gradients[0]]))
                text += f"; the first waits {ms(waited_us)} for the last" if waited_us > 0.0 else "; none waits"
        reasons.append(f"{text}; {exposure(late_us)}")
        free_us = span.end_us
    return reasons


def _explain_phases(problem: Problem, bucket: Bucket, tasks: list[Span], backward_end_us: float) -> str:
    spans = [span for span in tasks if span.resource != "compute"]
    end_us = max((span.end_us for span in spans), default=0.0)
    late_us = end_us - max(backward_end_us, min((span.start_us for span in spans), default=0.0))
    times = [
        f"{ms(sum(span.duration_us for span in spans if span.resource == link))} {where}"
        for link, where in (("intra", "inside nodes"), ("inter", "between them"), ("network", "on the network"))
        if any(span.resource == link for span in spans)
    ]
    flat = difference(problem.bucket_cost_us([bucket.gradients])[0] - sum(span.duration_us for span in spans))
    what = codec_of(bucket).content_text(bucket)
    return f"{what}: {' and '.join(times) or 'nothing to send'}, {flat} than a flat all-reduce; {exposure(late_us)}"
