"""The optimizer's step: whether ranks may share it (`--allow sharded-step`), and what a plan says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.decide.pipeline import run_passes
from planner.documents.text import as_names, mib, ms
from planner.ir import Schedule
from planner.model.modes import describe, step_us
from planner.model.modes.late_gather import LateGather, described_needs
from planner.model.modes.sharded import (
    can_share,
    costs_known,
    gathers_us,
    memory_bytes,
    not_shared_reason,
    replicated_bytes,
    sharded_bytes,
)
from planner.model.problem import Problem
from planner.passes.base import GAIN, Pass
from planner.passes.late_gather import LateGathers, late_gathers, needed_bytes
from planner.passes.shard_updates import ShardUpdates
from runtime.errors import InputError
from runtime.pages import page
from runtime.plan import Plan, StepPlan, UpdatePlan
from runtime.plan.interfaces import BFLOAT16_WEIGHTS, INTERFACES, LATE_GATHER, SHARDED_STEP, granted, name_problem

ALLOW = f"--allow {SHARDED_STEP}"
SMALLER = "take more ranks, or a smaller batch"


def check_allow(allow: str | Sequence[str]) -> tuple[str, ...]:
    """The names (or the one name) with those that they imply; raises InputError where one is unknown."""
    allow = as_names(allow)
    for name in allow:
        if (problem := name_problem(name)) is not None:
            raise InputError(f"--allow: {problem}; correct it, or leave it out: plans then are drop-in")
        if name == BFLOAT16_WEIGHTS:
            raise InputError(
                f"--allow: found {name}, which no plan of `planner optimize` asks for yet; expected none of it: leave "
                f"it out, and write updates.step.weights into a plan yourself ({page('concepts/sharded-step')})"
            )
    return tuple(name for name in INTERFACES if name in granted(allow))


def find_sharing(passes: Sequence[Pass]) -> ShardUpdates | None:
    """The pass that decides whether ranks share the step; None where it is not among the passes."""
    return next((each for each in passes if isinstance(each, ShardUpdates)), None)


def allowed_passes(passes: Sequence[Pass], allow: Sequence[str]) -> tuple[Pass, ...]:
    """The passes, of which none shares the optimizer's step, or gathers weights beside forward, where that is not
    allowed; `allow` as of `check_allow`.

    Raises:
        InputError: one of them was told to, and that is not allowed.
    """
    if LATE_GATHER not in allow and any(isinstance(each, LateGathers) and each.when == "always" for each in passes):
        raise InputError(
            f"--passes: found late_gather{{when=always}}, where new weights arrive beside the next forward, so that "
            f"some lines which work with DDP do not; expected --allow {LATE_GATHER} beside it: add that, or leave "
            f"when=always out"
        )
    passes = [each for each in passes if not each.interface or each.interface in allow]
    if SHARDED_STEP in allow:
        return tuple(passes)
    sharing = find_sharing(passes)
    if sharing is not None and sharing.step == "always":
        raise InputError(
            f"--passes: found shard_updates{{step=always}}, where ranks share the optimizer's step, so that some lines "
            f"which work with DDP do not ({page('concepts/sharded-step')}); expected --allow {SHARDED_STEP} beside it: "
            f"add that, or leave step=always out"
        )
    return tuple(replace(each, step="never") if isinstance(each, ShardUpdates) else each for each in passes)


def choose_over_sharded(shared: Plan, riskier: Plan, *, memory_requires_sharding: bool, batch_prep_us: float) -> Plan:
    """The exact plan whose ranks share the step, or the riskier one, which cannot, where that wins by 2 %.

    `riskier` is what was chosen beside the best exact plan whose ranks share nothing; perhaps that itself.
    """
    exact_us, risky_us = (plan.predicted.iteration_us if plan.predicted else 0.0 for plan in (shared, riskier))
    exact_us += batch_prep_us if describe(riskier).makes_batches else 0.0
    wins = riskier.accuracy != "exact" and risky_us <= exact_us * (1.0 - GAIN)
    if wins and not memory_requires_sharding:
        return riskier
    others = dict(riskier.alternatives or {})
    if riskier.accuracy != "exact":
        others = {**others, riskier.accuracy: replace(riskier, baselines=None, scaling=None, fallback=None,
                                                      alternatives=None)}  # fmt: skip
    others.pop("exact", None)
    why = "memory demands a shared step, which lossy plans do not have" if memory_requires_sharding else (
        f"none wins {GAIN:.0%} over ranks that share the optimizer's step")  # fmt: skip
    return replace(
        shared, frontier=riskier.frontier, delays=riskier.delays, updaters=riskier.updaters,
        alternatives=others or None,
        notes=(*shared.notes, f"riskier plans were allowed, but {why}: the plan is exact"),
    )  # fmt: skip


def alternative(
    problem: Problem, schedule: Schedule, start: Schedule, passes: Sequence[Pass], sharing: ShardUpdates | None
) -> Schedule | None:
    """The best exact schedule that shares the step where `schedule`, made of `start`, does not, or the reverse."""
    if not schedule.mode.shares_update:
        return None if sharing is None else sharing.shared_step(replace(schedule, norms=None), problem)
    apart = [each for each in passes if not (isinstance(each, LateGathers) or each.required)]
    never = [replace(each, step="never") if isinstance(each, ShardUpdates) else each for each in apart]
    return run_passes(never, start, problem).schedule


def attach_step_plan(
    problem: Problem, plan: Plan, schedule: Schedule, other: Schedule | None, sharing: ShardUpdates | None,
    *, late: bool = False,
) -> Plan:  # fmt: skip
    """The plan with all predictions, where ranks could share the step; `late`: also of gathers beside forward."""
    if sharing is None or not can_share(problem):
        return plan
    shared, whole = (schedule, other) if schedule.mode.shares_update else (other, schedule)
    step = _step(plan) or StepPlan(sharded=schedule.mode.shares_update)
    late_us = None
    needs_bytes = None if shared is None else sharded_bytes(problem, shared)
    if isinstance(schedule.mode, LateGather):
        late_us, needs_bytes = step_us(problem, schedule), needed_bytes(problem, schedule)
        shared = None if whole is None else sharing.shared_step(replace(whole, norms=None), problem)
    elif late:
        late_us = step_us(problem, late_gathers(problem).schedule)
    step = replace(
        step,
        replicated_us=None if whole is None else step_us(problem, whole),
        sharded_us=None if shared is None else step_us(problem, shared),
        gather_us=step.gather_us or (None if shared is None else sum(gathers_us(problem, shared.buckets))),
        replicated_bytes=replicated_bytes(problem),
        sharded_bytes=needs_bytes,
        memory_bytes=memory_bytes(problem, sharing.memory_mib),
        late_us=late_us,
    )
    return replace(plan, updates=UpdatePlan(norms=plan.updates.norms if plan.updates else None, step=step))


def with_notes(problem: Problem, plan: Plan, sharing: ShardUpdates | None) -> Plan:
    """The plan, which says why ranks share the optimizer's step, or do not: for a reader who has allowed it."""
    step = _step(plan)
    if sharing is None or sharing.step == "never":
        return plan
    reason = not_shared_reason(problem)
    if reason is not None and problem.ranks > 1:
        notes = [f"ranks do not share the optimizer's step, as they may: {reason}"]
    else:
        notes = [] if step is None else _notes(problem, step, sharing)
    return replace(plan, notes=(*plan.notes, *notes))


def with_gain(problem: Problem, plan: Plan, exact: Plan, sharing: ShardUpdates | None, *, batch_prep_us: float) -> Plan:
    """The plan, in which ranks were not allowed to share the step, with a line of what they would gain; as it was where
    they would not. `exact` is the exact one beside it, or itself, with both predictions.
    """
    step = _step(exact)
    if sharing is None or step is None or step.sharded_us is None:
        return plan
    own_us = plan.predicted.iteration_us if plan.predicted else 0.0
    own_us -= batch_prep_us if describe(plan).makes_batches else 0.0
    if sharing.memory_requires_sharding(problem):
        return replace(plan, notes=(*plan.notes, _too_large(replace(step, replicated_us=own_us))))
    if not costs_known(problem) or step.sharded_us > own_us * (1.0 - GAIN):
        return plan
    memory = f", and {_memory(step)}" if _saves(step) else ""
    line = (
        f"allowed to share the optimizer's step (as ZeRO-1), ranks would take {ms(step.sharded_us)} a step instead of "
    )
    line += f"{ms(own_us)}{memory}; some lines that work with DDP then do not: {page('concepts/sharded-step')}, {ALLOW}"
    return replace(plan, notes=(*plan.notes, line))


def _step(plan: Plan) -> StepPlan | None:
    return plan.updates.step if plan.updates else None


def _saves(step: StepPlan) -> bool:
    """Whether a shared step takes less memory, as far as the digits go that are said."""
    shared, whole = step.sharded_bytes, step.replicated_bytes
    return shared is not None and whole is not None and shared < whole and mib(shared) != mib(whole)


def _too_large(step: StepPlan) -> str:
    """What is said of a plan that does not fit into a rank's memory, and whether sharing the step would."""
    has, whole, shared = step.memory_bytes or 0, step.replicated_bytes or 0, step.sharded_bytes or 0
    text = f"a rank needs {mib(whole)} for weights, gradients, the optimizer's state and known activations, more than "
    text += f"the {mib(has)} that it has"
    if not _saves(step):
        return f"{text}: {SMALLER}"
    if shared > has:
        return f"{text}; sharing the optimizer's step would take {mib(shared)}, too much as well: {SMALLER}"
    text += f"; sharing the optimizer's step (as ZeRO-1) would fit, with {mib(shared)}, and is {_times(step)}"
    return f"{text}; some lines that work with DDP then do not: {page('concepts/sharded-step')}, {ALLOW}"


def _times(step: StepPlan) -> str:
    shared, whole = ms(step.sharded_us or 0.0), ms(step.replicated_us or 0.0)
    return f"predicted {shared} a step, as now" if shared == whole else f"predicted {shared} a step, {whole} as now"


def _notes(problem: Problem, step: StepPlan, sharing: ShardUpdates) -> list[str]:
    implied = "" if costs_known(problem) else "; reduce-scatter and all-gather were not measured: profile again"
    memory = f"; {_memory(step)}" if _saves(step) else ""
    if step.late_us is not None and step.gather == "forward":
        inside = "" if step.sharded_us is None else f"{ms(step.sharded_us)} where they are gathered inside the step, "
        return [
            f"ranks share the optimizer's step, and weights are gathered beside the next forward: predicted "
            f"{ms(step.late_us)} a step, {inside}{ms(step.replicated_us or 0.0)} where every rank updates all weights"
            f"{memory}{implied}; {described_needs(problem)}"
        ]
    if step.sharded_us is None or step.replicated_us is None:
        return _not_late(step)
    if not step.sharded:
        notes = [
            f"ranks do not share the optimizer's step, as they may: that is {_times(step)}, and has to be {GAIN:.0%} "
            f"shorter{memory}{implied}"
        ]
        notes += _not_late(step)
        return [*notes, _too_large(step)] if sharing.memory_requires_sharding(problem) else notes
    name = problem.profile.compute.optimizer.name if problem.profile.compute.optimizer else "the optimizer"
    why = "memory demands it, " if sharing.memory_requires_sharding(problem) and _saves(step) else ""
    notes = [
        f"ranks share the step of {name} (as ZeRO-1): {why}predicted {ms(step.sharded_us)} a step, "
        f"{ms(step.replicated_us)} where every rank updates all weights, of it {ms(step.gather_us or 0.0)} to gather "
        f"weights{memory}{implied}",
    ]
    if step.memory_bytes is not None and (step.sharded_bytes or 0) > step.memory_bytes:
        notes.append(f"even so a rank needs more than its {mib(step.memory_bytes)}: {SMALLER}")
    return notes + _not_late(step)


def _not_late(step: StepPlan) -> list[str]:
    """That gathers are not beside forward, where they might be."""
    if step.late_us is None:
        return []
    return [
        f"weights are not gathered beside the next forward, as they may: that is predicted {ms(step.late_us)} a step, "
        f"and has to be {GAIN:.0%} shorter"
    ]


def _memory(step: StepPlan) -> str:
    shared, whole = mib(step.sharded_bytes or 0), mib(step.replicated_bytes or 0)
    return f"{shared} for weights, gradients, state and known activations instead of {whole}"
