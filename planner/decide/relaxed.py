"""What relaxed plans offer: delayed synchronization, with its k, and both predictions for every k that was allowed; and
local updaters, with their blocks, and what each number of them would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from planner.decide.offer import Offer
from planner.decide.pipeline import AfterPass, run_passes
from planner.emit.lower import lower
from planner.emit.text import counted, three_digits
from planner.ir import Schedule, Updaters
from planner.model.compression import compression
from planner.model.delay import CycleTimeline
from planner.model.delay_load import Load
from planner.model.local_async import Work, closed_form_saved_backwards, making_us, saved_backwards
from planner.model.problem import Problem
from planner.model.simulator import simulate_schedule, step_us
from planner.passes.base import Pass
from planner.passes.delay import NEAR, Choice, Delay, cautious_step_us
from planner.passes.local_async import GROWTH, LocalAsync, UpdaterChoice
from runtime.plan import Plan
from runtime.plan.predicted import Certificate, DelayPoint, UpdatersPoint

CASES = {1: "pulls are late", 2: "the network is never idle", 3: "nothing is exposed"}


def delay_offer(
    problem: Problem, schedule: Schedule, passes: Sequence[Pass], after_pass: AfterPass | None
) -> tuple[Offer | None, tuple[DelayPoint, ...] | None]:
    """The best plan with delay, and what each k would give; None on one rank. No offer where it is not asked for.

    Args:
        problem: the step.
        schedule: the best exact one.
        passes: relaxed passes.
        after_pass: called after each pass.
    """
    delay = next((each for each in passes if isinstance(each, Delay)), None)
    if delay is None:
        return None, None
    offer = partial(Offer, accuracy="relaxed", what="delay")
    exact_us = step_us(problem, schedule)
    why_not = _unsuited(problem, "delay needs")
    if why_not:
        return offer(plan=None, step_us=exact_us, why_not=why_not), None
    found = run_passes([delay], schedule, problem, after_pass, accuracy="relaxed")
    choices = delay.choices(schedule, problem)
    points = tuple(map(_point, choices)) or None
    if found.delay is None:
        return offer(plan=None, step_us=exact_us, why_not=_no_workers(problem)), points
    plan = replace(lower(problem, found), certificate=_certificate(problem, found))
    found_us = step_us(problem, found)
    judged_us = max(found_us, cautious_step_us(problem, found))
    notes = (_gain(found_us, exact_us), *_notes(problem, plan, found, choices))
    return offer(plan=plan, step_us=judged_us, notes=notes), points


def updaters_offer(
    problem: Problem, schedule: Schedule, passes: Sequence[Pass], after_pass: AfterPass | None
) -> tuple[Offer | None, tuple[UpdatersPoint, ...] | None]:
    """As `delay_offer`, of local updaters; what each number of them that was measured would give.

    Where nothing was measured of them, that is said only if they are asked for by name.
    """
    local = next((each for each in passes if isinstance(each, LocalAsync)), None)
    if local is None:
        return None, None
    offer = partial(Offer, accuracy="relaxed", what="local updaters", making_us=making_us(problem))
    exact_us = step_us(problem, schedule) + making_us(problem)
    choices = local.choices(problem)
    if not choices:
        by_name = not any(isinstance(each, Delay) for each in passes)
        return (offer(plan=None, step_us=exact_us, why_not=UNMEASURED) if by_name else None), None
    points = tuple(_updaters_point(problem, choice) for choice in choices)
    why_not = _unsuited(problem, "local updaters need")
    if why_not:
        return offer(plan=None, step_us=exact_us, why_not=why_not), points
    found = run_passes([local], schedule, problem, after_pass, accuracy="relaxed")
    if found.updaters is None:
        why_not = "no number of local updaters would get more done"
        return offer(plan=None, step_us=exact_us, why_not=why_not), points
    found_us = step_us(problem, found)
    plan = replace(lower(problem, found), certificate=_updaters_certificate(problem, found, choices))
    notes = (_gain(found_us, exact_us), *updaters_notes(problem, found, choices, exact_us))
    return offer(plan=plan, step_us=found_us, notes=notes), points


UNMEASURED = "local updaters were not measured (`planner profile --updaters 4` does)"


def _unsuited(problem: Problem, what: str) -> str:
    """Why the step's optimizer is none for relaxed plans; empty where it is."""
    optimizer, norms = problem.profile.compute.optimizer, problem.profile.compute.norms
    name = optimizer.name if optimizer is not None else norms.optimizer if norms is not None else "SGD"
    return "" if name == "SGD" else f"{what} torch.optim.SGD, and this step's optimizer is {name}"


def _gain(found_us: float, exact_us: float) -> str:
    return f"relaxed: predicted {1.0 - found_us / exact_us:.1%} shorter than the best exact plan, which is the fallback"


def _no_workers(problem: Problem) -> str:
    """Why nothing can be delayed on this cluster; empty where it can."""
    cluster = problem.cost.cluster
    if cluster.ranks_per_node == 1 or problem.node_costs is not None:
        return ""
    if cluster.nodes == 1:
        return "delay is between nodes, and here all ranks share one"
    return "delay is between nodes of several ranks here, and the cluster does not say what both kinds of link cost"


def _point(choice: Choice) -> DelayPoint:
    return DelayPoint(
        steps=choice.k,
        iteration_us=choice.iteration_us,
        closed_form_us=choice.closed_form_us,
        case=choice.case,
        buckets=len(choice.schedule.buckets),
    )


def _certificate(problem: Problem, schedule: Schedule) -> Certificate:
    """No delay hides more than all communication."""
    iteration_us = step_us(problem, schedule)
    load = Load.of(problem, schedule)
    bound_us = min(load.compute_us + load.take_us / (schedule.delay or 1), iteration_us)
    return Certificate(
        method="each k simulated with several merges",
        lower_bound_us=bound_us,
        gap=max(0.0, iteration_us / bound_us - 1.0) if bound_us > 0.0 else 0.0,
        note="the bound is a step without communication",
    )


def _notes(problem: Problem, plan: Plan, schedule: Schedule, choices: Sequence[Choice]) -> list[str]:
    """What the reader of a relaxed plan should know."""
    k, spec = schedule.delay, plan.delay
    assert spec is not None
    times = ", ".join(
        f"{choice.k}: {three_digits(choice.iteration_us / 1000)} ms ({three_digits(choice.closed_form_us / 1000)} by "
        f"Eq. 4, case {choice.case}: {CASES[choice.case]})"
        for choice in choices
    )
    notes = [
        f"delay: gradients are pushed in every step, new weights come after every {f'{k} steps' if k != 1 else 'step'} "
        f"and are used one step later; in between ranks hold weights of their own",
        f"mean step by k, simulated: {times}; k = {k} is the smallest within {NEAR:.0%} of the best",
        f"the optimizer has to be torch.optim.SGD; the first {spec.warmup_steps} steps are synchronous",
        f"reduce-scatter: {problem.push.source}; all-gather: {problem.pull.source}",
    ]
    if problem.ranks_per_worker > 1:
        notes.append(
            f"the worker is the node: its {problem.ranks_per_worker} ranks average their gradients in every step and "
            f"have the same weights"
        )
    lossy = [bucket for bucket in schedule.buckets if bucket.k is not None]
    if lossy:
        ratio, _ = compression(problem, lossy)
        notes.append(
            f"pushes of {len(lossy)} of {len(schedule.buckets)} buckets carry their largest elements, one in "
            f"{ratio:.0f} at the least; each worker holds the rest back and pushes it later; the synchronous steps and "
            f"the pulls carry everything"
        )
    if problem.cost.cluster.local_update is None:
        notes.append(
            "the local update is taken as free, for the cluster has no `local_update` cost; delay had to pay with "
            "one as long as the optimizer's update: time it on that machine and add it"
        )
    timeline = simulate_schedule(problem, schedule)
    if isinstance(timeline, CycleTimeline) and timeline.error_us > 0.0:
        notes.append(f"steps do not repeat exactly: the mean step may be off by {timeline.error_us:.3g} us")
    return notes


def _updaters_point(problem: Problem, choice: UpdaterChoice) -> UpdatersPoint:
    updaters = choice.lpp.updaters
    assert updaters is not None
    return UpdatersPoint(
        updaters=choice.updaters,
        lap_us=choice.lap_us,
        lpp_us=choice.lpp_us,
        blocks=len(updaters.blocks),
        saved_backwards=saved_backwards(problem, updaters),
        closed_form=closed_form_saved_backwards(choice.updaters),
        fits=choice.fits,
    )


def _updaters_certificate(problem: Problem, schedule: Schedule, choices: Sequence[UpdaterChoice]) -> Certificate:
    """Of the numbers of updaters that were measured none gets more done, blocks or not."""
    iteration_us = step_us(problem, schedule)
    bound_us = min([iteration_us, *(step_us(problem, choice.best) for choice in choices)])
    return Certificate(
        method="each measured number of updaters, with the blocks of least cost by dynamic programming",
        lower_bound_us=bound_us,
        gap=max(0.0, iteration_us / bound_us - 1.0) if bound_us > 0.0 else 0.0,
        note="the bound is the number of updaters that gets most done; fewer are taken where more hardly help",
    )


def updaters_notes(
    problem: Problem, schedule: Schedule, choices: Sequence[UpdaterChoice], exact_us: float
) -> list[str]:
    """What the reader of a plan with local updaters should know."""
    updaters, found_us = schedule.updaters, step_us(problem, schedule)
    assert updaters is not None
    rates = [_rate(problem, time_us) for time_us in (found_us, exact_us)]
    notes = [
        f"{counted(updaters.count, 'updater')} of each rank share its model without locks, and ranks average their "
        f"models beside them; a step here is what a rank takes for a minibatch",
        f"predicted {rates[0]} from all ranks; the best plan that synchronizes in every step: {rates[1]}",
        "a rank's time for a minibatch by updaters, LAP-SGD and LPP-SGD: "
        + ", ".join(
            f"{choice.updaters}: {three_digits(choice.lap_us / 1000)} and {three_digits(choice.lpp_us / 1000)} ms"
            f"{'' if choice.fits else ' (more than fits into memory)'}"
            for choice in choices
        )
        + f"; each updater has to bring {GROWTH:.0%} more",
    ]
    if making_us(problem) > 0.0:
        notes.append(
            f"making a minibatch takes a rank {three_digits(making_us(problem) / 1000)} ms: it is in the times of "
            f"updaters, and added to the step of the plan that they are compared with"
        )
    if updaters.stops is not None:
        notes.append(_blocks_note(problem, updaters))
    notes.append(
        "what updaters cost in accuracy was measured with torch.optim.SGD: they are offered with no other optimizer; "
        "`planner run` trains so, and `runtime.local_async.run_local_async` in a script"
    )
    return notes


def _rate(problem: Problem, time_us: float) -> str:
    """Of all ranks, in samples where the profile says how many a minibatch has."""
    samples = problem.profile.world.batch_per_rank
    per_s = problem.ranks * (samples or 1) * 1e6 / time_us
    return f"{per_s:,.4g} {'samples' if samples else 'minibatches'}/s"


def _blocks_note(problem: Problem, updaters: Updaters) -> str:
    work, full_us = Work.of(problem), Work.of(problem).backward.full_us
    parts = ", ".join(f"{work.partial_us(block) / full_us:.0%}" for block in updaters.blocks)
    saved, closed = saved_backwards(problem, updaters), closed_form_saved_backwards(updaters.count)
    return (
        f"after the first tenth every other minibatch updates a block only: {counted(len(updaters.blocks), 'block')} "
        f"whose partial backwards take {parts} of a full one; one of each updater saves {saved:.2f} full backwards, "
        f"where (c − 1)/2 = {closed:.2f} would be saved with blocks that cost alike"
    )
