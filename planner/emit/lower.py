"""Schedule → plan: names instead of indices, the prediction, and why each bucket is what it is."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.sparse import FLAT_GATHERS
from planner.emit.sources import counted, three_digits
from planner.ir import Bucket, Schedule, Updaters
from planner.model.compression import shard_elements
from planner.model.delay import PULL, PUSH, StepSpan
from planner.model.delay_load import Load
from planner.model.norms import updates_of
from planner.model.problem import Problem
from planner.model.sharded_step import gathers_us, pushed_us
from planner.model.simulator import simulate_schedule
from runtime.errors import InputError
from runtime.plan import Accuracy, CompressorSpec, DelaySpec, LocalAsyncSpec, Plan, PlanBucket, PlanWorld
from runtime.plan.interfaces import SHARDED_STEP
from runtime.plan.names import numbered
from runtime.plan.predicted import PredictedTask, Prediction
from runtime.plan.timeline import Span, Timeline

WARMUP_STEPS = 500
"""Synchronous steps before delay, rounded up to a multiple of k."""


def predict(problem: Problem, schedule: Schedule, *, timeline: bool = False) -> Prediction:
    """The simulator's word on a schedule, with every task where `timeline` is set."""
    result, intervals = simulate_schedule(problem, schedule), problem.profile.compute.intervals
    return Prediction(
        iteration_us=result.iteration_us,
        forward_us=result.forward_us,
        backward_us=result.backward_us,
        update_us=result.update_us,
        exposed_us=result.exposed_us,
        compute_spread_us=None if intervals is None else round(intervals.spread_us, 3),
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
            step=span.step if isinstance(span, StepSpan) else None,
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
            compressor=compressor_of(problem, bucket),
            size_bytes=int(problem.size_bytes[list(bucket.gradients)].sum()),
            reason=reason,
        )
        for bucket, reason in zip(schedule.buckets, reasons, strict=True)
    )


def compressor_of(problem: Problem, bucket: Bucket) -> CompressorSpec:
    """The compressor by name, with k for each layer; a layer that comes back in the bucket is numbered: `conv#2`."""
    if bucket.ks is None and bucket.k is not None and bucket.algorithm in FLAT_GATHERS:
        elements = int(problem.numel[list(bucket.gradients)].sum())
        density = min(1.0, (bucket.k + 0.5) / elements)  # of which the floor is k, whatever is rounded
        return CompressorSpec(name=bucket.compressor, selector="exact", density=density, scope="bucket")
    if bucket.algorithm == "hitopk" and bucket.k is not None:
        shard = shard_elements(problem, int(problem.numel[list(bucket.gradients)].sum()))
        density = min(1.0, (bucket.k + 0.5) / shard)
        return CompressorSpec(name=bucket.compressor, selector=problem.hitopk_selector, density=density, scope="bucket")
    if bucket.ks is None:
        return CompressorSpec(name=bucket.compressor)
    names = [problem.layers_by_name[index] for index in bucket.gradients]
    runs = [name for index, name in enumerate(names) if index == 0 or name != names[index - 1]]
    k: dict[str, int] = {}
    for name, unique, count in zip(runs, numbered(runs), bucket.ks, strict=True):
        if unique in k or (unique != name and unique in runs):
            raise InputError(
                f"the layer {unique!r}: found it beside two runs of gradients of the layer {name!r} in one bucket, "
                f"expected names that tell them apart; rename the layer, or add --protect '{name}.*'"
            )
        k[unique] = count
    return CompressorSpec(name=bucket.compressor, selector="exact", k=k)


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
        gain = f"saves {_ms(saved_us)} of latency" if saved_us >= 0.0 else f"costs {_ms(-saved_us)} of link time"
        wait = f"the first waits {_ms(waited_us)} for the last" if waited_us > 0.0 else "none waits"
        text = f"one message for {len(members)} {gain}; {wait}" if len(members) > 1 else "alone"
        reasons.append(f"{text}; {'hidden' if late_us <= 0.0 else _ms(late_us) + ' exposed'}")
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
            f"{_ms(sum(span.duration_us for span in spans if span.resource == link))} {where}"
            for link, where in links.items()
            if any(span.resource == link for span in spans)
        ]
        saved_us = problem.bucket_cost_us([bucket.gradients])[0] - sum(span.duration_us for span in spans)
        what = f"{len(bucket.gradients)} gradients" if bucket.k is None else f"k = {bucket.k:,}"
        flat = f"{_ms(abs(saved_us))} {'less' if saved_us >= 0.0 else 'more'} than a flat all-reduce"
        hidden = "hidden" if late_us <= 0.0 else f"{_ms(late_us)} exposed"
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
                f"{bucket.k:,} of {elements:,} elements: {PUSH} {_ms(push_us)} a step, {_ms(abs(whole_us - push_us))} "
                f"{'less' if whole_us >= push_us else 'more'} than whole; {PULL} {_ms(pull_us)} every {often}"
            )
            continue
        saved_us = sum(alone_us[gradient] for gradient in bucket.gradients) - push_us
        gain = f"saves {_ms(saved_us)} of latency" if saved_us >= 0.0 else f"costs {_ms(-saved_us)} of link time"
        text = f"one message for {count} {gain}" if count > 1 else "alone"
        reasons.append(f"{text}; {PUSH} {_ms(push_us)} a step, {PULL} {_ms(pull_us)} every {often}")
    return reasons


def _explain_averagings(problem: Problem, schedule: Schedule, updaters: Updaters) -> list[str]:
    """What each message is a part of, and what it takes."""
    times_us = problem.bucket_cost_us([bucket.gradients for bucket in schedule.buckets])
    every = f"{counted(updaters.average_every, 'update')}, later every {updaters.then_every}"
    what = "the model, averaged" if len(schedule.buckets) == 1 else "a part of the model, averaged"
    return [f"{what} beside updaters every {every}; {_ms(time_us)} alone" for time_us in times_us]


def _explain_sparse(problem: Problem, bucket: Bucket, span: Span, backward_end_us: float) -> str:
    elements, k = int(problem.numel[list(bucket.gradients)].sum()), bucket.k or 0
    dense_us = problem.bucket_cost_us([bucket.gradients])[0]
    spent_us = problem.selection_us(bucket) + problem.selection_us(bucket, "unpack")
    late_us = max(0.0, span.end_us - max(backward_end_us, span.start_us))
    saved_us = dense_us - span.duration_us
    saved = f"{_ms(abs(saved_us))} {'less' if saved_us >= 0.0 else 'more'} on the link than dense"
    saved += f", {_ms(spent_us)} more of compute"
    return f"{k:,} of {elements:,} elements: {saved}; {'hidden' if late_us <= 0.0 else _ms(late_us) + ' exposed'}"


def _ms(time_us: float) -> str:
    return f"{three_digits(time_us / 1000)} ms"


def accuracy_of_schedule(schedule: Schedule) -> Accuracy:
    """The class of a schedule: relaxed with delay or local updaters, bounded where a part of a gradient is kept."""
    if schedule.delay is not None or schedule.updaters is not None:
        return "relaxed"
    return "exact" if all(bucket.compressor == "none" for bucket in schedule.buckets) else "bounded"


def delay_spec(k: int) -> DelaySpec:
    """SSD-SGD; its synchronous steps are a multiple of k, as the paper asks.

    Local steps are about as long as the paper's (α + β times `local_lr_scale` learning rates), but go more the way
    of all workers and less in that of one batch: that trained better models wherever the two differed
    (`benchmarks.delay`).
    """
    return DelaySpec(steps=k, warmup_steps=-(-WARMUP_STEPS // k) * k, alpha=0.75, beta=2.0)


def local_async_spec(problem: Problem, updaters: Updaters) -> LocalAsyncSpec:
    """LAP-SGD, LPP-SGD or local SGD, with the paper's fractions."""
    gradients = problem.profile.compute.gradients
    blocks = tuple(tuple(gradients[index].name for index in block) for block in updaters.blocks)
    return LocalAsyncSpec(
        updaters=updaters.count,
        blocks=blocks or None,
        average_every=updaters.average_every,
        then_every=updaters.then_every,
        synchronous=updaters.waits or None,
    )


def phase_order(problem: Problem, schedule: Schedule) -> tuple[tuple[int, int], ...] | None:
    """(bucket, phase) in the order that the simulator assumes; None where no bucket has several."""
    counts = [len(problem.phase_times(bucket)) for bucket in schedule.buckets]
    if all(count <= 1 for count in counts):
        return None
    order = [(bucket, phase) for bucket, count in enumerate(counts) for phase in range(count)]
    return tuple(sorted(order, key=lambda entry: (sum(entry), entry[0])))


def lower(problem: Problem, schedule: Schedule) -> Plan:
    """The plan of a schedule, with its prediction and no baselines; its class is what the schedule needs."""
    cluster = problem.cost.cluster
    return Plan(
        model=problem.profile.model,
        world=PlanWorld(ranks=cluster.ranks, nodes=cluster.nodes, torch=problem.profile.world.torch),
        accuracy=accuracy_of_schedule(schedule),
        interface=(SHARDED_STEP,) if schedule.sharded else None,
        buckets=lower_buckets(problem, schedule),
        delay=None if schedule.delay is None else delay_spec(schedule.delay),
        local_async=None if schedule.updaters is None else local_async_spec(problem, schedule.updaters),
        phase_order=phase_order(problem, schedule),
        predicted=predict(problem, schedule, timeline=True),
        updates=updates_of(problem, schedule),
    )
