"""`planner.optimize`: profile and cluster in, plan out, with baselines and a certificate. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from planner.decide.bounded import NO_GAIN, choose, split_passes
from planner.decide.defaults import DEFAULT_PASSES
from planner.decide.pipeline import AfterPass, parse_passes, run_passes, with_options
from planner.decide.scaling import OPTIMAL, scaling_curve
from planner.decide.sharded_step import (
    allowed_passes,
    alternative,
    attach_step_plan,
    check_allow,
    choose_over_sharded,
    find_sharing,
    with_gain,
    with_notes,
)
from planner.decide.solvers import SOLVER_SKIPPED, Solved, check_solver, solve
from planner.decide.strategies import BASELINES, best_baseline, make_schedule
from planner.documents.accelerators import check_memory
from planner.documents.catalog import find_cluster, find_profile, name_of
from planner.documents.profile import Cluster, Profile, refuse_unmeasured
from planner.documents.text import pluralize
from planner.emit.lower import lower, predict
from planner.emit.sources import describe_sources
from planner.emit.timelines import baseline_prediction
from planner.ir import ACCURACIES, Schedule
from planner.model.modes.local_updaters import batch_prep_us
from planner.model.modes.sharded import can_share, saves_memory
from planner.model.norms import describe_norms, update_bound_us
from planner.model.problem import Problem, make_problem
from planner.passes.base import Bound, Pass
from planner.passes.late_gather import LateGathers
from planner.passes.merge import merge_without_contention
from planner.passes.topology import Topology, links_without_contention
from planner.search.tables import has_two_links
from runtime.errors import InputError
from runtime.plan import Accuracy, Plan
from runtime.plan.combinations import SOLVER, reason_against
from runtime.plan.interfaces import SHARDED_STEP
from runtime.plan.predicted import Certificate, SolverBound

NOTHING_TO_GAIN = 0.01
"""Below this share of the step, a gain over DDP is not worth a claim."""


def optimize(
    profile: Profile | str | Path,
    cluster: Cluster | str | Path | None = None,
    *,
    accuracy: Accuracy = "exact",
    allow: str | Sequence[str] = (),
    passes: str | Sequence[Pass] = DEFAULT_PASSES,
    after_pass: AfterPass | None = None,
    solver: str = "dp",
    solver_limit: float | None = None,
    compress: str | None = None,
    max_ratio: float | None = None,
    max_rank: int | None = None,
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
            memory; with `late-gather`, which implies it, weights may be gathered beside the next forward.
        passes: the pipeline, for example `merge{labels=4}` or `merge,sparsify{max_ratio=250}`, as text or as passes.
            Exact passes run first; where lossy plans are allowed, `joint` and `delay` run after them, or what is named
            in their place.
        after_pass: called with (name, schedule, seconds) after each pass.
        solver: `cpsat` has a constraint program look for a better plan afterwards, and its bound in the certificate.
        solver_limit: deterministic time that it may take; equal on all machines, a second or a few for each 1.0.
        compress: for lossy plans, what may be done to a bucket: `wire` (all its elements in fewer bytes), `lowrank`
            (products in place of its matrices), `sparse` (its largest elements), several with commas between, `all` or
            `none`; default: `wire`; what `all` would give is among the plan's `alternatives`.
        max_rank: for lossy plans, the largest rank of such a product; default: 4.
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
    parsed = parse_passes(passes) if isinstance(passes, str) else passes
    exact_passes, lossy = split_passes(parsed, accuracy, max_ratio, protect, max_delay, compress, max_rank)
    exact_passes = with_options(exact_passes, memory_mib=check_memory(max_memory_mib))
    sharing = find_sharing(exact_passes)
    allow = check_allow(allow)
    pipeline = allowed_passes(exact_passes, allow)
    where = name_of(profile if cluster is None else cluster)
    machines = None if cluster is None else find_cluster(cluster)
    problem = make_problem(find_profile(profile), machines, where=where)
    refuse_unmeasured(problem.cost.cluster, accuracy, where)
    start = best_baseline(problem)
    found = run_passes(pipeline, start, problem, after_pass)
    skipped = solver == "cpsat" and reason_against(found.schedule.mode.name, SOLVER) is not None
    solved = solve(problem, found.schedule, limit) if solver == "cpsat" and not skipped else None
    schedule = solved.schedule if solved else found.schedule
    other = alternative(problem, schedule, start, exact_passes, sharing)
    late = any(isinstance(each, LateGathers) for each in pipeline)
    exact = _exact(problem, schedule, solved, found.bound)
    exact = plan = attach_step_plan(problem, exact, schedule, other, sharing, late=late)
    if SHARDED_STEP in allow:
        plan = with_notes(problem, plan, sharing)
    if max_memory_mib is not None:
        unused = "the pass shard_updates heeds it, and is not among the passes; add it to --passes"
        if sharing is not None:
            unused = sharing.memory_limit_unused_reason(problem)
        if unused:
            plan = replace(plan, notes=(*plan.notes, f"--max-memory-mib {max_memory_mib:g} changes nothing: {unused}"))
    if skipped and plan.certificate is not None:
        note = f"{plan.certificate.note}; {SOLVER_SKIPPED}"
        plan = replace(plan, certificate=replace(plan.certificate, note=note))
    if accuracy != "exact":
        solver_limit = limit if solver == "cpsat" else None
        # Riskier plans cannot share the step: they are first held against the best exact one that does not either.
        sharded = plan if schedule.mode.shares_update and other is not None else None
        if sharded is not None and other is not None:
            plan, schedule = _exact(problem, other), other
        plan = choose(problem, plan, schedule, accuracy, lossy, after_pass, solver_limit)
        if sharded is not None:
            required = sharing is not None and sharing.memory_requires_sharding(problem)
            plan = choose_over_sharded(
                sharded,
                plan,
                memory_requires_sharding=required and saves_memory(problem, found.schedule),
                batch_prep_us=batch_prep_us(problem),
            )
    if SHARDED_STEP not in allow:
        plan = with_gain(problem, plan, exact, sharing, batch_prep_us=batch_prep_us(problem))
    return replace(plan, loading=problem.profile.loading)


def _exact(problem: Problem, schedule: Schedule, solved: Solved | None = None, bound: Bound | None = None) -> Plan:
    """The plan of an exact schedule with all that is said beside it; `bound`: as its pass knows it."""
    baselines = {}
    for name in BASELINES:
        baseline = make_schedule(problem, name)
        baselines[name] = baseline_prediction(problem, baseline, predict(problem, baseline, timeline=True))
    plan = lower(problem, schedule)
    assert plan.predicted is not None
    here_us = {name: of.iteration_us for name, of in ({OPTIMAL: plan.predicted} | baselines).items()}
    return replace(
        plan,
        baselines=baselines,
        certificate=_certify(problem, plan.predicted.iteration_us, solved, bound),
        scaling=scaling_curve(
            problem, here_us, ":".join([OPTIMAL, *plan.interfaces[-1:]]) if schedule.mode.shares_update else OPTIMAL
        ),
        sources=describe_sources(problem),
        notes=_notes(problem, plan, baselines["ddp"].iteration_us),
    )


def _certify(problem: Problem, iteration_us: float, solved: Solved | None, bound: Bound | None) -> Certificate:
    """How far a step is from the best exact one under the cost model; the solver's bound counts where higher."""
    if bound is not None:
        return bound.certificate(iteration_us)
    # When the last bucket has come at the earliest, where compute and network do not slow each other down.
    if has_two_links(problem):
        links = links_without_contention(problem, Topology.climbs)
        end_us, exact, ties_exact = links.bound_us, links.exact, True
        method = "labels over buckets and collectives on two kinds of link"
        method += "" if exact and not problem.contended else ", a part of them, and local search"
        bound_of = "links inside nodes that no two buckets share" if links.tables is not None else "computation alone"
    else:
        optimum = merge_without_contention(problem)
        end_us, exact, ties_exact, bound_of = optimum.end_us, True, optimum.ties_exact, ""
        method = "dynamic programming with labels and local search" if problem.contended else "dynamic programming"
    bound_us = max(end_us, problem.compute_end_us) + update_bound_us(problem)
    counts = solved is None or solved.bound_us <= bound_us
    notes = []
    if solved is not None:
        text = f"no plan takes less than {solved.bound_us / 1000:,.4g} ms"
        if solved.proven:
            text = (
                f"CP-SAT proved by itself that {text}, and that bound is short by {solved.error_us:.1g} us at the most"
            )
        else:
            text = f"CP-SAT ended at its limit of {solved.limit:g} in deterministic time, having proved that {text}"
        notes.append(text)
    if problem.contended and counts:
        notes.append("the bound is the optimum on a machine where compute and network do not slow each other down")
    if not exact and counts:
        notes.append(f"the bound is that of {bound_of}")
    if can_share(problem):
        notes.append("among drop-in plans")
    if problem.dtype_count > 1:
        notes.append("the bound is for buckets of consecutive gradients; DDP's, one dtype each, are of another class")
    if not ties_exact and not problem.contended:
        notes.append("the time is optimal; among plans of equal time this one may not have the fewest buckets")
    note = "; ".join(notes) or None
    if solved is None:
        return Bound(step_us=bound_us, method=method, note=note).certificate(iteration_us)
    bound = Bound(step_us=max(bound_us, solved.bound_us), method=f"{method}, then CP-SAT", note=note)
    solver = SolverBound("cpsat", solved.bound_us, solved.proven, solved.limit)
    return replace(bound.certificate(iteration_us), solver=solver)


def _notes(problem: Problem, plan: Plan, ddp_us: float) -> tuple[str, ...]:
    notes = [f"all-reduce: {problem.cost.source}"]
    measured, planned = problem.profile.world.ranks, problem.ranks
    if measured != planned:
        notes.append(f"compute was measured on {pluralize(measured, 'rank')}, the plan is for {planned}")
    if problem.cost.extrapolated:
        notes.append("costs are extrapolated from another number of ranks")
    plan_us = plan.predicted.iteration_us if plan.predicted else ddp_us
    gain = 1.0 - plan_us / ddp_us if ddp_us > 0.0 else 0.0
    if gain < 0.0:
        dtypes = ", which interleave dtypes," if problem.dtype_count > 1 else ""
        notes.append(f"{NO_GAIN}DDP's default buckets{dtypes} are predicted {-gain:.1%} shorter")
    elif gain < NOTHING_TO_GAIN:
        notes.append(f"{NO_GAIN}the step is predicted {gain:.1%} shorter than with DDP's default buckets")
    return (*notes, *describe_norms(problem, plan.updates))
