"""A plan back into a schedule, so that what a plan costs is known on another cluster."""

from __future__ import annotations

from planner.ir import Bucket, OperatorShares, Schedule
from planner.model.codecs import BY_NAME
from planner.model.operator_costs import operator_costs
from planner.model.problem import Problem
from planner.search.owners import best_owners
from planner.search.partition import partition_of
from runtime.errors import InputError
from runtime.plan import Plan, PlanBucket


def schedule_of(problem: Problem, plan: Plan) -> Schedule:
    """Return the schedule of a plan whose steps are synchronous; the inverse of `planner.emit.lower.lower`.

    Args:
        problem: the profile that the plan was made from, on any cluster.
        plan: the plan.

    Raises:
        InputError: the plan has a delay, outer steps, local updaters or a sharded optimizer step; or gradients or a
            compressor that the profile or the cost model do not know.
    """
    if not plan.synchronous:
        modes = {"a delay": plan.delay, "outer steps": plan.outer, "local updaters": plan.local_async}
        mode = next((name for name, spec in modes.items() if spec is not None), "a sharded optimizer step")
        raise InputError(
            f"found a plan with {mode}, expected synchronous buckets, whose times on "
            f"another cluster can be predicted: leave --on out"
        )
    index = {gradient.name: place for place, gradient in enumerate(problem.profile.compute.gradients)}
    if odd := next((name for name in plan.gradients if name not in index), None):
        raise InputError(f"found no gradient {odd!r} in the profile, expected the profile that the plan was made from")
    buckets = tuple(_bucket(problem, bucket, index) for bucket in plan.buckets)
    return Schedule(buckets=buckets, norms=_norms(problem, plan), operators=_operators(problem, plan))


def _norms(problem: Problem, plan: Plan) -> tuple[int, ...] | None:
    """Return the owners of norms, or the best ones on another number of ranks; None where every rank computes all."""
    norms = plan.updates.norms if plan.updates else None
    if norms is None or norms.shares is None or not problem.norm_layers:
        return None
    if problem.ranks != plan.world.ranks:
        return partition_of(problem).owners
    owners = {name: rank for rank, names in enumerate(norms.shares) for name in names}
    return tuple(owners[layer.name] for layer in problem.norm_layers)


def _operators(problem: Problem, plan: Plan) -> OperatorShares | None:
    """Return the owners and messages of operators; as of `_norms`."""
    operator, costs = plan.updates.operator if plan.updates else None, operator_costs(problem)
    if operator is None or not operator.owners or costs is None:
        return None
    if problem.ranks != plan.world.ranks:
        found = best_owners(problem)
        return None if found is None else found.shares
    owners, matrices = operator.owners, {name: matrix for matrix, name in enumerate(costs.names)}
    messages = tuple(tuple(matrices[name] for name in members) for members in operator.messages)
    return OperatorShares(tuple(owners.get(name, -1) for name in costs.names), messages)


def _bucket(problem: Problem, bucket: PlanBucket, index: dict[str, int]) -> Bucket:
    made = Bucket(tuple(index[name] for name in bucket.gradients), bucket.transport)
    if bucket.dense:
        return made
    codec = BY_NAME.get(bucket.compressor.name)
    if codec is None:
        raise InputError(
            f"found the compressor {bucket.compressor.name!r}, expected one of: {', '.join(sorted(BY_NAME))}"
        )
    return codec.of_spec(bucket.compressor, problem, made)
