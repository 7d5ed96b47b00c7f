"""A plan back into a schedule, so that what a plan costs is known on another cluster."""

from __future__ import annotations

from planner.ir import Bucket, Schedule
from planner.model.codecs import BY_NAME
from planner.model.operator_costs import shares_of
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
    # On another number of ranks owners are as they would be planned there.
    norms, operator = (plan.updates.norms, plan.updates.operator) if plan.updates else (None, None)
    shared = norms is not None and norms.shares is not None and problem.norm_layers
    operators = shares_of(problem, operator) if problem.ranks == plan.world.ranks else None
    if operators is None and operator is not None and operator.owners and (found := best_owners(problem)) is not None:
        operators = found.shares
    return Schedule(
        buckets=tuple(_bucket(problem, bucket, index) for bucket in plan.buckets),
        norms=partition_of(problem).owners if shared else None,
        operators=operators,
    )


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
