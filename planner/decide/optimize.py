"""`planner.optimize`: profile and cluster in, plan out, with baselines and a certificate. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from planner.decide.defaults import ALLOWED, DEFAULT_PASSES, MORE, NO_GAIN, NOTHING_TO_GAIN
from planner.decide.lossy import RELAXED_GAIN, compress_all, lossy_candidates, relaxed_note
from planner.decide.pipeline import AfterPass, run_passes
from planner.decide.plan_request import Request
from planner.decide.scaling import OPTIMAL, scaling_curve
from planner.decide.solvers import SOLVER_SKIPPED, Solved, solve
from planner.decide.strategies import BASELINES, best_baseline, make_schedule, problem_of
from planner.documents.profile import Cluster, Profile, refuse_unmeasured
from planner.documents.text import ms, pluralize
from planner.emit.lower import lower, predict
from planner.emit.sources import describe_sources
from planner.emit.timelines import baseline_prediction
from planner.ir import GAIN, Schedule
from planner.model.modes import describe, late_gather, sharded, step_us
from planner.model.modes.late_gather import LateGather
from planner.model.modes.local_updaters import batch_prep_us
from planner.model.norms import describe_norms
from planner.model.operator_costs import describe_operators
from planner.model.problem import Problem
from planner.model.updates import update_bound_us
from planner.passes.base import Bound, Candidate, Pass
from planner.passes.late_gather import LateGathers, best_late, needed_bytes
from planner.passes.merge import merge_without_contention
from planner.passes.outer import Outer
from planner.passes.select import select
from planner.passes.shard_updates import sharded_bound
from planner.passes.topology import Topology, links_without_contention
from planner.search.tables import has_two_links
from runtime.pages import page
from runtime.plan import Accuracy, Plan, StepPlan, UpdatePlan
from runtime.plan.combinations import SOLVER, reason_against
from runtime.plan.interfaces import INTERFACES, SHARDED_STEP
from runtime.plan.predicted import Certificate, SolverBound


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
    from_step: int | None = None,
    steps: int | None = None,
    max_delay: int | None = None,
    max_period: int | None = None,
    max_memory_mib: float | None = None,
    global_batch: int | None = None,
) -> Plan:
    """Decide how the gradients of a profiled step are sent.

    Args:
        profile: a profile, the path of profile.json, or a name of the catalogue: `MODEL` or `MODEL@CLUSTER`.
        cluster: a cluster, the path of cluster.json, or a name; default: the one measured with the profile.
        accuracy: the class of plans allowed: `bounded` looks at compressed plans too, `relaxed` also at delay and local
            updaters. A riskier one is taken where it is predicted at least 2 % faster than the best less risky one; it
            carries the exact one as `fallback`.
        allow: interfaces besides drop-in that the plan may have, by name: with `sharded-step` the optimizer's step is
            sharded (ZeRO-1) where that is predicted 2 % faster, or the whole does not fit into the memory of a rank;
            with `late-gather`, which implies it, weights may be gathered during the next forward; with `outer`,
            relaxed plans may have outer steps, sharded inside nodes where `sharded-step` is allowed.
        passes: the pipeline, for example `merge{labels=4}` or `merge,sparsify{max_ratio=250}`, as text or as passes.
            Exact passes run first; where lossy plans are allowed, `joint` and `delay` run after them, or what is named
            in their place.
        after_pass: called with (name, schedule, seconds) after each pass.
        solver: `cpsat` has a constraint program look for a better plan afterwards, and its bound in the certificate.
        solver_limit: its limit in deterministic time: equal on all machines, a second or a few for each 1.0.
        compress: for lossy plans, what may be done to a bucket: `wire` (all its elements in fewer bytes), `lowrank`
            (products in place of its matrices), `sparse` (its largest elements), several with commas between, `all` or
            `none`; default: `wire`. The plan's `alternatives` have what `all` would give.
        max_ratio: for lossy plans, the largest ratio of a layer's elements to those that are sent; default: 1000, and
            250 for recurrent and embedding layers.
        max_rank: for lossy plans, the largest rank of such a product; default: 4.
        protect: for lossy plans, patterns of names of gradients that are sent whole, separated by `|`, besides biases
            and normalization layers; with `none` among them, those are not protected.
        from_step: for lossy plans, the first step with compressed buckets: those before it are exact, in the same
            buckets. Default: the first one. With a delay, which has such steps of its own, it changes nothing.
        steps: for lossy plans, steps of the training: the default of `max_ratio` is at most their cube root, from which
            on LAGS-SGD's bound (Eq. 18) does not cover it.
        max_delay: for relaxed plans, the largest k, the number of steps from one pull of new weights to the next;
            default: 4.
        max_period: for relaxed plans with `outer` allowed, the largest H, the number of local steps between two
            rounds of a fragment; default: 64.
        max_memory_mib: memory of a rank for weights, gradients, the optimizer's state and activations; where that is
            too little, the optimizer's step is sharded if that is allowed; if not, notes report whether it would help.
            Default: what cluster or profile have, if anything; shares then heed the memory of each rank.
        global_batch: samples of a step over all ranks: each rank gets a share of them by its speed (`speed` of
            cluster.json) and memory, so that the slowest one computes for as short as possible.

    Returns:
        The plan with its prediction, baselines and certificate; equal inputs give equal plans.

    Raises:
        InputError: a document is wrong, there is no cluster, or one that was not measured for plans of this class; an
            option is unknown, or the solver cannot take on that many gradients; a pass does what is not allowed.
        CheckFailed: the solver contradicts the dynamic program.
    """
    return decide(Request(**locals()))


def decide(request: Request) -> Plan:
    """Return the plan that a request asks for. Raises InputError and CheckFailed as `optimize`."""
    problem = request.problem
    refuse_unmeasured(problem.cost.cluster, request.accuracy, request.where)
    exact, replicated, solved = _exact_candidates(request)
    skipped = request.cpsat_limit is not None and solved is None
    plan = _with_step_plan(request, _exact_plan(problem, exact, solved), exact.schedule, replicated)
    step = plan.updates.step if plan.updates else None
    notes: list[str] = []
    if SHARDED_STEP in request.interfaces and request.sharding is not None and request.sharding.step != "never":
        late = step is not None and step.gather == "forward"
        notes += late_gather.notes(problem, step) if step is not None and late else sharded.notes(problem, step)
    unused = "" if request.shares else _unused_memory_limit(request)  # those heed it
    if unused and request.max_memory_mib is not None:
        notes.append(f"--max-memory-mib {request.max_memory_mib:g} changes nothing: {unused}")
    plan = replace(plan, notes=(*plan.notes, *notes))
    if request.cut is not None:
        plan = replace(plan, notes=(*plan.notes, request.cut.note))
    if skipped and plan.certificate is not None:
        note = f"{plan.certificate.note}; {SOLVER_SKIPPED}"
        plan = replace(plan, certificate=replace(plan.certificate, note=note))
    if request.accuracy != "exact":
        shares = exact.schedule.mode.shares_update
        # Lossy plans cannot shard the step: they are first compared with the best exact one that does not either.
        fallback = _exact_plan(problem, Candidate(schedule=replicated)) if shares else plan
        chosen = _choose(request, fallback, replicated)
        plan = _over_sharded(request, replace(exact, plan=plan), chosen) if shares else chosen.plan or plan
    if SHARDED_STEP not in request.interfaces and request.sharding is not None and step is not None:
        own_us = plan.predicted.iteration_us if plan.predicted else 0.0
        own_us -= batch_prep_us(problem) if describe(plan).makes_batches else 0.0
        plan = replace(plan, notes=(*plan.notes, *sharded.gain_note(problem, step, own_us)))
    plan = replace(_with_shares(request, plan), loading=problem.profile.loading)
    return plan if request.from_step is None else _with_first_steps(request.from_step, plan)


def _with_first_steps(from_step: int, plan: Plan) -> Plan:
    """Return the plan with exact first steps, and so its alternatives, where they compress synchronous steps."""

    def changed(one: Plan) -> Plan:
        return replace(one, from_step=from_step) if one.compresses and one.synchronous else one

    if plan.alternatives is not None:
        plan = replace(plan, alternatives={name: changed(each) for name, each in plan.alternatives.items()})
    if changed(plan) is not plan:
        return changed(plan)
    unused = f"--from-step {from_step} changes nothing: no synchronous step of the plan is compressed"
    return replace(plan, notes=(*plan.notes, unused))


def _with_shares(request: Request, plan: Plan) -> Plan:
    """Return the plan with the shares of the global batch, where that is given, and what they gain."""
    shares = request.shares
    if shares is None:
        return plan
    equal = decide(replace(request, profile=shares.equal, cluster=shares.cluster, global_batch=None, given=None))
    assert plan.predicted is not None
    assert equal.predicted is not None
    note = shares.note(plan.predicted.iteration_us, equal.predicted.iteration_us)
    return replace(plan, shares=shares.shares, largest_shares=shares.largest, notes=(*plan.notes, note))


def _exact_candidates(request: Request) -> tuple[Candidate, Schedule, Solved | None]:
    """Return the best exact candidate (or the exact schedule that was given), the best schedule in which each rank
    updates all weights, and what the constraint program found if it was asked.
    """
    problem, given, solved = request.problem, request.given, None
    found = run_passes(request.exact, best_baseline(problem), problem, request.after_pass)
    replicated = found.replicated
    if given is not None and given.accuracy == "exact":
        found = Candidate(schedule=given, bound=_bound_of(problem, given), required=True)
    if request.cpsat_limit is not None and reason_against(found.schedule.mode.name, SOLVER) is None:
        solved = solve(problem, found.schedule, request.cpsat_limit)
        found = replace(found, schedule=solved.schedule)
    if replicated is None or not found.schedule.mode.shares_update:
        replicated = found.schedule
    return found, replicated, solved


def _bound_of(problem: Problem, schedule: Schedule) -> Bound | None:
    """Return the bound of the class of a sharded schedule; None for others, whose bound the certificate finds."""
    if isinstance(schedule.mode, LateGather):
        return best_late(problem, schedule)[1]
    return sharded_bound(problem) if schedule.mode.shares_update else None


def _exact_plan(problem: Problem, found: Candidate, solved: Solved | None = None) -> Plan:
    """Return the plan of an exact candidate, with baselines, certificate, scaling curve, sources and notes."""
    baselines = {}
    for name in BASELINES:
        there = problem_of(problem, name)
        baseline = make_schedule(there, name)
        baselines[name] = baseline_prediction(there, baseline, predict(there, baseline, timeline=True))
    plan = lower(problem, found.schedule)
    assert plan.predicted is not None
    here_us = {name: of.iteration_us for name, of in ({OPTIMAL: plan.predicted} | baselines).items()}
    shares = found.schedule.mode.shares_update
    return replace(
        plan,
        baselines=baselines,
        certificate=_certify(problem, plan.predicted.iteration_us, solved, found.bound),
        scaling=scaling_curve(problem, here_us, ":".join([OPTIMAL, *plan.interfaces[-1:]]) if shares else OPTIMAL),
        sources=describe_sources(problem),
        notes=_notes(problem, plan, baselines["ddp"].iteration_us),
    )


def _with_step_plan(request: Request, plan: Plan, schedule: Schedule, replicated: Schedule) -> Plan:
    """Return the plan with all predictions of the optimizer's step, where it could be sharded."""
    problem, sharding = request.problem, request.sharding
    if sharding is None or not sharded.can_share(problem):
        return plan
    late = isinstance(schedule.mode, LateGather)
    whole = replicated.with_update_of(None)
    if schedule.mode.shares_update and not late:
        shared: Schedule | None = schedule
    else:
        found = sharding.sharded(whole, problem)
        shared = None if found is None else found.schedule
    needs_bytes = None if shared is None else sharded.sharded_bytes(problem, shared)
    late_us = None
    if late:
        late_us, needs_bytes = step_us(problem, schedule), needed_bytes(problem, schedule)
    elif any(isinstance(each, LateGathers) for each in request.exact):
        late_us = step_us(problem, best_late(problem, schedule)[0])
    step = (plan.updates.step if plan.updates else None) or StepPlan(sharded=schedule.mode.shares_update)
    step = replace(
        step,
        replicated_us=step_us(problem, replicated),
        sharded_us=None if shared is None else step_us(problem, shared),
        gather_us=step.gather_us or (None if shared is None else sum(sharded.exchange(problem, shared).gathers_us)),
        replicated_bytes=sharded.replicated_bytes(problem),
        sharded_bytes=needs_bytes,
        memory_bytes=sharded.memory_bytes(problem, sharding.memory_mib),
        late_us=late_us,
    )
    return replace(plan, updates=replace(plan.updates or UpdatePlan(), step=step))


def _unused_memory_limit(request: Request) -> str:
    """Return why a limit of memory decides nothing; empty where it may."""
    if any(isinstance(each, Outer) for each in request.lossy) and sharded.replicated_bytes(request.problem) is not None:
        return ""
    if request.sharding is None:
        return "the pass shard_updates heeds it, and is not among the passes; add it to --passes"
    return sharded.unused_limit_reason(request.problem)


def _choose(request: Request, exact: Plan, schedule: Schedule) -> Candidate:
    """Return the selected lossy candidate, its plan with the exact one as its fallback; else the exact candidate.

    Args:
        request: what is asked for.
        exact: the exact plan, complete but for what it reports of lossy ones.
        schedule: the schedule of it.
    """
    problem, accuracy = request.problem, request.accuracy
    candidates = list(lossy_candidates(request, schedule))
    more = compress_all(request, schedule, candidates[0])
    beyond = [] if more is None else [_more_note(problem, candidates[0], more)]
    fields = {name: value for each in candidates for name, value in each.plan_fields.items()}
    fallback = _within(exact)
    exact = replace(exact, **fields)
    chosen, refused = select(problem, [Candidate(schedule=schedule), *candidates])
    others = _alternatives(problem, candidates, chosen, more)
    if chosen.plan is None:
        why = f"{accuracy}{ALLOWED}{', and '.join(refused.values())}: the plan is exact"
        exact = replace(exact, alternatives=others or None, notes=(*exact.notes, why, *beyond))
        return replace(chosen, plan=exact)
    riskier = [refused[each.what] for each in candidates[candidates.index(chosen) + 1 :] if each.what in refused]
    beyond += [f"relaxed{ALLOWED}{', and '.join(riskier)}"] if riskier else []
    plan = replace(
        chosen.plan,
        baselines=exact.baselines,
        scaling=exact.scaling,
        sources=exact.sources,
        **fields,
        fallback=fallback,
        alternatives={"exact": fallback, **others},
        # What holds of the exact plan does not of this one.
        notes=(
            *(note.replace(NO_GAIN, f"exact plans have {NO_GAIN}") for note in exact.notes),
            *chosen.plan.notes,
            *beyond,
        ),
    )
    return replace(chosen, plan=plan)


def _within(plan: Plan) -> Plan:
    """Return a plan as it is inside of another one: a plan file says once what holds for every plan in it."""
    return replace(plan, baselines=None, scaling=None, sources=None, notes=())


def _more_note(problem: Problem, planned: Candidate, more: Candidate) -> str:
    optimizer, why = problem.profile.compute.optimizer, ""
    if optimizer is not None and optimizer.adaptive:
        why = (
            f"; selected elements train a worse model with {optimizer.name}, which divides gradients by their own size "
            f"({page('results/lags')})"
        )
    return (
        f"--compress all would take {ms(more.step_us(problem))} in place of {ms(planned.step_us(problem))}, by low "
        f"rank or by sending selected elements, which may cost much of the loss: compare first "
        f"({page('concepts/accuracy')}){why}"
    )


def _alternatives(
    problem: Problem, candidates: Sequence[Candidate], chosen: Candidate, more: Candidate | None
) -> dict[str, Plan]:
    """Return the best plan of each lossy class but the chosen one's, and what `--compress all` would give."""
    found: dict[str, Candidate] = {}
    for each in candidates:
        name = each.schedule.accuracy
        if each.plan is not None and name != chosen.schedule.accuracy:
            found[name] = min(found.get(name, each), each, key=lambda one: one.own_us(problem))
    found |= {MORE: more} if more else {}
    return {name: replace(each.plan, notes=()) for name, each in found.items() if each.plan is not None}


def _over_sharded(request: Request, exact: Candidate, lossy: Candidate) -> Plan:
    """Return the plan with a sharded step, or the lossy one where that is selected, which may have it inside nodes.

    Args:
        request: what is asked for.
        exact: the best exact candidate.
        lossy: the candidate chosen over the best exact one without a sharded step; perhaps it is that itself.
    """
    shared, riskier, problem = exact.plan, lossy.plan, request.problem
    assert shared is not None
    assert riskier is not None
    step = shared.updates.step if shared.updates else None
    limit_bytes = None if step is None else step.memory_bytes
    exact = replace(exact, memory_bytes=None if step is None else step.sharded_bytes)
    lossy = replace(lossy, memory_bytes=lossy.memory_bytes or sharded.replicated_bytes(problem))
    if riskier.accuracy != "exact" and select(problem, [exact, lossy], limit_bytes)[0] is lossy:
        if riskier.shares_step:
            return _over_shared_fallback(problem, exact, lossy)
        why = f"the optimizer's step is not sharded, as it may be: {riskier.accuracy} plans are made without that"
        return replace(riskier, notes=(*riskier.notes, why))
    others = dict(riskier.alternatives or {})
    if riskier.accuracy != "exact":
        own = replace(riskier, baselines=None, scaling=None, fallback=None, alternatives=None)
        others = {**others, riskier.accuracy: own}
    others.pop("exact", None)
    notes = shared.notes + tuple(note for note in riskier.notes if ALLOWED in note)
    if riskier.accuracy != "exact":
        notes += (_shared_note(step),)
    return replace(
        shared, frontier=riskier.frontier, delays=riskier.delays, updaters=riskier.updaters,
        alternatives=others or None, notes=notes,
    )  # fmt: skip


def _shared_note(step: StepPlan | None) -> str:
    demanded = step is not None and sharded.memory_demands(step)
    why = "memory demands a shared step, which lossy plans do not have" if demanded else (
        f"none wins {GAIN:.0%} over ranks that share the optimizer's step")  # fmt: skip
    return f"riskier plans were allowed, but {why}: the plan is exact"


def _over_shared_fallback(problem: Problem, exact: Candidate, relaxed: Candidate) -> Plan:
    """Return a relaxed plan with a step that is sharded inside nodes, with the exact one over all ranks as its
    fallback: the other may not fit into memory.
    """
    plan, shared = relaxed.plan, exact.plan
    assert plan is not None
    assert shared is not None
    fallback, interfaces = _within(shared), {*plan.interfaces, *shared.interfaces}
    gain = relaxed_note(step_us(problem, relaxed.schedule), step_us(problem, exact.schedule))
    return replace(
        plan,
        fallback=fallback,
        alternatives={**(plan.alternatives or {}), "exact": fallback},
        interface=tuple(name for name in INTERFACES if name in interfaces),
        notes=(gain, *(note for note in plan.notes if not note.startswith(RELAXED_GAIN))),
    )


def _certify(problem: Problem, iteration_us: float, solved: Solved | None, bound: Bound | None) -> Certificate:
    """Return how far a step is from the best exact one by the cost model; a higher bound of the solver counts."""
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
    if sharded.can_share(problem):
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
    return (*notes, *describe_norms(problem, plan.updates), *describe_operators(problem, plan.updates))
