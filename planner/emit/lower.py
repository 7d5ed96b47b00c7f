"""Lowering a schedule to a plan: names instead of indices, the prediction, and the reason of each bucket."""

from __future__ import annotations

from typing import Any

from planner.ir import Schedule
from planner.model.codecs import codec_of
from planner.model.delay import StepSpan
from planner.model.modes import model_of
from planner.model.modes.late_gather import WindowSpan
from planner.model.norms import gather_us, message_bytes, replicated_us, shared_us
from planner.model.operator_costs import operator_costs
from planner.model.problem import Problem
from planner.model.spending import spending
from planner.search.owners import best_owners
from planner.search.partition import partition_of
from runtime.plan import NormPlan, OperatorPlan, Plan, PlanBucket, PlanWorld, UpdatePlan
from runtime.plan.predicted import PredictedTask, Prediction
from runtime.plan.timeline import Span, Timeline


def lower(problem: Problem, schedule: Schedule) -> Plan:
    """Return the plan of a schedule, with its prediction and no baselines; its class is what the schedule needs."""
    cluster, gradients = problem.cost.cluster, problem.profile.compute.gradients
    model = model_of(schedule)
    timeline = model.simulate(problem, schedule)
    phases = [len(spending(problem, bucket).messages) for bucket in schedule.buckets]
    order = [(bucket, phase) for bucket, count in enumerate(phases) for phase in range(count)]
    buckets = tuple(
        PlanBucket(
            gradients=tuple(gradients[index].name for index in bucket.gradients),
            collective=bucket.transport.collective,
            algorithm=bucket.transport.algorithm,
            compressor=codec_of(bucket).spec(problem, bucket),
            size_bytes=int(problem.size_bytes[list(bucket.gradients)].sum()),
            reason=reason,
        )
        for bucket, reason in zip(schedule.buckets, model.explain(problem, schedule, timeline), strict=True)
    )
    fields = {
        "world": PlanWorld(ranks=cluster.ranks, nodes=cluster.nodes, torch=problem.profile.world.torch),
        "cuts": problem.cuts,
        "updates": _updates(problem, schedule),
        **model.plan_fields(problem, schedule),
    }
    return Plan(
        model=problem.profile.model,
        accuracy=schedule.accuracy,
        buckets=buckets,
        # The order that the simulator assumes; none where no bucket has several phases.
        phase_order=tuple(sorted(order, key=lambda of: (sum(of), of[0]))) if max(phases, default=0) > 1 else None,
        predicted=_prediction(problem, schedule, timeline, tasks=True),
        **fields,
    )


def predict(problem: Problem, schedule: Schedule, *, timeline: bool = False) -> Prediction:
    """Return the simulator's prediction of a schedule, with every task if `timeline` is set."""
    return _prediction(problem, schedule, model_of(schedule).simulate(problem, schedule), tasks=timeline)


def _prediction(problem: Problem, schedule: Schedule, timeline: Timeline, *, tasks: bool) -> Prediction:
    intervals = problem.profile.compute.intervals
    named = (
        PredictedTask(
            **span.task_fields,
            step=span.step if isinstance(span, StepSpan) else None,
            critical=True if isinstance(span, WindowSpan) and span.critical else None,
            **_together(problem, schedule, span),
        )
        for span in timeline.spans
    )
    return Prediction(
        iteration_us=timeline.iteration_us,
        forward_us=timeline.forward_us,
        backward_us=timeline.backward_us,
        update_us=timeline.update_us,
        exposed_us=timeline.exposed_us,
        compute_spread_us=None if intervals is None else round(intervals.spread_us, 3),
        buckets=len(schedule.buckets),
        extrapolated=True if problem.cost.extrapolated else None,
        timeline=tuple(named) if tasks else None,
    )


def _together(problem: Problem, schedule: Schedule, span: Span) -> dict[str, Any]:
    """Return the contents of a message of several buckets; nothing of others, whose bucket has them."""
    if not isinstance(span, WindowSpan) or not span.buckets:
        return {}
    members = [gradient for bucket in span.buckets for gradient in schedule.buckets[bucket].gradients]
    known: dict[str, Any] = {"gradients": len(members), "size_bytes": int(problem.size_bytes[members].sum())}
    return known | ({"first_gradient": min(members)} if max(members) - min(members) < len(members) else {})


def _updates(problem: Problem, schedule: Schedule) -> UpdatePlan | None:
    """Return the part of a plan on norms of layers and operators of matrices; None where there are none to share."""
    norms, operator = _norms(problem, schedule), _operator(problem, schedule)
    return None if norms is None and operator is None else UpdatePlan(norms=norms, operator=operator)


def _operator(problem: Problem, schedule: Schedule) -> OperatorPlan | None:
    costs, found = operator_costs(problem), best_owners(problem)
    if costs is None or found is None:
        return None
    shares = schedule.operators
    if shares is None:
        return OperatorPlan(replicated_us=costs.unshared_us, shared_us=None, bound_us=found.bound_us)
    names = costs.names
    return OperatorPlan(
        owners={names[matrix]: owner for matrix, owner in enumerate(shares.owners) if owner >= 0},
        gathers=tuple(tuple(names[matrix] for matrix in members) for members in shares.messages),
        inside=shares.inside or None,
        batched=tuple(names[matrix] for stack in costs.stacks(shares) for matrix in stack) or None,
        replicated_us=costs.unshared_us,
        shared_us=costs.update(shares).update_us,
        gather_us=sum(costs.gathers_us(shares)),
        message_bytes=sum(costs.message_bytes(shares)),
        bound_us=found.bound_us,
        method=found.method if shares == found.shares else None,
    )


def _norms(problem: Problem, schedule: Schedule) -> NormPlan | None:
    """Return the part of a plan on norms of layers; None where there are none to share."""
    layers = problem.norm_layers
    if not layers or problem.ranks == 1:
        return None
    found = partition_of(problem)
    owners = schedule.norms or found.owners
    shares = None
    if schedule.norms is not None:
        shares = tuple(
            tuple(layer.name for layer, owner in zip(layers, owners, strict=True) if owner == rank)
            for rank in range(problem.ranks)
        )
    return NormPlan(
        shares=shares,
        replicated_us=replicated_us(problem),
        shared_us=shared_us(problem, owners),
        gather_us=gather_us(problem, owners),
        message_bytes=message_bytes(problem, owners),
        bound_us=found.bound,
        method=found.method if owners == found.owners else None,
    )
