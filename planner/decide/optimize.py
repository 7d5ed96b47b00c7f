"""`planner.optimize`: profile and cluster in, plan out, with baselines and a certificate. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from planner.decide.bounded import ACCURACIES, choose, split_passes
from planner.decide.interfaces import allowed_passes, check_allow, find_sharing
from planner.decide.norms import describe, update_bound_us
from planner.decide.pipeline import AfterPass, parse_passes, run_passes, with_options
from planner.decide.scaling import OPTIMAL, scaling_curve
from planner.decide.sharded_step import (
    beside_shared,
    check_memory,
    other_way,
    with_gain,
    with_notes,
    with_step,
)
from planner.decide.solvers import UNASKED, Solved, check_solver, solve
from planner.decide.strategies import BASELINES, best_baseline, make_schedule
from planner.documents.catalog import find_cluster, find_profile
from planner.documents.measured import refuse_unmeasured
from planner.documents.profile import Cluster, Profile
from planner.emit.lower import lower, predict
from planner.emit.sources import describe_sources
from planner.emit.text import counted
from planner.emit.timelines import baseline_prediction
from planner.ir import Schedule
from planner.model.local_async import making_us
from planner.model.problem import Problem, make_problem
from planner.model.sharded_step import can_share, own_update_us, saves_memory
from planner.model.simulator import simulate_schedule
from planner.passes.base import Bound
from planner.passes.merge import merge_without_contention
from planner.passes.topology import links_without_contention
from planner.search.link_forms import has_two_links
from runtime.errors import InputError
from runtime.plan import Accuracy, Plan
from runtime.plan.interfaces import SHARDED_STEP
from runtime.plan.predicted import Certificate, Prediction, ScalingPoint, SolverBound

DEFAULT_PASSES = "merge,topology,shard_updates"

NOTHING_TO_GAIN = 0.01
"""Below this share of the step, a gain over DDP is not worth a claim."""


def optimize(
    profile: Profile | str | Path,
    cluster: Cluster | str | Path | None = None,
    *,
    accuracy: Accuracy = "exact",
    allow: Sequence[str] = (),
    passes: str = DEFAULT_PASSES,
    after_pass: AfterPass | None = None,
    solver: str = "dp",
    solver_limit: float | None = None,
    max_ratio: float | None = None,
    protect: str | None = None,
    max_delay: int | None = None,
    max_memory_mib: float | None = None,
) -> Plan:
    """Decides how the gradients of a profiled step travel.

    Args:
        profile: a profile, the path of profile.json, or a name of the catalogue: `MODEL` or `MODEL@CLUSTER`.
        cluster: a cluster, the path of cluster.json, or a name; default: the one measured with the profile.
        accuracy: the class of plans allowed: `bounded` looks at sparsified plans too, `relaxed` also at delay. A
            riskier one is taken where it is predicted at least 2 % faster than the best less risky one; it carries the
            exact one as `fallback`.
        allow: interfaces beside drop-in that the plan may have, by name: with `sharded-step` ranks share the
            optimizer's step where that is predicted 2 % faster, or what every rank would hold does not fit into its
            memory.
        passes: the pipeline, for example `merge{labels=4}` or `merge,sparsify{max_ratio=250}`. Exact passes run first;
            where lossy plans are allowed, `joint` and `delay` run after them, or what is named in their place.
        after_pass: called with (name, schedule, seconds) after each pass.
        solver: `cpsat` has a constraint program look for a better plan afterwards, and its bound in the certificate.
        solver_limit: deterministic time that it may take; equal on all machines, a second or a few for each 1.0.
        max_ratio: for lossy plans, the largest ratio of a layer's elements to those that travel; default: 1000, and 250
            for recurrent and embedding layers.
        protect: for lossy plans, patterns of gradients' names that travel whole, separated by `|`, beside biases and
            normalization layers; with `none` among them, those are not protected.
        max_delay: for relaxed plans, the largest k: after so many steps at the most come new weights; default: 4.

        max_memory_mib: what each rank has for weights, gradients, the optimizer's state and activations; where that
            is too little, ranks share the optimizer's step if that is allowed; if not, the notes say whether it would
            help. Default: what the profile says, if anything.

    Returns:
        The plan with its prediction, baselines and certificate; equal inputs give equal plans.

    Raises:
        InputError: a document is wrong, there is no cluster, or one that was not measured for plans of this class; an
            option is unknown, or the solver cannot take on so many gradients; a pass does what is not allowed.
        CheckFailed: the solver contradicts the dynamic program.
    """
    if accuracy not in ACCURACIES:
        raise InputError(f"--accuracy: found {accuracy!r}, expected one of: {', '.join(ACCURACIES)}")
    limit = check_solver(solver, solver_limit)
    parsed = parse_passes(passes)
    asked_for, lossy = split_passes(parsed, accuracy, max_ratio, protect, max_delay)
    asked_for = with_options(asked_for, memory_mib=check_memory(max_memory_mib))
    sharing = find_sharing(asked_for)
    pipeline = allowed_passes(asked_for, check_allow(allow))
    where = name_of(profile if cluster is None else cluster)
    machines = None if cluster is None else find_cluster(cluster)
    problem = make_problem(find_profile(profile), machines, where=where)
    refuse_unmeasured(problem.cost.cluster, accuracy, where)
    start = best_baseline(problem)
    schedule = run_passes(pipeline, start, problem, after_pass).schedule
    solved = solve(problem, schedule, limit) if solver == "cpsat" and not schedule.sharded else None
    schedule = solved.schedule if solved else schedule
    other = other_way(problem, schedule, start, asked_for, sharing)
    exact = plan = with_step(problem, _exact(problem, schedule, solved), schedule, other, sharing)
    if SHARDED_STEP in allow:
        plan = with_notes(problem, plan, sharing)
    unheeded = "the pass shard_updates heeds it, and is not among the passes; add it to --passes"
    if max_memory_mib is None or sharing is not None:
        unheeded = "" if max_memory_mib is None or sharing is None else sharing.memory_unheeded(problem)
    if unheeded:
        plan = replace(plan, notes=(*plan.notes, f"--max-memory-mib {max_memory_mib:g} changes nothing: {unheeded}"))
    if solver == "cpsat" and schedule.sharded:
        plan = _unasked(plan)
    if accuracy != "exact":
        asked = any(each.accuracy == "bounded" for each in parsed)
        bound = limit if solver == "cpsat" else None

        def riskier(exact: Plan, of: Schedule) -> Plan:
            return choose(problem, exact, of, accuracy, lossy, after_pass, bound, asked=asked)

        if schedule.sharded and other is not None:
            plan = beside_shared(
                plan,
                riskier(_exact(problem, other), other),
                demanded=sharing is not None and sharing.demanded(problem) and saves_memory(problem, schedule),
                making_us=making_us(problem),
            )
        else:
            plan = riskier(plan, schedule)
    if SHARDED_STEP not in allow:
        plan = with_gain(problem, plan, exact, sharing, making_us=making_us(problem))
    return replace(plan, loading=problem.profile.loading)


def _exact(problem: Problem, schedule: Schedule, solved: Solved | None = None) -> Plan:
    """The plan of an exact schedule with all that is said beside it."""
    baselines = {name: _baseline(problem, name) for name in BASELINES}
    plan = replace(lower(problem, schedule), baselines=baselines, certificate=certify(problem, schedule, solved))
    plan = replace(plan, scaling=_scaling(problem, plan, baselines), sources=describe_sources(problem))
    return replace(plan, notes=_notes(problem, plan, baselines))


def _baseline(problem: Problem, name: str) -> Prediction:
    schedule = make_schedule(problem, name)
    return baseline_prediction(problem, schedule, predict(problem, schedule, timeline=True))


def _scaling(problem: Problem, plan: Plan, baselines: dict[str, Prediction]) -> tuple[ScalingPoint, ...]:
    planned = {OPTIMAL: plan.predicted} if plan.predicted else {}
    here_us = {name: prediction.iteration_us for name, prediction in (planned | baselines).items()}
    return scaling_curve(problem, here_us, f"{OPTIMAL}:{SHARDED_STEP}" if plan.sharded else OPTIMAL)


def name_of(document: Profile | Cluster | str | Path) -> str:
    """How messages name a document: by its path where it has one."""
    return str(document) if isinstance(document, str | Path) else type(document).__name__.lower()


def certify(problem: Problem, schedule: Schedule, solved: Solved | None = None) -> Certificate:
    """How far the schedule is from the best exact one under the cost model; the solver's bound counts where higher."""
    iteration_us = simulate_schedule(problem, schedule).iteration_us
    if schedule.sharded:
        bound = Bound(
            step_us=problem.compute_end_us + own_update_us(problem),
            method="search over buckets of a step that ranks share",
            note="the bound is computation alone",
        )
        return bound.certificate(iteration_us)
    method, end_us, short, ties_exact = _optimum(problem)
    bound_us = max(end_us, problem.compute_end_us) + update_bound_us(problem)
    notes = [] if solved is None else [_solver_note(solved)]
    if problem.contended and (solved is None or solved.bound_us <= bound_us):
        notes.append("the bound is the optimum on a machine where compute and network do not slow each other down")
    if short and (solved is None or solved.bound_us <= bound_us):
        notes.append(short)
    if can_share(problem):
        notes.append("among drop-in plans")
    if problem.dtype_count > 1:
        notes.append("the bound is for buckets of consecutive gradients; DDP's, one dtype each, are of another class")
    if not ties_exact and not problem.contended:
        notes.append("the time is optimal; among plans of equal time this one may not have the fewest buckets")
    bound = Bound(
        step_us=max(bound_us, solved.bound_us) if solved else bound_us,
        method=method if solved is None else f"{method}, then CP-SAT",
        note="; ".join(notes) or None,
    )
    solver = None if solved is None else SolverBound("cpsat", solved.bound_us, solved.proven, solved.limit)
    return replace(bound.certificate(iteration_us), solver=solver)


def _unasked(plan: Plan) -> Plan:
    """The plan, which says that the solver had no part in it."""
    certificate = plan.certificate
    assert certificate is not None
    return replace(plan, certificate=replace(certificate, note=f"{certificate.note}; {UNASKED}"))


def _optimum(problem: Problem) -> tuple[str, float, str | None, bool]:
    """(method, when the last bucket has come at the earliest, why that may be less than the optimum, whether ties were
    broken exactly), where compute and network do not slow each other down.
    """
    if has_two_links(problem):
        found = links_without_contention(problem)
        part = "" if found.exact and not problem.contended else ", a part of them, and local search"
        short = "links inside nodes that no two buckets share" if found.tables is not None else "computation alone"
        note = None if found.exact else f"the bound is that of {short}"
        return f"labels over buckets and collectives on two kinds of link{part}", found.bound_us, note, True
    optimum = merge_without_contention(problem)
    method = "dynamic programming with labels and local search" if problem.contended else "dynamic programming"
    return method, optimum.end_us, None, optimum.ties_exact


def _solver_note(solved: Solved) -> str:
    bound = f"no plan takes less than {solved.bound_us / 1000:,.4g} ms"
    if solved.proven:
        return f"CP-SAT proved by itself that {bound}, and that bound is short by {solved.error_us:.1g} us at the most"
    return f"CP-SAT ended at its limit of {solved.limit:g} in deterministic time, having proved that {bound}"


def _notes(problem: Problem, plan: Plan, baselines: dict[str, Prediction]) -> tuple[str, ...]:
    notes = [f"all-reduce: {problem.cost.source}"]
    measured, planned = problem.profile.world.ranks, problem.ranks
    if measured != planned:
        notes.append(f"compute was measured on {counted(measured, 'rank')}, the plan is for {planned}")
    if problem.cost.extrapolated:
        notes.append("costs are extrapolated from another number of ranks")
    ddp_us = baselines["ddp"].iteration_us
    plan_us = plan.predicted.iteration_us if plan.predicted else ddp_us
    gain = 1.0 - plan_us / ddp_us if ddp_us > 0.0 else 0.0
    if gain < 0.0:
        notes.append(
            f"nothing to gain: DDP's default buckets, which interleave dtypes, are predicted {-gain:.1%} shorter"
        )
    elif gain < NOTHING_TO_GAIN:
        notes.append(f"nothing to gain: the step is predicted {gain:.1%} shorter than with DDP's default buckets")
    return (*notes, *describe(problem, plan.updates))
