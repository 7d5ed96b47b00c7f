"""What relaxed plans offer: delayed synchronization, with its k, and both predictions for every k that was allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.delayed import CycleTimeline, Load
from planner.ir import Schedule
from planner.lower import lower
from planner.offer import Offer
from planner.passes import Pass
from planner.passes.delay import NEAR, Choice, Delay, cautious_step_us
from planner.pipeline import AfterPass, run_passes
from planner.problem import Problem
from planner.selection import compression
from planner.simulator import simulate_schedule, step_us
from planner.sources import three_digits
from runtime.plan import Plan
from runtime.predicted import Certificate, DelayPoint

CASES = {1: "pulls are late", 2: "the network is never idle", 3: "nothing is exposed"}


def relaxed_offer(
    problem: Problem, schedule: Schedule, passes: Sequence[Pass], after_pass: AfterPass | None
) -> tuple[Offer, tuple[DelayPoint, ...] | None]:
    """The best relaxed plan found, and what each k would give; None on one rank.

    Args:
        problem: the step.
        schedule: the best exact one.
        passes: relaxed passes.
        after_pass: called after each pass.
    """
    optimizer, norms = problem.profile.compute.optimizer, problem.profile.compute.norms
    name = optimizer.name if optimizer is not None else norms.optimizer if norms is not None else "SGD"
    if name != "SGD":
        why_not = f"delay needs torch.optim.SGD, and this step's optimizer is {name}"
        exact_us = step_us(problem, schedule)
        return Offer(accuracy="relaxed", what="delay", plan=None, step_us=exact_us, why_not=why_not), None
    found = run_passes(passes, schedule, problem, after_pass, accuracy="relaxed")
    delay = next((each for each in passes if isinstance(each, Delay)), Delay())
    choices = delay.choices(schedule, problem)
    points = tuple(map(_point, choices)) or None
    if found.delay is None:
        exact_us, why_not = step_us(problem, schedule), _no_workers(problem)
        return Offer(accuracy="relaxed", what="delay", plan=None, step_us=exact_us, why_not=why_not), points
    plan = replace(lower(problem, found), certificate=_certificate(problem, found))
    found_us, exact_us = step_us(problem, found), step_us(problem, schedule)
    gain = f"relaxed: predicted {1.0 - found_us / exact_us:.1%} shorter than the best exact plan, which is the fallback"
    judged_us = max(found_us, cautious_step_us(problem, found))
    notes = (gain, *_notes(problem, plan, found, choices))
    return Offer(accuracy="relaxed", what="delay", plan=plan, step_us=judged_us, notes=notes), points


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
    bound_us = min(Load.of(problem, schedule).compute_us, iteration_us)
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
