"""Schedule → plan: names instead of indices, the prediction, and why each bucket is what it is."""

from __future__ import annotations

from planner.cost.sparse import FLAT_GATHERS
from planner.emit.reasons import explain_buckets
from planner.emit.updates import updates_of
from planner.ir import Bucket, Schedule, Updaters
from planner.model.compression import shard_elements
from planner.model.delay import StepSpan
from planner.model.problem import Problem
from planner.model.simulator import simulate_schedule
from runtime.errors import InputError
from runtime.plan import Accuracy, CompressorSpec, DelaySpec, LocalAsyncSpec, Plan, PlanBucket, PlanWorld
from runtime.plan.interfaces import SHARDED_STEP
from runtime.plan.names import numbered
from runtime.plan.predicted import PredictedTask, Prediction
from runtime.plan.timeline import Timeline

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
