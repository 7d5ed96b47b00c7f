"""The best candidate of each lossy class, with its plan: bounded ones with their frontier, then relaxed ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from planner.decide.pipeline import run_passes
from planner.decide.plan_request import Request
from planner.documents.text import ms
from planner.emit.lower import lower
from planner.ir import GAIN, TIE, Schedule
from planner.model.codecs import LOSSY, by_codec, codec_of
from planner.model.modes import step_us
from planner.model.modes.local_updaters import LocalUpdaters, batch_prep_us
from planner.model.problem import Problem
from planner.model.updates import update_us
from planner.passes.base import Bound, Candidate, Frontier, Pass, Point
from planner.passes.joint import Joint
from planner.search.cpsat_joint import MAX_PLACES, fits, solve_joint
from runtime.plan import Plan
from runtime.plan.predicted import Certificate, FrontierPoint, SolverBound


def lossy_candidates(request: Request, exact: Schedule) -> Iterator[Candidate]:
    """Yield the best candidate of each lossy class that is allowed, from the least risky to the riskiest.

    Args:
        request: what is asked for.
        exact: the best exact schedule in which each rank updates all weights; searches begin with it.
    """
    yield bounded_candidate(request.problem, exact, bounded_passes(request), request)
    relaxed = [each for each in request.lossy if each.accuracy == "relaxed"]
    for each in relaxed:
        found = run_passes([each], exact, request.problem, request.after_pass, accuracy="relaxed")
        found = replace(found, what=each.what)
        if found.measured or len(relaxed) == 1:
            yield _relaxed(request, exact, found)


def bounded_passes(request: Request) -> list[Pass]:
    """Return the bounded passes that run."""
    return [each for each in request.lossy if each.accuracy == "bounded"]


def compress_all(request: Request, exact: Schedule, planned: Candidate) -> Candidate | None:
    """Return what `--compress all` would give; None if that is not 2 % more than what is planned by default, or the
    request names what to look at.
    """
    passes = bounded_passes(request)
    every = [
        replace(each, compress="all") if isinstance(each, Joint) and not each.compress else each for each in passes
    ]
    if every == passes:
        return None
    found, problem = bounded_candidate(request.problem, exact, every), request.problem
    return found if found.plan and found.step_us(problem) <= planned.step_us(problem) * (1.0 - GAIN) else None


def bounded_candidate(
    problem: Problem, exact: Schedule, passes: Sequence[Pass], request: Request | None = None
) -> Candidate:
    """Return the best bounded candidate, with speed over compression in its fields; a bounded schedule that was given
    takes its place. Without a request it is a prediction only: nothing is printed, and no solver asked.
    """
    given, limit, after_pass = (
        (request.given, request.cpsat_limit, request.after_pass) if request is not None else (None, None, None)
    )
    found = run_passes(passes, exact, problem, after_pass, accuracy="bounded")
    found = replace(found, what="compression")
    frontier = found.frontier
    assert frontier is not None
    # The passes do not see that norms are shared, which makes every step shorter by as much.
    if saved_us := problem.update_us - update_us(problem, exact):
        shorter = tuple(replace(point, iteration_us=point.iteration_us - saved_us) for point in frontier.points)
        frontier = replace(frontier, points=shorter, bound_us=frontier.bound_us - saved_us)
    fields = {"frontier": tuple(_point(problem, point) for point in frontier.points)}
    found = replace(found, plan_fields=fields)
    if given is not None and given.accuracy == "bounded":
        found = replace(found, schedule=given, required=True)
    elif len(frontier.points) == 1 and problem.ranks > 1:
        why_not = (
            "no compression was looked at (--compress none, every gradient is protected, or no matrix for lowrank is "
            "in the profile)"
        )
        return replace(found, schedule=exact, why_not=why_not)
    if all(bucket.whole for bucket in found.schedule.buckets):
        return replace(found, schedule=exact)
    exact_us, found_us = step_us(problem, exact), step_us(problem, found.schedule)
    bound = _bound(problem, frontier, passes)
    outside = found.required and found_us < bound.step_us * (1.0 - TIE)  # what is given may be of another class
    gain = 1.0 - found_us / exact_us if exact_us > 0.0 else 0.0
    notes = tuple(_notes(problem, found.schedule, frontier, gain))
    plan = replace(lower(problem, found.schedule), notes=notes)
    if not outside:
        plan = replace(plan, certificate=bound.certificate(found_us))
        plan = plan if limit is None else _solved(plan, frontier, limit)
    return replace(found, plan=plan)


def _relaxed(request: Request, exact: Schedule, found: Candidate) -> Candidate:
    """Return what a relaxed pass found with its plan; a relaxed schedule that was given takes its place."""
    problem, given = request.problem, request.given
    if given is not None and given.accuracy == "relaxed":
        if found.schedule != given:
            prep_us = batch_prep_us(problem) if isinstance(given.mode, LocalUpdaters) else 0.0
            found = Candidate(schedule=given, plan_fields=found.plan_fields, batch_prep_us=prep_us)
        found = replace(found, what="the given schedule", required=True)
    if found.schedule.accuracy != "relaxed":
        return found
    found_us, exact_us = step_us(problem, found.schedule), step_us(problem, exact) + found.batch_prep_us
    certificate = None if found.bound is None else found.bound.certificate(found_us)
    plan = replace(lower(problem, found.schedule), certificate=certificate)
    return replace(found, plan=replace(plan, notes=(relaxed_note(found_us, exact_us), *found.notes)))


RELAXED_GAIN = "relaxed: predicted "


def relaxed_note(found_us: float, exact_us: float) -> str:
    """Return by how much the step of a relaxed plan is shorter than that of its fallback."""
    return f"{RELAXED_GAIN}{_shorter(1.0 - found_us / exact_us)} than the best exact plan, which is the fallback"


def _point(problem: Problem, point: Point) -> FrontierPoint:
    codec, buckets = point.form.codec, point.schedule.buckets
    counts: dict[str, Any] = {of.counted_as: sum(isinstance(b.codec, of) for b in buckets) for of in LOSSY}
    return FrontierPoint(
        max_ratio=point.form.ratio,
        algorithm=point.form.transport.algorithm,
        iteration_us=point.iteration_us,
        buckets=len(buckets),
        sent_share=sent_share(problem, point.schedule),
        **counts,
        **codec.point_fields(),
    )


def _shorter(gain: float) -> str:
    """Return by what share of another step one is shorter, or longer."""
    return f"{gain:.1%} shorter" if gain >= 0.0 else f"{-gain:.1%} longer"


def sent_share(problem: Problem, schedule: Schedule) -> float:
    """Return the share of all elements that is sent in a step, factors in place of what they stand for."""
    total = max(1, int(problem.numel.sum()))
    kept_back = sum(problem.elements(b) - codec_of(b).sent_elements(problem, b) for b in schedule.buckets)
    return 1.0 - kept_back / total


def _bound(problem: Problem, frontier: Frontier, passes: Sequence[Pass]) -> Bound:
    forms = [point.form for point in frontier.points[1:]]
    ways = ["are dense"]
    for codec in LOSSY:
        if tried := [form for form in forms if isinstance(form.codec, codec)]:
            ways.append(codec.forms_text(tried))
    notes = [f"among plans whose buckets {' or '.join(filter(None, (', '.join(ways[:-1]), ways[-1])))}"]
    if problem.contended:
        notes.append("the bound is for a machine where compute and network do not slow each other down")
    if all(each.name != Joint.name for each in passes):
        notes.append(f"decided by {', '.join(each.name for each in passes)}, which does not look at all of them")
    method = "labels over merging and compression"
    method += "" if frontier.points[-1].exact else ", a part of them, and local search"
    return Bound(step_us=frontier.bound_us, method=method, note="; ".join(notes))


def _solved(plan: Plan, frontier: Frontier, limit: float) -> Plan:
    """Return the plan with the constraint program's bound in its certificate."""
    certificate, tables = plan.certificate, frontier.tables
    assert isinstance(certificate, Certificate)
    if tables is None or not fits(tables):
        note = f"CP-SAT was not asked: up to {MAX_PLACES - 1} gradients and no contention are what its model can take"
        return replace(plan, certificate=replace(certificate, note=f"{certificate.note}; {note}"))
    iteration_us = plan.predicted.iteration_us if plan.predicted else 0.0
    updating_us = plan.predicted.update_us if plan.predicted and plan.predicted.update_us else 0.0
    solution = solve_joint(tables, len(tables.cost_us), iteration_us - updating_us, limit)
    solver_us = min(solution.bound_us + updating_us, iteration_us)
    bound_us = max(certificate.lower_bound_us, solver_us)
    bound = Bound(step_us=bound_us, method=f"{certificate.method}, then CP-SAT", note=certificate.note)
    solver = SolverBound("cpsat", solver_us, solution.proven, limit)
    return replace(plan, certificate=replace(bound.certificate(iteration_us), solver=solver))


def _notes(problem: Problem, schedule: Schedule, frontier: Frontier, gain: float) -> list[str]:
    notes = [
        f"bounded: predicted {_shorter(gain)} than the best exact plan, which is the fallback",
        *(
            note
            for codec, of in by_codec(schedule.buckets)
            for note in codec.notes(problem, schedule, of, frontier.limits)
        ),
        "step by what is allowed at the most: "
        + ", ".join(f"{point.form.codec.form_text(point.form)} {ms(point.iteration_us)}" for point in frontier.points),
    ]
    shortest_us = frontier.best.iteration_us
    if schedule == frontier.chosen.schedule and frontier.chosen.iteration_us > shortest_us:
        notes.append(f"the least compression within {GAIN:.0%} of the shortest step, which is {ms(shortest_us)}")
    return notes
