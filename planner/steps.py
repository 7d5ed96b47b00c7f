"""What a plan says of the optimizer's step: shared by ranks or not, with the prediction of both, and in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from planner.ir import Schedule
from planner.offer import GAIN
from planner.passes import Pass
from planner.passes.shard_updates import ShardUpdates
from planner.pipeline import run_passes
from planner.problem import Problem
from planner.sharding import (
    can_share,
    costs_known,
    gathers_us,
    leaves_out,
    memory_bytes,
    replicated_bytes,
    sharded_bytes,
)
from planner.simulator import step_us
from planner.sources import three_digits
from runtime.errors import InputError
from runtime.plan import Plan, StepPlan, UpdatePlan

LEAVES_OUT = (
    "ranks do not share the optimizer's step, and cannot: it does not hold all parameters that have gradients; add "
    "the others, or freeze them before profiling"
)


def with_memory(passes: Sequence[Pass], memory_mib: float | None) -> tuple[Pass, ...]:
    """The passes with what each rank has, where they have no value of their own."""
    return tuple(
        replace(each, memory_mib=each.memory_mib or memory_mib or 0.0) if isinstance(each, ShardUpdates) else each
        for each in passes
    )


def check_memory(memory_mib: float | None) -> float | None:
    """The limit; raises InputError where it is none."""
    if memory_mib is not None and not 0.0 < memory_mib < math.inf:
        raise InputError(
            f"--max-memory-mib: found {memory_mib:g}, expected MiB of memory on each rank, such as 40000; correct it"
        )
    return memory_mib


def demanded(problem: Problem, passes: Sequence[Pass]) -> bool:
    """Whether what every rank would hold does not fit into its memory."""
    return any(isinstance(each, ShardUpdates) and each.demanded(problem) for each in passes)


def beside_shared(shared: Plan, riskier: Plan, *, demanded: bool, making_us: float) -> Plan:
    """The exact plan whose ranks share the step, or the riskier one, which cannot, where that wins by 2 %.

    Args:
        shared: the exact plan.
        riskier: what was chosen beside the best exact plan whose ranks share nothing; perhaps that itself.
        demanded: whether memory demands that ranks share.
        making_us: what making a minibatch takes, which is in the times of local updaters alone.
    """
    exact_us, risky_us = (plan.predicted.iteration_us if plan.predicted else 0.0 for plan in (shared, riskier))
    exact_us += making_us if riskier.local_async is not None else 0.0
    wins = riskier.accuracy != "exact" and risky_us <= exact_us * (1.0 - GAIN)
    if wins and not demanded:
        return riskier
    others = dict(riskier.alternatives or {})
    if riskier.accuracy != "exact":
        others = {**others, riskier.accuracy: replace(riskier, baselines=None, scaling=None, fallback=None,
                                                      alternatives=None)}  # fmt: skip
    others.pop("exact", None)
    why = "memory demands a shared step, which lossy plans do not have" if demanded else (
        f"none wins {GAIN:.0%} over ranks that share the optimizer's step")  # fmt: skip
    return replace(
        shared, frontier=riskier.frontier, delays=riskier.delays, updaters=riskier.updaters,
        alternatives=others or None,
        notes=(*shared.notes, f"riskier plans were allowed, but {why}: the plan is exact"),
    )  # fmt: skip


def other_way(problem: Problem, schedule: Schedule, start: Schedule, passes: Sequence[Pass]) -> Schedule | None:
    """The best exact schedule that shares the step where `schedule` does not, or the reverse; None: there is none.

    Args:
        problem: the step.
        schedule: what the passes have made of `start`.
        start: what they began with.
        passes: the exact ones.
    """
    sharing = next((each for each in passes if isinstance(each, ShardUpdates)), None)
    if sharing is None:
        return None
    if not schedule.sharded:
        return sharing.shared_step(replace(schedule, norms=None), problem)
    never = [replace(each, step="never") if isinstance(each, ShardUpdates) else each for each in passes]
    return run_passes(never, start, problem)


def with_step(problem: Problem, plan: Plan, schedule: Schedule, other: Schedule | None, passes: Sequence[Pass]) -> Plan:
    """The plan with both predictions, where ranks could share the step, and what its reader should know."""
    sharing = next((each for each in passes if isinstance(each, ShardUpdates)), None)
    if sharing is not None and sharing.step != "never" and leaves_out(problem):
        return replace(plan, notes=(*plan.notes, LEAVES_OUT))
    if sharing is None or not can_share(problem):
        return plan
    shared, whole = (schedule, other) if schedule.sharded else (other, schedule)
    step = StepPlan(
        sharded=schedule.sharded,
        replicated_us=None if whole is None else step_us(problem, whole),
        sharded_us=None if shared is None else step_us(problem, shared),
        gather_us=None if shared is None else sum(gathers_us(problem, shared.buckets)),
        replicated_bytes=replicated_bytes(problem),
        sharded_bytes=None if shared is None else sharded_bytes(problem, shared),
        memory_bytes=memory_bytes(problem, sharing.memory_mib),
    )
    norms = plan.updates.norms if plan.updates else None
    notes = (*plan.notes, *_notes(problem, step, sharing))
    return replace(plan, updates=UpdatePlan(norms=norms, step=step), notes=notes)


def _notes(problem: Problem, step: StepPlan, sharing: ShardUpdates) -> list[str]:
    if step.sharded_us is None or step.replicated_us is None:
        return []
    times = f"predicted {_ms(step.sharded_us)} a step, {_ms(step.replicated_us)} where every rank updates all weights"
    memory = _memory(step)
    implied = "" if costs_known(problem) else "; reduce-scatter and all-gather were not measured: profile again"
    if not step.sharded:
        return [] if sharing.step != "auto" else [
            f"ranks do not share the optimizer's step: sharing is {times} as now; it has to be {GAIN:.0%} shorter"
            f"{memory}{implied}"
        ]  # fmt: skip
    name = problem.profile.compute.optimizer.name if problem.profile.compute.optimizer else "the optimizer"
    why = "memory demands it, " if sharing.demanded(problem) else ""
    notes = [
        f"ranks share the step of {name} (as ZeRO-1): {why}{times}, of it {_ms(step.gather_us or 0.0)} to gather "
        f"weights{memory}{implied}",
        "between backward and step gradients can be scaled, clamped, zeroed and clipped by norms, and not read; "
        "checkpoints take session.optimizer_state_dict() on every rank",
    ]
    if step.memory_bytes is not None and (step.sharded_bytes or 0) > step.memory_bytes:
        notes.append(
            f"even so a rank needs more than its {_mib(step.memory_bytes)}: take more ranks, or a smaller batch"
        )
    return notes


def _memory(step: StepPlan) -> str:
    if step.replicated_bytes is None or step.sharded_bytes is None:
        return "; the profile does not say what the optimizer keeps"
    has = "" if step.memory_bytes is None else f", of {_mib(step.memory_bytes)}"
    takes = f"{_mib(step.sharded_bytes)} on each rank instead of {_mib(step.replicated_bytes)}"
    return f"; shared, weights, gradients, state and known activations take {takes}{has}"


def _mib(size_bytes: int) -> str:
    return f"{three_digits(size_bytes / 2**20)} MiB"


def _ms(time_us: float) -> str:
    return f"{three_digits(time_us / 1000)} ms"
