"""Schedule → plan: names instead of indices, the prediction, and why each bucket is what it is."""

from __future__ import annotations

from planner.ir import Schedule
from planner.problem import Problem
from planner.simulator import simulate_schedule
from planner.sources import three_digits
from runtime.plan import CompressorSpec, Plan, PlanBucket, PlanWorld, PredictedTask, Prediction
from runtime.timeline import Timeline


def predict(problem: Problem, schedule: Schedule, *, timeline: bool = False) -> Prediction:
    """The simulator's word on a schedule, with every task where `timeline` is set."""
    result = simulate_schedule(problem, schedule)
    return Prediction(
        iteration_us=result.iteration_us,
        forward_us=result.forward_us,
        backward_us=result.backward_us,
        update_us=result.update_us,
        exposed_us=result.exposed_us,
        buckets=len(schedule.buckets),
        extrapolated=True if problem.cost.extrapolated else None,
        timeline=_tasks(result) if timeline else None,
    )


def _tasks(timeline: Timeline) -> tuple[PredictedTask, ...]:
    return tuple(
        PredictedTask(
            task=span.task,
            resource=span.resource,
            start_us=span.start_us,
            end_us=span.end_us,
            bucket=span.bucket,
            ready_us=span.ready_us,
        )
        for span in timeline.spans
    )


def lower_buckets(problem: Problem, schedule: Schedule) -> tuple[PlanBucket, ...]:
    """The buckets by name, each with its bytes and its reason."""
    gradients = problem.profile.compute.gradients
    reasons = explain_buckets(problem, schedule)
    return tuple(
        PlanBucket(
            gradients=tuple(gradients[index].name for index in bucket.gradients),
            collective=bucket.collective,
            algorithm=bucket.algorithm,
            compressor=CompressorSpec(name=bucket.compressor),
            size_bytes=int(problem.size_bytes[list(bucket.gradients)].sum()),
            reason=reason,
        )
        for bucket, reason in zip(schedule.buckets, reasons, strict=True)
    )


def explain_buckets(problem: Problem, schedule: Schedule) -> list[str]:
    """One phrase per bucket: what merging its gradients saves on the link, and what it waits for."""
    spans = simulate_schedule(problem, schedule).on("network")
    alone_us = problem.bucket_cost_us([(gradient,) for gradient in range(problem.count)])
    backward_end_us = problem.compute_end_us
    reasons, free_us = [], 0.0
    for bucket, span in zip(schedule.buckets, spans, strict=True):
        members = bucket.gradients
        saved_us = sum(alone_us[gradient] for gradient in members) - span.duration_us
        waited_us = max(0.0, span.start_us - max(free_us, float(problem.ready_us[members[0]])))
        late_us = max(0.0, span.end_us - max(backward_end_us, span.start_us))
        gain = f"saves {_ms(saved_us)} of latency" if saved_us >= 0.0 else f"costs {_ms(-saved_us)} of link time"
        wait = f"waiting {_ms(waited_us)}" if waited_us > 0.0 else "without waiting it"
        text = f"one message for {len(members)}: {wait} {gain}" if len(members) > 1 else "alone"
        reasons.append(f"{text}; {'hidden' if late_us <= 0.0 else _ms(late_us) + ' exposed'}")
        free_us = span.end_us
    return reasons


def _ms(time_us: float) -> str:
    return f"{three_digits(time_us / 1000)} ms"


def lower(problem: Problem, schedule: Schedule) -> Plan:
    """The plan of a schedule, with its prediction and no baselines."""
    cluster = problem.cost.cluster
    return Plan(
        model=problem.profile.model,
        world=PlanWorld(ranks=cluster.ranks, nodes=cluster.nodes),
        accuracy="exact",
        buckets=lower_buckets(problem, schedule),
        predicted=predict(problem, schedule, timeline=True),
    )
