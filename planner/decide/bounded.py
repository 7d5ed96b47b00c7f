"""Where more than exact plans are allowed: the best of each class beside the best exact one, and which of them it is.

A riskier class has to win by 2 % of the predicted step over the best less risky one; if none does, the plan stays exact
and says what they would give. Bounded plans are looked for here, relaxed ones in `planner.decide.relaxed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.cost.sparse import SELECTED_BYTES, flat_is_implied
from planner.decide.offer import ALLOWED, Offer, choose_offer
from planner.decide.pipeline import AfterPass, run_passes
from planner.decide.relaxed import delay_offer, updaters_offer
from planner.emit.lower import lower
from planner.emit.text import counted, mib, three_digits
from planner.ir import Bucket, Schedule
from planner.model.compression import check_max_ratio, ratio_limits, ratio_of
from planner.model.norms import update_us
from planner.model.problem import Problem
from planner.model.simulator import step_us
from planner.passes.base import GAIN, Pass
from planner.passes.delay import Delay, check_max_delay
from planner.passes.joint import Frontier, Joint
from planner.passes.local_async import LocalAsync
from planner.passes.sparsify import Sparsify
from planner.search.cpsat_joint import MAX_PLACES, fits, solve_joint
from runtime.errors import InputError
from runtime.plan import Accuracy, Plan
from runtime.plan.predicted import Certificate, DelayPoint, FrontierPoint, SolverBound, UpdatersPoint

ACCURACIES: tuple[Accuracy, ...] = ("exact", "bounded", "relaxed")
"""The classes, from the least risky to the riskiest."""


__all__ = ["ACCURACIES", "GAIN", "choose", "sent_share", "split_passes"]


def split_passes(
    passes: Sequence[Pass],
    accuracy: Accuracy,
    max_ratio: float | None = None,
    protect: str | None = None,
    max_delay: int | None = None,
) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """(exact passes, lossy ones with the options given; default `joint`, `delay` and `local_async`, as far as they are
    allowed).

    Raises:
        InputError: a pass, or an option of one, of a riskier class than is allowed; an option is wrong.
    """
    exact = tuple(each for each in passes if each.accuracy == "exact")
    if max_ratio is not None:
        check_max_ratio(max_ratio)
    if max_delay is not None:
        check_max_delay(max_delay)
    given = {"--max-ratio": max_ratio, "--protect": protect, "--max-delay": max_delay}
    options = [option for option, value in given.items() if value is not None]
    asked = [(option, "relaxed" if option == "--max-delay" else "bounded") for option in options]
    _refuse_riskier(accuracy, [*asked, *((f"the pass {each.name}", str(each.accuracy)) for each in passes)])
    lossy: list[Pass] = []
    defaults: dict[str, list[Pass]] = {"bounded": [Joint()], "relaxed": [Delay(), LocalAsync()]}
    for risk, usual in defaults.items():
        if ACCURACIES.index(accuracy) >= ACCURACIES.index(risk):
            lossy += [each for each in passes if each.accuracy == risk] or usual
    return exact, tuple(_with_options(each, max_ratio, protect, max_delay) for each in lossy)


def _refuse_riskier(accuracy: Accuracy, asked: Sequence[tuple[str, str]]) -> None:
    """Raises InputError where something is asked for (what, the class it needs) that is riskier than allowed."""
    allowed = ACCURACIES.index(accuracy)
    riskier = [(what, needs) for what, needs in asked if ACCURACIES.index(needs) > allowed]
    if not riskier:
        return
    why = "exact plans leave nothing out" if accuracy == "exact" else "bounded plans synchronize in every step"
    cure = "relaxed" if any(needs == "relaxed" for _, needs in riskier) else "bounded"
    raise InputError(
        f"--accuracy {accuracy}: found {' and '.join(what for what, _ in riskier)}, expected "
        f"{'none' if len(riskier) == 1 else 'neither'}, for {why}; add --accuracy {cure}"
    )


def _with_options(lossy: Pass, max_ratio: float | None, protect: str | None, max_delay: int | None) -> Pass:
    """The pass with options of the command, where it has no values of its own."""
    if isinstance(lossy, Delay):
        lossy = replace(lossy, max_delay=lossy.max_delay or max_delay or 0)
    elif not isinstance(lossy, Joint | Sparsify):
        return lossy
    return replace(lossy, max_ratio=lossy.max_ratio or max_ratio or 0.0, protect=lossy.protect or protect or "")


def choose(
    problem: Problem,
    exact: Plan,
    schedule: Schedule,
    accuracy: Accuracy,
    passes: Sequence[Pass],
    after_pass: AfterPass | None = None,
    solver_limit: float | None = None,
    *,
    asked: bool = False,
) -> Plan:
    """The plan of the riskiest class that wins by enough, with the exact one as its fallback; else the exact one, which
    says so.

    Args:
        problem: the step.
        exact: the best exact plan, complete but for what is said of lossy ones.
        schedule: its schedule.
        accuracy: the class allowed.
        passes: lossy passes.
        after_pass: called after each pass.
        solver_limit: deterministic time in which the constraint program bounds the lossy plan; None: not asked for.
        asked: for bounded passes by name, so that a step whose optimizer they do not suit gets their plan, too.
    """
    bounded = [each for each in passes if each.accuracy == "bounded"]
    offer, frontier = _bounded_offer(problem, schedule, bounded, after_pass, solver_limit)
    offers = [offer if asked else _for_optimizer(problem, offer)]
    delays: tuple[DelayPoint, ...] | None = None
    updaters: tuple[UpdatersPoint, ...] | None = None
    if accuracy == "relaxed":
        relaxed = [each for each in passes if each.accuracy == "relaxed"]
        delayed, delays = delay_offer(problem, schedule, relaxed, after_pass)
        local, updaters = updaters_offer(problem, schedule, relaxed, after_pass)
        offers += [offer for offer in (delayed, local) if offer is not None]
    beside = replace(exact, baselines=None, scaling=None, sources=None, notes=())
    exact = replace(exact, frontier=_points(problem, frontier), delays=delays, updaters=updaters)
    chosen, refused = choose_offer(step_us(problem, schedule), offers)
    if chosen is None or chosen.plan is None:
        why = f"{accuracy}{ALLOWED}{', and '.join(refused.values())}: the plan is exact"
        return replace(exact, alternatives=_others(offers, "exact") or None, notes=(*exact.notes, why))
    riskier = [refused[offer.what] for offer in offers[offers.index(chosen) + 1 :] if offer.what in refused]
    beyond = [f"relaxed{ALLOWED}{', and '.join(riskier)}"] if riskier else []
    return replace(
        chosen.plan,
        baselines=exact.baselines,
        scaling=exact.scaling,
        sources=exact.sources,
        frontier=exact.frontier,
        delays=exact.delays,
        updaters=exact.updaters,
        fallback=beside,
        alternatives={"exact": beside, **_others(offers, chosen.accuracy)},
        notes=(*exact.notes, *chosen.notes, *beyond),
    )


def _others(offers: Sequence[Offer], taken: str) -> dict[str, Plan]:
    """The best plan of each class that was looked at, but for the one that was taken."""
    found: dict[str, Offer] = {}
    for offer in offers:
        before = found.get(offer.accuracy)
        if offer.plan is not None and offer.accuracy != taken and (before is None or offer.own_us < before.own_us):
            found[offer.accuracy] = offer
    return {accuracy: offer.plan for accuracy, offer in found.items() if offer.plan is not None}


def _bounded_offer(
    problem: Problem,
    schedule: Schedule,
    passes: Sequence[Pass],
    after_pass: AfterPass | None,
    solver_limit: float | None,
) -> tuple[Offer, Frontier]:
    """The best bounded plan found, beginning with the best exact schedule, and speed over compression."""
    found = run_passes(passes, schedule, problem, after_pass, accuracy="bounded")
    joint = next((each for each in passes if isinstance(each, Joint)), None)
    options = next((each for each in passes if isinstance(each, Joint | Sparsify)), Joint())
    joint = joint or Joint(max_ratio=options.max_ratio, protect=options.protect)
    saved_us = problem.update_us - update_us(problem, schedule)
    frontier = _sooner(joint.frontier(replace(schedule, norms=None), problem), saved_us)
    exact_us, found_us = step_us(problem, schedule), step_us(problem, found)
    if not _sparse(found):
        return Offer(accuracy="bounded", what="compression", plan=None, step_us=exact_us), frontier
    plan = replace(lower(problem, found), certificate=_certificate(problem, found, frontier, joint, passes))
    if solver_limit is not None:
        plan = _solved(problem, plan, frontier, solver_limit)
    gain = 1.0 - found_us / exact_us if exact_us > 0.0 else 0.0
    notes = tuple(_notes(problem, found, frontier, gain, joint))
    return Offer(accuracy="bounded", what="compression", plan=plan, step_us=found_us, notes=notes), frontier


def _for_optimizer(problem: Problem, offer: Offer) -> Offer:
    """The offer, but for optimizers with which selected elements train far worse: see `runtime.checks.adaptive`."""
    optimizer = problem.profile.compute.optimizer
    if offer.plan is None or optimizer is None or not optimizer.adaptive:
        return offer
    why_not = (
        f"selected elements train a worse model with {optimizer.name}, which divides gradients by their own size "
        f"(docs/lags.md; --passes merge,joint asks for them nevertheless)"
    )
    return replace(offer, plan=None, why_not=why_not)


def _sooner(frontier: Frontier, saved_us: float) -> Frontier:
    """The frontier of steps whose update is shorter by what sharing norms saves."""
    points = tuple(replace(point, iteration_us=point.iteration_us - saved_us) for point in frontier.points)
    return replace(frontier, points=points, bound_us=frontier.bound_us - saved_us) if saved_us else frontier


def _sparse(schedule: Schedule) -> list[Bucket]:
    return [bucket for bucket in schedule.buckets if bucket.collective == "sparse"]


def _points(problem: Problem, frontier: Frontier) -> tuple[FrontierPoint, ...]:
    return tuple(
        FrontierPoint(
            max_ratio=point.max_ratio,
            iteration_us=point.iteration_us,
            buckets=len(point.schedule.buckets),
            sparse_buckets=len(_sparse(point.schedule)),
            sent_share=sent_share(problem, point.schedule),
        )
        for point in frontier.points
    )


def sent_share(problem: Problem, schedule: Schedule) -> float:
    """Of all elements, those that travel in a step."""
    total = max(1, int(problem.numel.sum()))
    kept_back = sum(int(problem.numel[list(b.gradients)].sum()) - _sent(problem, b) for b in _sparse(schedule))
    return 1.0 - kept_back / total


def _sent(problem: Problem, bucket: Bucket) -> int:
    """Elements of a sparse bucket that each rank, or of `hitopk` each node, sends."""
    shards = problem.cost.cluster.ranks_per_node if bucket.algorithm == "hitopk" else 1
    return min(int(problem.numel[list(bucket.gradients)].sum()), shards * (bucket.k or 0))


def _certificate(
    problem: Problem, schedule: Schedule, frontier: Frontier, joint: Joint, passes: Sequence[Pass]
) -> Certificate:
    iteration_us = step_us(problem, schedule)
    bound_us = min(frontier.bound_us, iteration_us)
    ratios = ", ".join(f"{point.max_ratio:g}" for point in frontier.points[1:])
    notes = [f"among plans whose buckets are dense or have, in each layer not limited further, a ratio of {ratios}"]
    if problem.contended:
        notes.append("the bound is for a machine where compute and network do not slow each other down")
    if joint not in passes:
        notes.append(f"decided by {', '.join(each.name for each in passes)}, which does not look at all of them")
    exact = frontier.points[-1].exact
    return Certificate(
        method="labels over merging and densities" + ("" if exact else ", a part of them, and local search"),
        lower_bound_us=bound_us,
        gap=max(0.0, iteration_us / bound_us - 1.0) if bound_us > 0.0 else 0.0,
        note="; ".join(notes),
    )


def _solved(problem: Problem, plan: Plan, frontier: Frontier, limit: float) -> Plan:
    """The plan with the constraint program's bound in its certificate."""
    certificate, tables = plan.certificate, frontier.tables
    assert certificate is not None
    if tables is None or not fits(tables):
        note = f"CP-SAT was not asked: up to {MAX_PLACES - 1} gradients and no contention are what its model can take"
        return replace(plan, certificate=replace(certificate, note=f"{certificate.note}; {note}"))
    iteration_us = plan.predicted.iteration_us if plan.predicted else 0.0
    updating_us = plan.predicted.update_us if plan.predicted and plan.predicted.update_us else 0.0
    solution = solve_joint(tables, len(tables.cost_us), iteration_us - updating_us, limit)
    solver_us = min(solution.bound_us + updating_us, iteration_us)
    bound_us = max(certificate.lower_bound_us, solver_us)
    solved = replace(
        certificate,
        method=f"{certificate.method}, then CP-SAT",
        lower_bound_us=bound_us,
        gap=max(0.0, iteration_us / bound_us - 1.0) if bound_us > 0.0 else 0.0,
        solver=SolverBound("cpsat", solver_us, solution.proven, limit),
    )
    return replace(plan, certificate=solved)


def _notes(problem: Problem, schedule: Schedule, frontier: Frontier, gain: float, joint: Joint) -> list[str]:
    """What the reader of a bounded plan should know."""
    sparse = _sparse(schedule)
    members = [index for bucket in sparse for index in bucket.gradients]
    dense_bytes = int(problem.size_bytes.sum() - problem.size_bytes[members].sum())
    sent_bytes = SELECTED_BYTES * sum(_sent(problem, bucket) for bucket in sparse)
    limits = ratio_limits(problem, joint.max_ratio or None, joint.protect)
    protected = [index for index in range(problem.count) if limits[index] <= 1.0]
    notes = [
        f"bounded: predicted {gain:.1%} shorter than the best exact plan, which is the fallback",
        "what is held back is learnt late, and costs most in the first steps: train those with the fallback, and go "
        "over by session.switch (docs/lags.md)",
        f"{counted(len(sparse), 'sparse bucket')} of {len(schedule.buckets)}: "
        f"{mib(int(problem.size_bytes[members].sum()))} of gradients travel as {mib(sent_bytes)} of values "
        f"and indices from each rank, {mib(dense_bytes)} travel dense; largest ratio "
        f"{max(ratio_of(problem, bucket) for bucket in sparse):,.4g}",
        "step by largest ratio allowed: "
        + ", ".join(f"{point.max_ratio:,g}: {three_digits(point.iteration_us / 1000)} ms" for point in frontier.points),
    ]
    if protected:
        share = int(problem.numel[protected].sum()) / max(1, int(problem.numel.sum()))
        notes.append(
            f"{counted(len(protected), 'gradient')} of {problem.count} travel whole ({share:.2%} of the elements)"
        )
    cluster = problem.cost.cluster
    if cluster.sparsify is None:
        notes.append(
            "selection is taken as free, for the cluster has no `sparsify` cost: the gain may be less, or none; "
            "time it on that machine and add it"
        )
    if flat_is_implied(cluster):
        notes.append("gathers are taken to cost what follows from the all-reduce")
    return notes
