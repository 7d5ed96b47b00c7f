"""Why each bucket is what it is, in a phrase for plan.json."""

from __future__ import annotations

from collections.abc import Sequence

from planner.emit.text import counted, ms
from planner.ir import Bucket, Schedule, Updaters
from planner.model.delay import PULL, PUSH
from planner.model.delay_load import Load
from planner.model.problem import Problem
from planner.model.sharded_step import gathers_us, pushed_us
from planner.model.simulator import simulate_schedule
from runtime.plan.timeline import Span, Timeline


def explain_buckets(problem: Problem, schedule: Schedule) -> list[str]:
    """One phrase per bucket: what merging its gradients saves on the link, and what it waits for; of a sparse one how
    much travels, and what that saves.
    """
    if schedule.delay is not None or schedule.sharded:
        return _explain_pushes(problem, schedule, schedule.delay or 1)
    if schedule.updaters is not None:
        return _explain_averagings(problem, schedule, schedule.updaters)
    timeline = simulate_schedule(problem, schedule)
    if timeline.on("intra") or timeline.on("inter"):
        return _explain_phases(problem, schedule, timeline)
    spans = timeline.on("network")
    alone_us = problem.bucket_cost_us([(gradient,) for gradient in range(problem.count)])
    backward_end_us = problem.compute_end_us
    if any(bucket.collective == "sparse" for bucket in schedule.buckets):  # selection makes backward longer
        backward_end_us = next(span.end_us for span in timeline.spans if span.task == "backward")
    reasons, free_us = [], 0.0
    for bucket, span in zip(schedule.buckets, spans, strict=True):
        members = bucket.gradients
        if bucket.collective == "sparse":
            reasons.append(_explain_sparse(problem, bucket, span, backward_end_us))
            free_us = span.end_us
            continue
        saved_us = sum(alone_us[gradient] for gradient in members) - span.duration_us
        waited_us = max(0.0, span.start_us - max(free_us, float(problem.ready_us[members[0]])))
        late_us = max(0.0, span.end_us - max(backward_end_us, span.start_us))
        gain = f"saves {ms(saved_us)} of latency" if saved_us >= 0.0 else f"costs {ms(-saved_us)} of link time"
        wait = f"the first waits {ms(waited_us)} for the last" if waited_us > 0.0 else "none waits"
        text = f"one message for {len(members)} {gain}; {wait}" if len(members) > 1 else "alone"
        reasons.append(f"{text}; {'hidden' if late_us <= 0.0 else ms(late_us) + ' exposed'}")
        free_us = span.end_us
    return reasons


def _explain_phases(problem: Problem, schedule: Schedule, timeline: Timeline) -> list[str]:
    """What each kind of link carries of a bucket, and what is exposed of it."""
    backward_end_us = next(span.end_us for span in timeline.spans if span.task == "backward")
    reasons = []
    for index, bucket in enumerate(schedule.buckets):
        spans = [span for span in timeline.spans if span.bucket == index and span.resource != "compute"]
        end_us = max((span.end_us for span in spans), default=0.0)
        late_us = max(0.0, end_us - max(backward_end_us, min((span.start_us for span in spans), default=0.0)))
        links = {"intra": "inside nodes", "inter": "between them"}
        times = [
            f"{ms(sum(span.duration_us for span in spans if span.resource == link))} {where}"
            for link, where in links.items()
            if any(span.resource == link for span in spans)
        ]
        saved_us = problem.bucket_cost_us([bucket.gradients])[0] - sum(span.duration_us for span in spans)
        what = f"{len(bucket.gradients)} gradients" if bucket.k is None else f"k = {bucket.k:,}"
        flat = f"{ms(abs(saved_us))} {'less' if saved_us >= 0.0 else 'more'} than a flat all-reduce"
        hidden = "hidden" if late_us <= 0.0 else f"{ms(late_us)} exposed"
        reasons.append(f"{what}: {' and '.join(times) or 'nothing to send'}, {flat}; {hidden}")
    return reasons


def _explain_pushes(problem: Problem, schedule: Schedule, k: int) -> list[str]:
    """What merging saves in every push, and what push and pull of a bucket take."""
    alone, reasons = [(gradient,) for gradient in range(problem.count)], []
    pushes_us: Sequence[float]
    pulls_us: Sequence[float]
    if schedule.sharded:
        alone_us, pulls_us = pushed_us(problem, alone), gathers_us(problem, schedule.buckets)
        pushes_us = pushed_us(problem, [bucket.gradients for bucket in schedule.buckets])
    else:
        load, alone_us = Load.of(problem, schedule), problem.bucket_cost_us(alone, problem.push.curve)
        pushes_us, pulls_us = load.push_us, load.pull_us
    often = "step" if k == 1 else f"{k} steps"
    for bucket, push_us, pull_us in zip(schedule.buckets, pushes_us, pulls_us, strict=True):
        count = len(bucket.gradients)
        if bucket.k is not None:
            whole_us = problem.bucket_cost_us([bucket.gradients], problem.push.curve)[0]
            elements = int(problem.numel[list(bucket.gradients)].sum())
            reasons.append(
                f"{bucket.k:,} of {elements:,} elements: {PUSH} {ms(push_us)} a step, {ms(abs(whole_us - push_us))} "
                f"{'less' if whole_us >= push_us else 'more'} than whole; {PULL} {ms(pull_us)} every {often}"
            )
            continue
        saved_us = sum(alone_us[gradient] for gradient in bucket.gradients) - push_us
        gain = f"saves {ms(saved_us)} of latency" if saved_us >= 0.0 else f"costs {ms(-saved_us)} of link time"
        text = f"one message for {count} {gain}" if count > 1 else "alone"
        reasons.append(f"{text}; {PUSH} {ms(push_us)} a step, {PULL} {ms(pull_us)} every {often}")
    return reasons


def _explain_averagings(problem: Problem, schedule: Schedule, updaters: Updaters) -> list[str]:
    """What each message is a part of, and what it takes."""
    times_us = problem.bucket_cost_us([bucket.gradients for bucket in schedule.buckets])
    every = f"{counted(updaters.average_every, 'update')}, later every {updaters.then_every}"
    what = "the model, averaged" if len(schedule.buckets) == 1 else "a part of the model, averaged"
    return [f"{what} beside updaters every {every}; {ms(time_us)} alone" for time_us in times_us]


def _explain_sparse(problem: Problem, bucket: Bucket, span: Span, backward_end_us: float) -> str:
    elements, k = int(problem.numel[list(bucket.gradients)].sum()), bucket.k or 0
    dense_us = problem.bucket_cost_us([bucket.gradients])[0]
    spent_us = problem.selection_us(bucket) + problem.selection_us(bucket, "unpack")
    late_us = max(0.0, span.end_us - max(backward_end_us, span.start_us))
    saved_us = dense_us - span.duration_us
    saved = f"{ms(abs(saved_us))} {'less' if saved_us >= 0.0 else 'more'} on the link than dense"
    saved += f", {ms(spent_us)} more of compute"
    return f"{k:,} of {elements:,} elements: {saved}; {'hidden' if late_us <= 0.0 else ms(late_us) + ' exposed'}"
