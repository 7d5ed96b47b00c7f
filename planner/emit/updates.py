"""What plan.json says of the update."""

from __future__ import annotations

from planner.ir import Schedule
from planner.model.norms import gather_us, message_bytes, replicated_us, shared_us
from planner.model.problem import Problem
from planner.model.sharded_step import gathers_us
from planner.search.partition import partition_of
from runtime.plan import NormPlan, StepPlan, UpdatePlan


def updates_of(problem: Problem, schedule: Schedule) -> UpdatePlan | None:
    """What a plan says of the update; None where there is nothing to share."""
    layers = problem.norm_layers
    if schedule.sharded:
        return UpdatePlan(step=StepPlan(sharded=True, gather_us=sum(gathers_us(problem, schedule.buckets))))
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
    return UpdatePlan(
        norms=NormPlan(
            shares=shares,
            replicated_us=replicated_us(problem),
            shared_us=shared_us(problem, owners),
            gather_us=gather_us(problem, owners),
            message_bytes=message_bytes(problem, owners),
            bound_us=found.bound,
            method=found.method if owners == found.owners else None,
        )
    )
